"""The script for users of transformers, run as it stands."""

from pathlib import Path

import pytest

from tests.infer.toys import save_toy

pytestmark = pytest.mark.full
SCRIPT = Path(__file__).parents[3] / "notebooks" / "with_transformers.py"


def test_the_script_runs_and_says_the_same_text(tmp_path: Path, monkeypatch, capsys) -> None:
    """With the toy in the place of the models that it names."""
    pytest.importorskip("torch")
    script = SCRIPT.read_text()
    target, draft = save_toy(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("report.txt").write_text("ab cd gh")
    script = script.replace("lmsys/vicuna-7b-v1.5-16k", str(target), 1)
    script = script.replace("sail/longspec-vicuna-7b-v1.5-16k", str(draft), 1)
    exec(compile(script, str(SCRIPT), "exec"), {})
    printed = capsys.readouterr().out
    assert "the same tokens: True" in printed and "tokens per target pass" in printed
