"""The speed of a step is logged where the step was timed, and nowhere else."""

from types import SimpleNamespace
from typing import Any

from train import loop


def test_a_step_whose_time_was_skipped_has_no_speed() -> None:
    """It would be the tokens of a step over next to nothing: 841,107 a second on a CPU."""
    written: dict[int, dict[str, float]] = {}
    metrics: Any = SimpleNamespace(
        advance=lambda: None, write=lambda stage, step, values: written.update({step: values})
    )
    stage: Any = SimpleNamespace(config=SimpleNamespace(name="a", batch=4, seq_len=256))
    report = loop._Report(stage, 1, metrics, loop.Clock())
    for step in range(4):
        report.add(step, 0.1, {"loss": 1.0})
        if step in (0, 2):  # It compiled; the next was behind a save.
            report.skip()
    report.flush()
    assert [step for step, values in written.items() if "tokens_per_second" in values] == [1, 3]
    assert all({"loss", "lr", "elapsed"} <= values.keys() for values in written.values())
