"""What is recorded of steps: losses and speed."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import each_row
from train import meter
from train.meter import Meter


class Log:
    """Metrics that are kept."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def advance(self) -> None:
        pass

    def write(self, stage: str, step: int, values: dict[str, float]) -> None:
        self.steps[step] = values


def metering(log: Any, every: int = 1) -> Meter:
    checkpoints: Any = SimpleNamespace(newest=None)
    return Meter("a", every, log, checkpoints)


def test_a_step_whose_time_was_skipped_has_no_speed() -> None:
    """It would be the tokens of a step over next to nothing: 841,107 a second on a CPU."""
    log = Log()
    steps = metering(log)
    for step in range(4):
        steps.add(step, {"loss": 1.0, "lr": 0.1}, 1024)
        if step in (0, 2):  # It compiled; the next was after a save.
            steps.skip()
    steps.flush()
    written = log.steps
    assert [step for step, values in written.items() if "tokens_per_second" in values] == [1, 3]
    assert all({"loss", "lr", "elapsed"} <= values.keys() for values in written.values())


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands at the last of these."""
    now = [0.0]
    monkeypatch.setattr(meter, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    return now


def test_time_before_a_save_is_the_steps_and_the_saves_is_nobodys(seconds: list[float]) -> None:
    log = Log()
    steps = metering(log)
    steps.skip()
    steps.add(6, {"loss": 1.0}, 500)
    seconds.append(2.0)
    steps.flush()
    seconds.append(102.0)  # The save.
    steps.skip()
    steps.add(7, {"loss": 1.0}, 300)
    seconds.append(103.0)
    steps.flush()
    speeds = [values["tokens_per_second"] for values in log.steps.values()]
    assert speeds == [250.0, 300.0] and steps.elapsed == 3.0
    assert log.steps[7]["step_time"] == 1.0


def test_speeds_are_means_since_the_last_record(seconds: list[float]) -> None:
    """Every second step is slower here, and only those are written."""
    log = Log()
    steps = metering(log, every=2)
    steps.skip()
    for step in range(1, 5):
        steps.add(step, {"loss": 1.0}, 100)
        seconds.append(seconds[-1] + (3.0 if step % 2 == 0 else 1.0))
    steps.flush()
    assert list(log.steps) == [2, 4]
    for values in log.steps.values():
        assert values["step_time"] == 2.0 and values["tokens_per_second"] == 50.0


@each_row("name", ["loss", "grad_norm"])
@each_row("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_recorded_and_ends_the_run(name: str, value: float) -> None:
    log = Log()
    steps = metering(log, every=10)
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
        monkeypatch.setattr(meter.jax, "local_devices", lambda given=given: given)
        steps = metering(log)
        steps.add(0, {"loss": 1.0}, 8)
        steps.flush()
        assert log.steps[0].get("peak_bytes") == expected
