"""What a step has to say of itself: its losses, its speed, and whether they are numbers at all."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from .metrics import Metrics


@dataclass
class Clock:
    """Seconds of training in this stage; compilation, measurements and saves do not count."""

    elapsed: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def tick(self) -> float:
        """Count the time since the last tick, and return it."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        self.elapsed += passed
        return passed

    def skip(self) -> None:
        """Do not count the time since the last tick."""
        self._since = time.monotonic()


@dataclass
class _Pending:
    """A step that is on its way."""

    step: int
    values: dict[str, Any]
    real_tokens: int
    peak: float | None
    always: bool = False
    timed: bool = True


@dataclass
class _Pace:
    """What the timed steps since the last record did."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    needed: float | None = 0.0
    """Seconds that fully used devices would have taken, if that is known of every step."""

    def add(self, step: _Pending, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.seconds += seconds
        self.tokens += step.real_tokens
        if self.needed is not None:
            self.needed = self.needed + step.real_tokens / step.peak if step.peak else None

    def metrics(self) -> dict[str, float]:
        """Their mean speed; nothing if there was none."""
        if not self.steps:
            return {}
        seconds = max(self.seconds, 1e-9)
        used = {} if self.needed is None else {"flops_utilization": self.needed / seconds}
        speed = {"step_time": self.seconds / self.steps, "tokens_per_second": self.tokens / seconds}
        return speed | used


class Report:
    """Metrics fetched one step late, so that the device never waits for the host.

    Speeds are means over the timed steps since the last record: of steps that differ, such as those
    that tell the target's loss, a record would otherwise only ever see one kind.

    Args:
      stage: its name.
      every: steps from one record to the next; every step is checked and timed.
      metrics: where records go.
      clock: the stage's.
      diverged: makes the error that ends the run, of a step and what is wrong with it.
    """

    def __init__(
        self,
        stage: str,
        every: int,
        metrics: Metrics,
        clock: Clock,
        diverged: Callable[[int, str], Exception],
    ):
        self._stage, self._every, self._metrics, self._clock = stage, every, metrics, clock
        self._diverged = diverged
        self._pending: _Pending | None = None
        self._pace = _Pace()

    def add(
        self,
        step: int,
        values: Mapping[str, Any],
        real_tokens: int,
        peak: float | None = None,
        *,
        timed: bool = True,
        always: bool = False,
    ) -> None:
        """Take a step's metrics, and write those of the step before.

        Args:
          step: its number.
          values: its metrics.
          real_tokens: its tokens that are no padding.
          peak: tokens a second at which it would fully use the devices, if it is known.
          timed: whether its time is that of training; otherwise it has no speed.
          always: whether it is written even if it is not its turn.
        """
        self.flush()
        self._pending = _Pending(step, dict(values), real_tokens, peak, always, timed)

    def skip(self) -> None:
        """Do not count the time since the last tick; a pending step, part of it, has no speed."""
        self._clock.skip()
        if self._pending is not None:
            self._pending.timed = False

    def flush(self) -> None:
        """Wait for the pending step, check it, and write its metrics if it is its turn.

        Raises:
          FloatingPointError: if loss or gradient are not finite; the record says so, too.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(pending.values).items()}
        seconds = self._clock.tick()
        self._metrics.advance()
        wrong = not_finite({name: values[name] for name in ("loss", "grad_norm") if name in values})
        if pending.timed:
            self._pace.add(pending, seconds)
        if wrong or pending.always or pending.step % self._every == 0:
            more = {**self._pace.metrics(), **_memory(), "elapsed": self._clock.elapsed}
            self._pace = _Pace()
            self._metrics.write(self._stage, pending.step, {**values, **more})
        if wrong:
            raise self._diverged(pending.step, wrong)


def not_finite(values: Mapping[str, float]) -> str:
    """Names and values of what is not a finite number; empty if all are."""
    wrong = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    return " and ".join(wrong)


def _memory() -> dict[str, float]:
    """Most bytes that were in use on any of this process's devices, where they tell."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": max(peaks)} if peaks else {}
