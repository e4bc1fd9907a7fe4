"""``python -m infer.bench retrieval`` on the tiny shape, and what it simulates."""

import json
from pathlib import Path

import pytest

from infer.bench import __main__ as bench


def test_rows_have_what_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "retrieval.json"
    command = "retrieval --shape=tiny --context=700 --new_tokens=32 --agreement=0.5,0.999"
    assert bench.main([*command.split(), f"--json={file}"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["method"] for row in rows] == ["longspec", "at_budget", "retrieval", "retrieval"]
    assert rows[1]["context"] == rows[2]["budget"] == 256
    low, high = rows[2:]
    assert high["acceptance_length"] > low["acceptance_length"] > 1
    for row in rows[2:]:
        assert all(row[name] > 0 for name in ("choose_ms", "select_ms", "speedup_over_longspec"))
    assert "tiny at 700, retrieve 256, chain 8: faster than one level" in capsys.readouterr().out
