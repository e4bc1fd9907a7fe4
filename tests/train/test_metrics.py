"""What a run writes: JSON lines, plain lines or a bar, and the model card."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import demo
from train.acceptance import implied_length
from train.card import portable_command, write_card
from train.config import from_config
from train.metrics import Metrics
from train.records import read_records


def written(tmp_path: Path) -> Path:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.start("draft_short", 2, 5)
    metrics.advance()
    metrics.write("draft_short", 3, {"loss": 1.23456789, "grad_norm": float("nan")})
    metrics.finish()
    metrics.close()
    return tmp_path / "metrics.jsonl"


def test_lines_are_json_and_a_file_gets_no_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path)
    written(tmp_path)  # A second call of the command appends.
    record = {"stage": "draft_short", "step": 3, "loss": 1.23457, "grad_norm": None}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [record, record]
    error = capsys.readouterr().err
    assert error == "draft_short step 3: loss=1.23457 grad_norm=None\n" * 2


def test_a_terminal_gets_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    written(tmp_path)
    error = capsys.readouterr().err
    assert "draft_short" in error and "3/5" in error and "\r" in error and "loss=1.23" in error


def test_a_log_whose_last_line_was_cut_off_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By kill -9, or a disk that was full."""
    path = written(tmp_path)
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:-cut])
        kept = 1 if cut > 1 else 2  # All but the end of a line is the line.
        assert len(read_records(path)) == kept
        capsys.readouterr()
        Metrics(path).close()
        assert path.read_bytes() == kept * whole
        assert ("was cut off" in capsys.readouterr().err) == (kept == 1 and cut < len(whole))
    path.write_bytes(whole + b'\xff{"stage": 3}\n[1]\n' + whole)
    assert len(read_records(path)) == 2


def test_what_a_stage_will_repeat_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in range(3):
        metrics.write("a", step, {"loss": 1.0})
        metrics.write("b", step, {"loss": 2.0})
    assert metrics.count("a") == 3
    metrics.rewind("a", 5)
    metrics.rewind("a", 1)
    metrics.write("a", 1, {"loss": 3.0})
    metrics.close()
    assert [(r["stage"], r["step"], r["loss"]) for r in read_records(path)] == [
        ("a", 0, 1.0), ("b", 0, 2.0), ("b", 1, 2.0), ("b", 2, 2.0), ("a", 1, 3.0),
    ]  # fmt: skip
    assert Metrics(path).count("a") == 2


def test_agreement_implies_a_chain_length() -> None:
    assert implied_length(np.asarray([0.5, 0.5, 0.0, 1.0])) == 1 + 0.5 + 0.25
    assert implied_length(np.ones(4)) == 5 and implied_length(np.zeros(4)) == 1


def test_the_card_counts_all_training_and_names_no_folder_of_its_author(tmp_path: Path) -> None:
    config = from_config(demo.get_config().to_dict())
    lines = [
        {"stage": "draft_short", "step": 1, "loss": 5.0, "elapsed": 50.0},
        {"stage": "draft_short", "step": 9, "loss": 2.0, "elapsed": 90.0},  # After a resume.
        {
            "stage": "draft_long",
            "step": 4,
            "tau_chain": 3.5,
            "tau_chain_far": None,
            "elapsed": 30.0,
        },
    ]
    log = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(log + '{"stage": "draft_long", "st')
    (tmp_path / "data.jsonl").touch()
    given = [
        f"--config={tmp_path}/configs/demo.py:smoke",
        f"--workdir={tmp_path}",
        f"--config.data.files={tmp_path}/data.jsonl",
        "--config.target=~/models/vicuna",
        "--coordinator=node7:99",
        "--config.seed=3",
    ]
    write_card(tmp_path, config, portable_command("python -m train.run", given))
    card = (tmp_path / "README.md").read_text()
    assert "2.0 minutes of training in all calls" in card
    assert (
        "`python -m train.run --config=configs/demo.py:smoke --config.data.files=data.jsonl "
        "--config.target=vicuna --config.seed=3`"
    ) in card
    assert str(tmp_path) not in card and "node7" not in card and "None" not in card
    assert (
        "- draft_short: step 9, loss 2.0" in card and "- draft_long: step 4, tau_chain 3.5" in card
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    {
        "vicuna7b:long": "vicuna7b:long",
        "vicuna7b.py": "vicuna7b.py",
        "/home/me/configs/vicuna7b.py:long": "configs/vicuna7b.py:long",
        "/home/me/mine.py": "mine.py",
        "configs/mine.py:x": "mine.py:x",
    }.items(),
)
def test_the_card_names_a_configuration_as_others_find_it(given: str, kept: str) -> None:
    apart = ["--config", given, "--workdir", "/home/me/runs", "--distributed"]
    expected = f"longspec-train --config={kept} --distributed"
    assert portable_command("longspec-train", apart) == expected
    together = [f"--config={given}", "--workdir=/home/me/runs", "--distributed"]
    assert portable_command("longspec-train", together) == expected
