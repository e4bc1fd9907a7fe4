"""Metrics of a run: the file, its repair, TensorBoard, and Weights & Biases."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest

from configs import demo
from longspec_jax import cli
from tests.kit import each_row
from train import run
from train.acceptance import implied_length
from train.arguments import from_config
from train.config import LogConfig, RunConfig
from train.metrics import Guarded, Metrics, Record, open_writers, read_records


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


def config(**log: Any) -> RunConfig:
    whole = from_config(demo.get_config("tiny").to_dict())
    return dataclasses.replace(whole, log=LogConfig(**log))


def metrics(workdir: Path, **log: Any) -> Metrics:
    return Metrics(workdir / "metrics.jsonl", open_writers(config(**log), workdir))


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw of a stage."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    tags = read.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in tags}


def test_tensorboard_draws_the_log_whatever_was_repeated(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = metrics(tmp_path)
    log.write("a", 0, {"loss": 4.0})  # Before anybody asked for TensorBoard.
    log.close()
    log = metrics(tmp_path, tensorboard=True)
    for step in range(1, 4):
        log.write("a", step, {"loss": 4.0 - step, "tau": float("nan")})
    log.write("b", 0, {"loss": 9.0})
    # What a stage has written can be seen at once.
    assert curves(tmp_path / "tensorboard" / "a") == {"loss": [(0, 4), (1, 3), (2, 2), (3, 1)]}
    log.close()
    log = metrics(tmp_path, tensorboard=True)
    log.rewind("a", 2)  # To a checkpoint at step 2.
    log.write("a", 2, {"loss": 1.5, "heldout_loss": 5.0})
    log.close()
    again = {"loss": [(0, 4), (1, 3), (2, 1.5)], "heldout_loss": [(2, 5)]}
    assert curves(tmp_path / "tensorboard" / "a") == again
    assert curves(tmp_path / "tensorboard" / "b") == {"loss": [(0, 9)]}
    assert "tensorflow" not in sys.modules


def test_a_working_folder_is_one_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [Mock(), Mock(), Mock()]
    init = Mock(side_effect=begun)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for _ in range(2):
        log = metrics(tmp_path, wandb="drafts")
        log.write("draft_short", 3, {"loss": 1.25, "tau": float("nan")})
        log.close()
    given, again = (each.kwargs for each in init.call_args_list)
    assert given["project"] == "drafts" and given["name"] == tmp_path.name
    assert given["config"]["log"] == {"tensorboard": False, "wandb": "drafts"}
    assert given["resume"] == "allow" and given == again and given["id"].isalnum()
    assert begun[0].mock_calls == [
        call.define_metric("draft_short/*", step_metric="draft_short/step"),
        call.log({"draft_short/loss": 1.25, "draft_short/step": 3}),
        call.finish(),
    ]
    metrics(tmp_path.parent, wandb="drafts")
    assert init.call_args.kwargs["id"] != given["id"]


@dataclasses.dataclass
class Failing:
    """Fails from a record on."""

    after: int
    written: int = 0
    closed: int = 0

    def write(self, record: Record) -> None:
        if self.written == self.after:
            raise ConnectionError("no route to host\nand more")
        self.written += 1

    def close(self) -> None:
        self.closed += 1
        raise OSError("it is gone")


def test_what_fails_is_told_once_and_the_file_has_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unable() -> Failing:
        raise PermissionError("not logged in")

    broken, last = Failing(1), Failing(9)
    steady = [Guarded(n, m) for n, m in
              (("A", unable), ("B", lambda: broken), ("C", lambda: last))]  # fmt: skip
    log = Metrics(tmp_path / "metrics.jsonl", steady)
    for step in range(4):
        log.write("a", step, {"loss": 1.0})
    log.close()
    told = [line for line in capsys.readouterr().err.splitlines() if "no metrics" in line]
    assert told == [
        f"{name} gets no metrics from here on ({reason}); metrics.jsonl does"
        for name, reason in (("A", "not logged in"), ("B", "no route to host"), ("C", "it is gone"))
    ]
    assert (broken.written, broken.closed, last.written, last.closed) == (1, 0, 4, 1)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


def test_a_folder_that_cannot_be_written_costs_only_the_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file in its place")
    log = metrics(tmp_path, tensorboard=True)
    log.write("a", 0, {"loss": 1.0})
    log.write("a", 1, {"loss": 1.0})
    log.close()
    assert capsys.readouterr().err.count("TensorBoard gets no metrics from here on") == 1


def test_nothing_is_imported_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    assert open_writers(config(), tmp_path) == ()


def test_only_the_first_process_opens_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.metrics.is_first", lambda: False)
    assert open_writers(config(tensorboard=True, wandb="x"), tmp_path) == ()
    assert not list(tmp_path.iterdir())


@each_row(
    ("given", "module"),
    [("--config.log.tensorboard", "tensorboard"), ("--config.log.wandb=drafts", "wandb")],
)
def test_a_missing_extra_is_one_sentence_before_anything_is_done(
    given: str,
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run.main(["--config=demo:tiny", given, f"--workdir={tmp_path / 'x'}"]) == cli.BAD_INPUT
    [sentence] = capsys.readouterr().err.splitlines()
    option = given.partition("=")[0]
    expected = f"error: {option} needs packages that are not installed ({module}): pip install "
    assert sentence.startswith(expected) and f"[{module}]" in sentence
    assert not (tmp_path / "x").exists()


def test_a_project_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match="--config.log.wandb=me/drafts must be .* without /; .*WANDB_ENT"
    ):
        LogConfig(wandb="me/drafts")
