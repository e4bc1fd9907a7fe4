"""What is recorded of steps: losses, speed, and traces."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from configs import demo
from tests.train.test_loop import Run, Toy
from train import report
from train.arguments import from_config
from train.config import RunConfig
from train.metrics import read_records
from train.report import Clock, Report, traced_steps


class Log:
    """Metrics that are kept."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def advance(self) -> None:
        pass

    def write(self, stage: str, step: int, values: dict[str, float]) -> None:
        self.steps[step] = values


def reporting(log: Any, every: int = 1) -> Report:
    return Report("a", every, log, Clock(), lambda step, what: FloatingPointError(what))


def test_a_step_whose_time_was_skipped_has_no_speed() -> None:
    """It would be the tokens of a step over next to nothing: 841,107 a second on a CPU."""
    log = Log()
    steps = reporting(log)
    for step in range(4):
        steps.add(step, {"loss": 1.0, "lr": 0.1}, 1024)
        if step in (0, 2):  # It compiled; the next was behind a save.
            steps.skip()
    steps.flush()
    written = log.steps
    assert [step for step, values in written.items() if "tokens_per_second" in values] == [1, 3]
    assert all({"loss", "lr", "elapsed"} <= values.keys() for values in written.values())


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands at the last of these."""
    now = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    return now


def test_time_before_a_save_is_the_steps_and_the_saves_is_nobodys(seconds: list[float]) -> None:
    log = Log()
    clock = Clock()
    steps = Report("a", 1, log, clock, lambda step, what: FloatingPointError(what))  # type: ignore[arg-type]
    clock.skip()
    steps.add(6, {"loss": 1.0}, 500)
    seconds.append(2.0)
    steps.flush()
    seconds.append(102.0)  # The save.
    steps.skip()
    steps.add(7, {"loss": 1.0}, 300, peak=2000.0)
    seconds.append(103.0)
    steps.flush()
    speeds = [values["tokens_per_second"] for values in log.steps.values()]
    assert speeds == [250.0, 300.0] and clock.elapsed == 3.0
    assert log.steps[7]["step_time"] == 1.0 and log.steps[7]["flops_utilization"] == 0.15


def test_speeds_are_means_since_the_last_record(seconds: list[float]) -> None:
    """Every second step is slower here, and only those are written."""
    log = Log()
    clock = Clock()
    steps = Report("a", 2, log, clock, lambda step, what: FloatingPointError(what))  # type: ignore[arg-type]
    clock.skip()
    for step in range(1, 5):
        steps.add(step, {"loss": 1.0}, 100, peak=200.0)
        seconds.append(seconds[-1] + (3.0 if step % 2 == 0 else 1.0))
    steps.flush()
    assert list(log.steps) == [2, 4]
    for values in log.steps.values():
        assert values["step_time"] == 2.0 and values["tokens_per_second"] == 50.0
        assert values["flops_utilization"] == 0.25


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_recorded_and_ends_the_run(name: str, value: float) -> None:
    log = Log()
    steps = reporting(log, every=10)
    steps.add(3, {"loss": 1.0, "grad_norm": 1.0, name: value}, 8)
    with pytest.raises(FloatingPointError, match=f"{name}={value}"):
        steps.flush()
    assert log.steps[3].keys() > {"loss", "grad_norm"}
    steps.flush()  # It is said once.


def test_memory_is_the_fullest_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(stats: dict[str, int] | None) -> Any:
        return SimpleNamespace(memory_stats=lambda: stats)

    devices = [device({"peak_bytes_in_use": 5}), device({"peak_bytes_in_use": 7}), device(None)]
    log = Log()
    for given, expected in ((devices, 7), (devices[2:], None)):
        monkeypatch.setattr(report.jax, "local_devices", lambda given=given: given)
        steps = reporting(log)
        steps.add(0, {"loss": 1.0}, 8)
        steps.flush()
        assert log.steps[0].get("peak_bytes") == expected


WINDOW = dict(profile_at=3, profile_steps=2)


def config(**window: int) -> RunConfig:
    return dataclasses.replace(from_config(demo.get_config("tiny").to_dict()), **window)


def traced(folder: Path) -> list[int]:
    """The steps that a trace shows."""
    [path] = folder.rglob("*.xplane.pb")
    found = set()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    found.add(int(dict(event.stats)["step_num"]))
    return sorted(found)


def test_a_trace_is_of_its_steps_which_have_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, run = Run(tmp_path / "plain"), Run(tmp_path / "run")
    for each in (plain, run):
        each.folder.mkdir()
    assert run.go(Toy(), **WINDOW) == plain.go(Toy()) and run.records == plain.records
    assert not (plain.folder / "profile").exists()
    assert traced(run.folder / "profile" / "short") == [3, 4]
    assert f"a trace is in {run.folder / 'profile' / 'short'}" in capsys.readouterr().err
    steps = [record for record in read_records(run.folder / "metrics.jsonl") if "loss" in record]
    timed = [record["step"] for record in steps if "tokens_per_second" in record]
    assert timed == [1, 2, 5, 6, 7, 8, 9]  # Step 0 compiles.


def test_a_stage_that_ends_within_its_window_has_a_trace(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.go(Toy(), profile_at=8, profile_steps=50)
    assert traced(tmp_path / "profile" / "short") == [8, 9]


def test_a_profiler_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("only one profile at a time")

    monkeypatch.setattr(jax.profiler, "start_trace", failing)
    run = Run(tmp_path)
    run.go(Toy(), **WINDOW)
    assert len([record for record in run.records if "loss" in record]) == 10
    assert capsys.readouterr().err.count("no trace is written (only one profile at a time)") == 1


def test_the_step_that_compiles_is_not_traced() -> None:
    at_four = config(profile_at=4, profile_steps=2)
    assert traced_steps(at_four, 0) == traced_steps(at_four, 2) == range(4, 6)
    assert traced_steps(at_four, 4) == range(5, 7)
    assert not traced_steps(config(), 0)


@pytest.mark.parametrize("window", [(0, 3), (3, 0), (-1, 2), (2, -1)])
def test_a_window_of_nothing_is_refused(window: tuple[int, int]) -> None:
    at, steps = window
    with pytest.raises(ValueError, match=f"profile_at={at} with --config.profile_steps={steps} tr"):
        config(profile_at=at, profile_steps=steps)
