"""The site of the pages can be built, without a link that leads nowhere: ``mkdocs build --strict``.

Runs where the extra ``docs`` is installed.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings")))

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs the extra docs")


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_site_is_built(tmp_path: Path) -> None:
    """With the API of every public name, and the options of every command."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    reference = {path.parent.name: path.read_text() for path in tmp_path.glob("reference/*/*.html")}
    assert 'id="longspec_jax.LongSpec.generate"' in reference["api"]
    assert 'id="longspec_jax.Stats.acceptance_length"' in reference["api"]
    assert "--draft_option" in reference["options"]
    assert "fsdp" in reference["configuration"]
