"""Whoever lacks an extra's package is told what to type."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from longspec_jax import extras
from tests.kit import each_row

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NETWORK = "LONGSPEC_TEST_NETWORK"
DISTRIBUTION = "longspec_jax["
KNOWN_GOOD = sorted((ROOT / "constraints").glob("jax-*.txt"))
DISTRIBUTIONS = {
    "ray": "ray[serve]",
    "absl": "absl-py",
    "orbax": "orbax-checkpoint",
    "prometheus_client": "prometheus-client",
    "pyarrow": "datasets",
}
"""Importable names that are not their distribution's."""


def failure(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


@each_row("name", ["ml_collections", "ml_collections.config_flags"])
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.metadata, "version", lambda name: "0.1.0")
    assert extras.missing_extra(failure(name)) == (
        "training needs packages that are not installed (ml_collections): "
        "pip install 'longspec_jax[train]'"
    )


def test_a_checkout_that_was_never_installed_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "version", absent)
    assert "(matplotlib): pip install -e '.[eval]'" in (
        extras.missing_extra(failure("matplotlib")) or ""
    )


def test_other_modules_are_somebody_elses() -> None:
    assert extras.missing_extra(failure("longspec_jax.absent")) is None
    assert extras.missing_extra(ModuleNotFoundError("no name")) is None


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.missing_packages("train") is None
    for name in ("optax", "absl", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "(absl, optax): pip install" in (extras.missing_packages("train") or "")


def test_the_table_is_what_pyproject_installs() -> None:
    declared = PROJECT["optional-dependencies"]
    for module, extra in extras.MODULES.items():
        distribution = DISTRIBUTIONS.get(module, module)
        assert any(
            line.startswith((f"{distribution}>", f"{distribution}=")) for line in declared[extra]
        )
    assert extras.PURPOSES.keys() == set(extras.MODULES.values())
    named = {DISTRIBUTIONS.get(m, m) for m, extra in extras.MODULES.items() if extra == "train"}
    assert len(named) == len(declared["train"])


def test_no_extra_of_a_gpu_contradicts_torch() -> None:
    """Every release of torch wants one triton of its own."""
    declared = PROJECT["optional-dependencies"]
    asks = {extra for extra, lines in declared.items() if any("triton" in line for line in lines)}
    assert asks == {"triton"}
    assert not any(line.startswith(("triton", "torch")) for line in declared["triton"])


def test_known_good_sets_are_what_pyproject_asks_for() -> None:
    """Every required package is pinned, to a version that is allowed here."""
    declared = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    asked = [Requirement(line) for line in declared if not line.startswith(DISTRIBUTION)]
    for file in KNOWN_GOOD:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}
        required = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
        assert required <= pins.keys(), file.name
        assert str(pins["jax"]) == file.stem.replace("-", "=="), file.name
        for each in asked:
            pin = pins.get(canonicalize_name(each.name))
            if pin is not None and each.marker is None:
                assert each.specifier.contains(next(iter(pin.specifier)).version), (file.name, each)


def resolved(wanted: str, *more: str) -> dict[str, str]:
    """The versions that pip would install from the package index; nothing is installed.

    Folders of wheels that this machine's pip is configured with are left out.
    """
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    environment = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
    found = subprocess.run(
        [*pip, "--report", "-", f"{ROOT}[{wanted}]", *more],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return {
        each["metadata"]["name"].lower(): each["metadata"]["version"]
        for each in json.loads(found.stdout)["install"]
    }


asks_the_index = pytest.mark.skipif(
    NETWORK not in os.environ, reason=f"asks a package index; set {NETWORK}=1"
)


@asks_the_index
@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_all_extras_can_be_installed_together(cuda: str) -> None:
    """With either CUDA, and therefore each of them alone and in pairs."""
    others = sorted(PROJECT["optional-dependencies"].keys() - {"cuda12", "cuda13"})
    chosen = resolved(",".join([cuda, *others]))
    print({name: chosen.get(name) for name in ("jax", "flax", "torch", "triton", "jax-triton")})
    if sys.version_info < (3, 12):
        assert chosen["jax"].startswith("0.10.") and "jax-triton" not in chosen
        return
    assert chosen["jax"].startswith("0.11.")  # jax-triton 0.4 fails with jax 0.12.
    # It works with triton 3.7 and later, 0.3 with 3.6.
    assert chosen["jax-triton"].startswith("0.3.") == chosen["triton"].startswith("3.6.")


@asks_the_index
@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.version_info < (3, 12), reason="jax 0.11 needs Python 3.12")
@pytest.mark.parametrize("file", KNOWN_GOOD, ids=lambda file: file.stem)
def test_a_known_good_set_can_be_installed(file: Path) -> None:
    """With everything but the extra that needs an older jax than the newest."""
    extras = sorted(PROJECT["optional-dependencies"].keys() - {"cuda12", "triton"})
    assert resolved(",".join(extras), "--constraint", str(file))["jax"] == file.stem[4:]
