"""The notebooks run top to bottom on a CPU, and are committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from longspec_jax.loading import DEMO

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The checkout as pip installs it: the commands' folders under the library's name."""
    library = tmp_path / "site" / "longspec_jax"
    library.mkdir(parents=True)
    folders = [ROOT / name for name in ("train", "infer", "configs")]
    for path in [*(ROOT / "longspec_jax").iterdir(), *folders]:
        (library / path.name).symlink_to(path)
    return library.parent


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.skipif(not DEMO.is_dir(), reason="the demo model is not in this checkout")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, installed: Path, monkeypatch, tmp_path) -> None:
    """Every cell, in a kernel of its own that sees a CPU, one device and an empty cache."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
