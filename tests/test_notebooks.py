"""The notebooks run top to bottom on a CPU, and are committed without outputs."""

import importlib.metadata
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from longspec_jax.embedded import DEMO
from tests.children import environment
from tests.kit import each_row

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600
SHORTER = {
    "evaluation": {
        "--context=512": "--context=256",
        "--max_new_tokens=48": "--max_new_tokens=16",
        r"\"--draft=ngram\", ": "",
        r", \"--method=ngram\"": "",
    },
    "quickstart": {
        "[:1800]": "[:100]",
        "max_new_tokens=128": "max_new_tokens=24",
        "TreeConfig((4, 16, 16, 16, 16))": "TreeConfig((1, 1, 1))",
    },
    "train_tiny_draft": {
        "[-40:]": "[-12:]",
        "config.accept_seq_len = 20, 2, 256": "config.accept_seq_len = 20, 2, 128",
        "stage(256, 4,": "stage(128, 4,",
        "max_seconds=20.0": "max_seconds=4.0",
        "[:400]": "[:100]",
        "max_new_tokens=96": "max_new_tokens=24",
    },
}
"""What the notebooks name, and with what less of it they run here: a program is seconds."""


@each_row("path", NOTEBOOKS)
def test_outputs_are_stripped(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@each_row("path", NOTEBOOKS)
def test_the_first_cell_installs_the_package_where_it_is_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And only there: the checkout around the notebook, or what is named. Or only its extras."""
    installed: list[str] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: installed.append(command[-1]))
    monkeypatch.setattr("shutil.which", lambda name: None)  # No GPU.
    cells = nbformat.read(path, as_version=4).cells
    source = next(cell.source for cell in cells if cell.cell_type == "code")
    assert 'REPOSITORY = ""' in source

    def run(repository: str = "") -> None:
        exec(source.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}"), {})

    run()
    assert not installed, "all is there"
    found = [SimpleNamespace(name="longspec_jax")]  # As after the README's first command.
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    run()
    assert re.fullmatch(r"longspec_jax\[notebook(,eval|,train)?\]", installed.pop())
    found.clear()
    monkeypatch.chdir(path.parent)
    run()
    assert installed.pop().endswith(f"] @ {ROOT.as_uri()}") and not installed
    monkeypatch.chdir(tmp_path)
    run("https://example.org/longspec_jax")
    assert installed.pop().endswith("] @ git+https://example.org/longspec_jax")
    with pytest.raises(RuntimeError, match="set REPOSITORY above to the git address"):
        run()


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
    """Every cell, in a kernel of its own that sees a CPU, one device and an empty cache.

    With shorter texts, less training and fewer programs than a reader's, only by ``SHORTER``.
    """
    seen = environment(installed, XDG_CACHE_HOME=str(tmp_path), MPLBACKEND="agg")
    for name, value in seen.items():
        monkeypatch.setenv(name, value)
    text = path.read_text()
    for number, smaller in SHORTER.get(path.stem, {}).items():
        assert text.count(number) == 1, f"{path.name} no longer says {number} once"
        text = text.replace(number, smaller)
    notebook = nbformat.reads(text, as_version=4)
    client = NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    if path.stem == "quickstart":  # It promises accepted tokens in colour, on any machine.
        shown = [one.get("text", "") for cell in notebook.cells for one in cell.get("outputs", ())]
        assert any("\x1b[32m" in text for text in shown)
