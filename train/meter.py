"""Seconds and metrics of training steps, none of them lost to values that are not finite."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from longspec_jax.axes import Array

from .checkpoint import Checkpoints
from .metrics import Metrics


class Pending(NamedTuple):
    """A step that is on its way."""

    step: int
    values: Mapping[str, Array | float]
    tokens: int
    """Without padding."""


class Meter:
    """Seconds and metrics of a stage's steps; metrics are fetched one step late.

    Every step is checked for values that are not finite. Speeds are means over the timed steps
    since the last record.

    Attributes:
      elapsed: seconds of training in this stage; compilation, measurements and saves do not count.
    """

    def __init__(
        self,
        stage: str,
        every: int,
        metrics: Metrics,
        checkpoints: Checkpoints,
        elapsed: float = 0.0,
    ):
        """Bind a log.

        Args:
          stage: the name of its records.
          every: steps from one record to the next.
          metrics: takes the records.
          checkpoints: of the stage; the error that ends a run names the newest.
          elapsed: seconds of the stage in earlier calls.
        """
        self._stage, self._every = stage, every
        self._metrics, self._checkpoints = metrics, checkpoints
        self.elapsed = elapsed
        self._since = time.monotonic()
        self._pending: Pending | None = None
        self._skipped = False
        self._timed: list[tuple[float, int]] = []

    def add(self, step: int, values: Mapping[str, Array | float], real_tokens: int) -> None:
        """Take a step's metrics and its tokens without padding; write those of the one before."""
        self.flush()
        self._pending, self._skipped = Pending(step, values, real_tokens), False

    def skip(self) -> None:
        """Do not count the time until now; a pending step, part of it, has no speed."""
        self._since, self._skipped = time.monotonic(), True

    def flush(self) -> None:
        """Wait for the pending step, check it, and write its metrics if it is its turn.

        Raises:
          FloatingPointError: if loss or gradient are not finite, after they are recorded.
        """
        if self._pending is None:
            return
        (step, on_device, tokens), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(on_device).items()}
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self.elapsed += seconds
        self._metrics.advance()
        if not self._skipped:
            self._timed.append((seconds, tokens))
        wrong = not_finite({name: values[name] for name in ("loss", "grad_norm") if name in values})
        if wrong or step % self._every == 0:
            values |= _speed(self._timed) | _memory() | {"elapsed": self.elapsed}
            self._timed.clear()
            self._metrics.write(self._stage, step, values)
        if wrong:
            raise self.diverged(step, wrong)

    def diverged(self, step: int, what: str) -> FloatingPointError:
        """The error that ends a run whose values are not finite."""
        kept = self._checkpoints.newest
        return FloatingPointError(
            f"stage {self._stage} has diverged: {what} at step {step}; "
            f"{f'the last finite checkpoint is {kept}' if kept else 'no checkpoint was saved yet'}"
            "; begin anew with a lower learning_rate of the stage, or a lower "
            "--config.optimizer.clip"
        )


def _speed(steps: Sequence[tuple[float, int]]) -> dict[str, float]:
    """The mean speed of some steps, each with its seconds and tokens; nothing if there are none."""
    if not steps:
        return {}
    total, tokens = (sum(column) for column in zip(*steps, strict=True))
    return {"step_time": total / len(steps), "tokens_per_second": tokens / max(total, 1e-9)}


def _memory() -> dict[str, float]:
    """Most bytes that were in use on any of this process's devices, where they report it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": max(peaks)} if peaks else {}


def not_finite(values: Mapping[str, float]) -> str:
    """Names and values of what is not a finite number; empty if all are."""
    wrong = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    return " and ".join(wrong)
