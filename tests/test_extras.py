"""Whoever lacks an extra's package is told what to type."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from longspec_jax import extras
from tests.kit import each_row

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NETWORK = "LONGSPEC_TEST_NETWORK"
DISTRIBUTION = "longspec_jax["
KNOWN_GOOD = sorted((ROOT / "constraints").glob("jax-*.txt"))
DISTRIBUTIONS = {
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
    assert "(matplotlib): pip install -e '.[charts]'" in (
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


def test_what_is_large_has_an_extra_of_its_own() -> None:
    """The extra `all` installs no linters and no PyTorch, and changes no version of Triton."""
    declared = PROJECT["optional-dependencies"]
    assert declared["test"] == ["longspec_jax[dev,torch]"]
    for extra in ("all", "dev"):
        [inner] = [line for line in declared[extra] if line.startswith(DISTRIBUTION)]
        named = set(inner.removeprefix(DISTRIBUTION).removesuffix("]").split(","))
        assert not named & {"dev", "test", "torch", "triton"}, extra


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


PYTHONS = ("3.11", "3.12", "3.13")
COMBINED = (
    *(
        (cuda, *others)
        for cuda in ("cuda12", "cuda13")
        for others in ((), ("test",), ("all",), ("train", "docs"), ("triton",), ("triton", "torch"))
    ),
    ("test", "docs"),
    tuple(sorted(PROJECT["optional-dependencies"].keys() - {"cuda12", "cuda13"})),
)
"""Extras that users install together; the last row is all that do not name a CUDA."""


def resolved(python: str, wanted: Iterable[str], *more: str) -> dict[str, str]:
    """The versions that an index offers to this Python, which need not be here.

    By uv, which reads the index's metadata and downloads no wheel. It knows nothing of the folders
    of wheels that this machine's pip is configured with.
    """
    compiled = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet"]
    compiled += ["--no-header", "--no-annotate", "--strip-extras", "--python-version", python]
    extras = [word for extra in wanted for word in ("--extra", extra)]
    command = [*compiled, *extras, *more, "pyproject.toml"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    pins = map(Requirement, found.stdout.splitlines())
    return {pin.name: next(iter(pin.specifier)).version for pin in pins}


asks_the_index = pytest.mark.skipif(
    NETWORK not in os.environ, reason=f"asks a package index by uv, of the extra dev: {NETWORK}=1"
)


@asks_the_index
@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", PYTHONS)
def test_extras_that_users_combine_can_be_installed(python: str) -> None:
    alone = ((extra,) for extra in PROJECT["optional-dependencies"])
    for wanted in (*alone, *COMBINED):
        chosen = resolved(python, wanted)
        if python == "3.11":
            assert chosen["jax"].startswith("0.10.") and "jax-triton" not in chosen, wanted
        elif "triton" not in wanted:
            assert Version(chosen["jax"]) >= Version("0.12"), wanted
        else:
            assert chosen["jax"].startswith("0.11."), wanted  # jax-triton 0.4 fails with 0.12.
            # It works with triton 3.7 and later, 0.3 with 3.6.
            triton = chosen.get("triton", "3.7")
            assert chosen["jax-triton"].startswith("0.3.") == triton.startswith("3.6."), wanted


@asks_the_index
@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", PYTHONS[1:])  # jax 0.11 needs Python 3.12.
@pytest.mark.parametrize("file", KNOWN_GOOD, ids=lambda file: file.stem)
def test_a_known_good_set_can_be_installed(file: Path, python: str) -> None:
    """With everything but the extra that needs an older jax than the newest."""
    extras = sorted(PROJECT["optional-dependencies"].keys() - {"cuda12", "triton"})
    assert resolved(python, extras, "--constraint", str(file))["jax"] == file.stem[4:]
