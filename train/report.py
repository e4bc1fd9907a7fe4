"""What is recorded of the steps of a stage: losses, speed, and traces of the profiler.

Metrics are fetched one step late, so that the device never waits for the host. Every step is
checked for values that are not finite, and timed.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from .config import RunConfig
from .metrics import Metrics
from .processes import is_first, reason_of

_DENSE_PEAKS = {"H100": 990e12, "H200": 990e12, "A100": 312e12}
"""Operations a second in 16 bits, without sparsity, as the vendor states them."""
_SLOWER = ("PCIe", "NVL")
"""Boards of the same names with other clocks, except A100."""


def peak_tokens_per_second(
    flops_per_token: float, dtype: str, devices: Sequence[Any]
) -> float | None:
    """Tokens a second that devices at their peak would train on; None if the peak is unknown."""
    peak = _peak(devices[0].device_kind)
    return None if peak is None or dtype == "float32" else len(devices) * peak / flops_per_token


def _peak(kind: str) -> float | None:
    for name, peak in _DENSE_PEAKS.items():
        if name in kind and not (name != "A100" and any(word in kind for word in _SLOWER)):
            return peak
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
    always: bool
    timed: bool
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

    Speeds are means over the timed steps since the last record, because steps differ: log steps
    that report the target's loss take longer.
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
          real_tokens: its tokens without the padding.
          peak: tokens a second at which it would fully use the devices, if it is known.
          timed: whether its time is that of training; otherwise it has no speed.
          always: whether it is written even if it is not its turn.
        """
        self.flush()
        self._pending = _Pending(step, dict(values), real_tokens, peak, always, timed)

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
        if wrong or pending.always or pending.step % self.every == 0:
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


@dataclass
class Trace:
    """The trace of a stage, which process 0 writes of its own devices.

    If it fails, that is printed and the training continues without it. Traced steps are not timed,
    because writing the trace takes part of their time.
    """

    folder: Path
    """Where it is written."""
    steps: range
    """Those that are traced; the others around them have ended, or not yet begun."""
    report: Report
    running: bool = False
    """Whether the present step is traced."""

    def before(self, step: int) -> None:
        """Begin with the first of the steps, when the step before it has ended."""
        if self.steps and step == self.steps[0] and is_first():
            self.report.flush()
            with self._guarded():
                jax.profiler.start_trace(self.folder)
                self.running = True
            self.report.skip()

    def after(self, step: int) -> None:
        """End when the last of the steps, which is on its way, has ended."""
        if self.running and step == self.steps[-1]:
            self.report.flush()
            self.close()
            self.report.skip()

    def close(self) -> None:
        """Write what there is of it."""
        if self.running:
            self.running = False
            with self._guarded():
                jax.profiler.stop_trace()
                print(f"a trace is in {self.folder}", file=sys.stderr, flush=True)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # A profiler that is not there, a folder that is full.
            reason = reason_of(error)
            print(f"no trace is written ({reason})", file=sys.stderr, flush=True)


def traced_steps(run: RunConfig, first: int) -> range:
    """The steps of a stage that are traced, where this call begins with the given one.

    The first step of a call compiles, and is not traced.
    """
    begin = run.profile_at + (run.profile_at == first)
    return range(begin, begin + run.profile_steps)
