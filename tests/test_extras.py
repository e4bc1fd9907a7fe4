"""Whoever lacks an extra's package is told what to type."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from longspec_jax import extras

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
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


@pytest.mark.parametrize("name", ["ml_collections", "ml_collections.config_flags"])
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
    assert "(matplotlib): pip install -e '.[notebook]'" in (
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
