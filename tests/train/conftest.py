"""What tests of training share: one tiny target, and a cache of data sets for each test."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from longspec_jax import cli

from .tiny import command, save_tiny_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a one-layer target that no test changes."""
    return save_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``datasets`` keeps what it reads."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the training command says of arguments that it refuses."""

    def said(*given: str) -> str:
        capsys.readouterr()
        assert command(*given) == cli.BAD_INPUT
        error = capsys.readouterr().err.strip()
        assert "Traceback" not in error
        return error

    return said
