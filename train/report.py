"""What is recorded of the steps of a stage: losses and speed.

Metrics are fetched one step late, so that the device never waits for the host. Every step is
checked for values that are not finite, and timed.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from .metrics import Metrics

_DENSE_PEAKS = {"H100": 990e12, "H200": 990e12, "A100": 312e12}
"""Operations a second in 16 bits, without sparsity, as the vendor states them."""
_SLOWER = ("PCIe", "NVL")
"""Boards of the same names with other clocks, except A100."""


def peak_tokens_per_second(
    flops_per_token: float, dtype: str, devices: Sequence[Any]
) -> float | None:
    """Tokens a second that devices at their peak would train on; None if the peak is unknown."""
    kind = devices[0].device_kind
    for name, peak in _DENSE_PEAKS.items():
        slower = name != "A100" and any(word in kind for word in _SLOWER)
        if name in kind and not slower and dtype != "float32":
            return len(devices) * peak / flops_per_token
    return None


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
    """A step that is on its way, or was timed."""

    step: int
    values: dict[str, Any]
    tokens: int
    peak: float | None
    timed: bool = True
    seconds: float = 0.0


def _speed(steps: Sequence[_Pending]) -> dict[str, float]:
    """The mean speed of some steps; nothing if there are none."""
    if not steps:
        return {}
    total, tokens = sum(step.seconds for step in steps), sum(step.tokens for step in steps)
    seconds = max(total, 1e-9)
    speed = {"step_time": total / len(steps), "tokens_per_second": tokens / seconds}
    if all(step.peak for step in steps):
        needed = sum(step.tokens / step.peak for step in steps if step.peak)
        speed["flops_utilization"] = needed / seconds
    return speed


@dataclass
class Report:
    """The metrics of a stage's steps.

    Speeds are means over the timed steps since the last record.
    """

    stage: str
    every: int
    """Steps from one record to the next; every step is checked and timed."""
    metrics: Metrics
    clock: Clock
    diverged: Callable[[int, str], Exception]
    """Makes the error that ends the run, of a step and what is wrong with it."""
    _pending: _Pending | None = None
    _timed: list[_Pending] = field(default_factory=list)

    def add(
        self, step: int, values: Mapping[str, Any], real_tokens: int, peak: float | None = None
    ) -> None:
        """Take a step's metrics, and write those of the step before.

        ``real_tokens`` are without padding, and ``peak`` tokens a second would fully use the
        devices.
        """
        self.flush()
        self._pending = _Pending(step, dict(values), real_tokens, peak)

    def skip(self) -> None:
        """Do not count the time since the last tick; a pending step, part of it, has no speed."""
        self.clock.skip()
        if self._pending is not None:
            self._pending.timed = False

    def flush(self) -> None:
        """Wait for the pending step, check it, and write its metrics if it is its turn.

        Raises:
          FloatingPointError: if loss or gradient are not finite, after they are recorded.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(pending.values).items()}
        pending.seconds = self.clock.tick()
        self.metrics.advance()
        wrong = not_finite({name: values[name] for name in ("loss", "grad_norm") if name in values})
        if pending.timed:
            self._timed.append(pending)
        if wrong or pending.step % self.every == 0:
            more = {**_speed(self._timed), **_memory(), "elapsed": self.clock.elapsed}
            self._timed.clear()
            self.metrics.write(self.stage, pending.step, {**values, **more})
        if wrong:
            raise self.diverged(pending.step, wrong)


def not_finite(values: Mapping[str, float]) -> str:
    """Names and values of what is not a finite number; empty if all are."""
    wrong = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    return " and ".join(wrong)


def _memory() -> dict[str, float]:
    """Most bytes that were in use on any of this process's devices, where they report it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": max(peaks)} if peaks else {}
