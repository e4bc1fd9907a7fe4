"""Curves of one or more runs, from logs as they are."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from contrib import plot


def log(folder: Path, *records: dict) -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + '{"stage": "draft_short", "st')
    return folder


RECORDS = (
    {"stage": "corpus", "step": 0, "seconds": 3.0},
    {"stage": "target_short", "step": 0, "loss": 5.0},
    {"stage": "target_short", "step": 1, "heldout_loss": 4.0},
    {"stage": "draft_short", "step": 0, "loss": 3.0},
    {"stage": "draft_short", "step": 1, "loss": None},
    {"stage": "draft_short", "step": 2, "tau_chain": 2.5, "tau_chain_far": None},
)


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """Title, label of the ordinate and lines of every panel of the next figure."""
    panels: list[tuple[str, str, list[str]]] = []
    save = Figure.savefig

    def saving(figure, *given, **more) -> None:
        panels.extend(
            (a.get_title(), a.get_ylabel(), [line.get_label() for line in a.lines])
            for a in figure.axes
        )
        save(figure, *given, **more)

    monkeypatch.setattr(Figure, "savefig", saving)
    return panels


def test_a_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panels, png = drawn(monkeypatch), tmp_path / "curves.PNG"
    assert plot.main([str(log(tmp_path / "a", *RECORDS)), f"--png={png}"]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert panels == [
        ("target_short", "loss", ["loss", "heldout_loss"]),
        ("draft_short", "loss", ["loss"]),
        ("draft_short", "tokens per pass", ["tau_chain"]),
    ]


def test_runs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = drawn(monkeypatch)
    one, two = (log(tmp_path / name, RECORDS[3]) for name in ("one", "two"))
    assert plot.main([str(one / "metrics.jsonl"), str(two), f"--png={tmp_path}/x.png"]) == 0
    assert panels == [("draft_short", "loss", [f"{one}: loss", f"{two}: loss"])]


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = str(log(tmp_path / "empty", RECORDS[0]))
    png = f"--png={tmp_path}/x.png"
    for given, sentence in {
        (str(tmp_path / "absent"), png): "absent",
        (empty, png): "no run has any record of loss, heldout_loss to draw",
    }.items():
        assert plot.main(given) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
    assert plot.main([empty, "--png=x.jpg"]) == 2
    assert "'x.jpg' must be the name of a .png file" in capsys.readouterr().err
