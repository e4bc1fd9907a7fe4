"""TensorBoard and Weights & Biases get what ``metrics.jsonl`` gets, and never end a run."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs import demo
from train import run, writers
from train.config import LogConfig, RunConfig, from_config
from train.metrics import Metrics
from train.records import Record


def config(**log: Any) -> RunConfig:
    whole = from_config(demo.get_config("tiny").to_dict())
    return dataclasses.replace(whole, log=LogConfig(**log))


def metrics(workdir: Path, **log: Any) -> Metrics:
    return Metrics(workdir / "metrics.jsonl", writers.open_writers(config(**log), workdir))


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


class FakeRun:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], FakeRun]]:
    """What a stand-in for wandb was asked to begin."""
    begun: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**given: Any) -> FakeRun:
        begun.append((given, FakeRun()))
        return begun[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return begun


def test_a_working_folder_is_one_run_of_weights_and_biases(
    tmp_path: Path, runs: list[tuple[dict[str, Any], FakeRun]]
) -> None:
    for _ in range(2):
        log = metrics(tmp_path, wandb="drafts")
        log.write("draft_short", 3, {"loss": 1.25, "tau": float("nan")})
        log.close()
    (given, first), (again, _) = runs
    assert given["project"] == "drafts" and given["name"] == tmp_path.name
    assert given["config"]["log"] == {"tensorboard": False, "wandb": "drafts"}
    assert given["resume"] == "allow" and given == again and given["id"].isalnum()
    assert first.logged == [{"draft_short/loss": 1.25, "draft_short/step": 3}]
    assert first.axes == {"draft_short/*": "draft_short/step"} and first.finished
    log = metrics(tmp_path.parent, wandb="drafts")
    assert runs[2][0]["id"] != given["id"]


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
    steady = [writers.Steady(n, m) for n, m in
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


def test_a_folder_that_cannot_be_written_costs_the_curves_alone(
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
    assert writers.open_writers(config(), tmp_path) == ()


def test_only_the_first_process_opens_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "is_first", lambda: False)
    assert writers.open_writers(config(tensorboard=True, wandb="x"), tmp_path) == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
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
    assert run.main(["--config=demo:tiny", given, f"--workdir={tmp_path / 'x'}"]) == run.BAD_INPUT
    [sentence] = capsys.readouterr().err.splitlines()
    option = given.partition("=")[0]
    expected = f"train.run: {option} needs packages that are not installed ({module}): pip install "
    assert sentence.startswith(expected) and f"[{module}]" in sentence
    assert not (tmp_path / "x").exists()


def test_a_project_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="--config.log.wandb=me/drafts is no project .*WANDB_ENT"):
        LogConfig(wandb="me/drafts")
