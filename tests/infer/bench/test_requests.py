"""Many requests over few slots, on a toy: every way gives the same tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.bench import __main__ as bench
from infer.bench import requests
from tests.infer.toys import toy_spec

OPTIONS = ["--requests=5", "--row_slots=2", "--new_tokens=6"]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy_spec()
    monkeypatch.setattr(requests, "LongSpec", SimpleNamespace(demo=lambda tree: spec))
    monkeypatch.setattr(requests, "CPU_LENGTHS", (3, 40))
    monkeypatch.setattr(requests, "demo_prompts", lambda: {"one": "ab cd " * 30})


def test_every_way_gives_the_tokens_of_single_runs(toy: None, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "requests.json"
    assert bench.main(["requests", *OPTIONS, "--tree=2,2", f"--json={file}"]) == 0
    written = json.loads(file.read_text())
    rows = {row["way"]: row for row in written["rows"]}
    assert list(rows) == list(requests.WAYS) and written["header"]["row_slots"] == 2
    for row in rows.values():
        assert row["identical_to_alone_fraction"] == 1.0
        assert row["tokens"] == rows["alone"]["tokens"] > 5
    assert rows["slots"]["compilations"] == 0
    assert rows["slots"]["seconds_to_last_compilation"] > 0
    assert "5 requests of" in capsys.readouterr().out


def test_a_difference_is_counted(toy: None, tmp_path: Path, monkeypatch: Any) -> None:
    """Negative control."""
    slots = requests.slots
    wrong = lambda *arguments: [(0,), *slots(*arguments)[1:]]  # noqa: E731
    monkeypatch.setattr(requests, "WAYS", {"alone": requests.alone, "slots": wrong})
    file = tmp_path / "requests.json"
    assert bench.main(["requests", *OPTIONS, "--tree=2,2", f"--json={file}"]) == 0
    found = json.loads(file.read_text())["rows"][1]["identical_to_alone_fraction"]
    assert found == pytest.approx(0.8)
