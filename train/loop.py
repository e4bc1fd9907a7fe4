"""One stage of training: steps until its end, checkpoints, metrics, signals.

The loop knows no model: it drives a step over batches. It stays one step ahead of the device,
fetching the metrics of a step only after the next one is on its way. Before a save or a measurement
it waits for the step's own, so that nothing is saved of a training whose values are not finite.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from longspec_jax import cli
from longspec_jax.ops.partitioned import use_mesh

from .checkpoint import Checkpoints
from .config import RunConfig, StageConfig
from .data.batches import Batches, prefetch
from .fingerprint import Fingerprint, check_same_run
from .metrics import Metrics
from .step import ROWS, Batch, Objective, Step, TrainState, learning_rate

FIRST_SECONDS = 1.0
"""What the first step of a stage is taken to last, where the clock says how far the stage is."""
_DENSE_PEAKS = {"H100": 990e12, "H200": 990e12, "A100": 312e12}
"""Operations a second in 16 bits, without sparsity, as the vendor states them."""
_SLOWER = ("PCIe", "NVL")
"""Boards of the same names with other clocks, except A100."""
TRY_AGAIN = 75
"""Exit status after SIGTERM, EX_TEMPFAIL of sysexits.h: schedulers may queue the job again."""


class Interrupted(Exception):
    """A signal asked the run to stop; the state is saved."""

    def __init__(self, message: str, status: int = TRY_AGAIN):
        """Stop with an exit status: 75, or 130 after Ctrl-C."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Stage:
    """Everything a stage is made of."""

    config: StageConfig
    objective: Objective
    step: Step
    frozen: PyTree
    batches: Batches
    held_out: Batch
    """One micro-batch that is never trained on; the objective is measured on it."""
    fingerprint: Fingerprint = field(default_factory=dict)
    """A checkpoint must agree in all of it for the stage to resume from it."""
    peak_tokens_per_second: Callable[[int], float | None] = lambda length: None
    """Tokens a second at which rows of a length would fully use the devices; None if unknown."""

    @property
    def steps(self) -> int:
        """Steps after which it ends even if time is left; 0 if time alone ends it."""
        return self.config.limit(self.batches.per_epoch)

    def progress(self, step: int, elapsed: float) -> float:
        """How much of it is done, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / self.config.max_seconds if self.config.max_seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def progress_with(self, step: int, elapsed: float) -> float:
        """How much of it is done once this step is; by the clock the step takes the mean time."""
        # What the first step will take is not known.
        seconds = elapsed / step if step else FIRST_SECONDS
        return self.progress(step + 1, elapsed + seconds)


def run_stage(
    stage: Stage,
    state: TrainState,
    run: RunConfig,
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: Metrics,
) -> TrainState:
    """Train from the stage's newest intact checkpoint, or the given state, to its end.

    Raises:
      Interrupted: after a SIGTERM or SIGINT, with the state saved.
      FloatingPointError: if loss, gradient, parameters or a measurement are not finite.
      ValueError: if the checkpoint is of another run, or none is intact.
    """
    name, step, elapsed = stage.config.name, 0, 0.0

    # Go on behind the newest intact checkpoint, and forget what was recorded after it.
    saved = checkpoints.find()
    if saved is not None:
        check_same_run(saved.meta["run"], stage.fingerprint, saved.folder)
        state = checkpoints.restore(saved, state)
        if saved.meta["done"]:
            return state
        step, elapsed = saved.meta["step"], saved.meta["elapsed"]
    metrics.rewind(name, saved.meta["records"] if saved else 0)

    def diverged(step: int, what: str) -> FloatingPointError:
        """The error that ends a run whose values are not finite."""
        kept = checkpoints.newest
        return FloatingPointError(
            f"stage {name} has diverged: {what} at step {step}; "
            f"{f'the last finite checkpoint is {kept}' if kept else 'no checkpoint was saved yet'}"
            "; begin anew with a lower learning_rate of the stage, or a lower "
            "--config.optimizer.clip"
        )

    meter = Meter(name, run.log_every, metrics, diverged, elapsed)

    def measure(step: int, state: TrainState) -> None:
        """Record what the objective measures on the held-out rows."""
        try:
            with use_mesh(mesh.abstract_mesh):
                values = stage.objective.measure(state.params, stage.frozen, stage.held_out)
        except FloatingPointError as error:
            raise diverged(step, str(error)) from error
        if bad := not_finite(values):
            raise diverged(step, bad)
        metrics.write(name, step, {**values, "elapsed": meter.elapsed})

    def save(step: int, state: TrainState, *, done: bool) -> None:
        """Save a state whose steps have been checked; itself, it is checked here."""
        if not _all_finite(state):
            raise diverged(step, "parameters or optimiser state that are not finite")
        meta = {
            "step": step,
            "elapsed": meter.elapsed,
            "done": done,
            "records": metrics.count(name),
            "run": stage.fingerprint,
        }
        checkpoints.save(step, state, meta)

    # Steps, one ahead of the device, until steps, epochs or time are up or a signal comes.
    metrics.start(name, step, stage.steps)
    ahead = prefetch(stage.batches, step, NamedSharding(mesh, ROWS))
    with stop_signals() as stop, closing(ahead) as batches:
        meter.skip()
        compiled = set()
        while not (stopped := stop(step)) and stage.progress(step, meter.elapsed) < 1:
            rate = learning_rate(
                stage.progress_with(step, meter.elapsed),
                stage.config.learning_rate,
                warmup=run.optimizer.warmup,
                floor=run.optimizer.floor,
            )
            started = time.monotonic()
            batch, real = next(batches)
            waited = time.monotonic() - started
            shape = batch.tokens.shape
            compiles = shape not in compiled
            if compiles:  # The step before must not be timed with it.
                meter.flush()
            state, values = stage.step(state, stage.frozen, batch, np.float32(rate))
            padded = 1 - real / batch.tokens.size
            more = {"lr": rate, "data_wait": waited, "padding": padded, "row_tokens": shape[-1]}
            peak = stage.peak_tokens_per_second(shape[-1])
            meter.add(step, {**values, **more}, real, peak)
            step += 1
            if compiles:  # Compilation is not training time.
                compiled.add(shape)
                jax.block_until_ready(values)
                meter.skip()
            measures, saves = _is_turn(step, run.accept_every), _is_turn(step, run.save_every)
            if measures or saves:
                meter.flush()
                if stage.progress(step, meter.elapsed) < 1:  # Its end does both, below.
                    if measures:
                        measure(step, state)
                    if saves:
                        save(step, state, done=False)
                meter.skip()
        meter.flush()
        if stopped:
            save(step, state, done=False)
            raise Interrupted(f"stopped at step {step} of stage {name}", stopped)

    # The end.
    measure(step, state)
    metrics.finish()
    save(step, state, done=True)
    return state


class _Timed(NamedTuple):
    """A step, and what its speed is reckoned from."""

    seconds: float
    tokens: int
    peak: float | None


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
        diverged: Callable[[int, str], Exception],
        elapsed: float = 0.0,
    ):
        """Bind a log.

        Args:
          stage: the name of its records.
          every: steps from one record to the next.
          metrics: takes the records.
          diverged: makes the error that ends the run, of a step and what is wrong with it.
          elapsed: seconds of the stage in earlier calls.
        """
        self._stage, self._every, self._metrics, self._diverged = stage, every, metrics, diverged
        self.elapsed = elapsed
        self._since = time.monotonic()
        self._pending: tuple[int, dict[str, Any], int, float | None] | None = None
        self._skipped = False
        self._timed: list[_Timed] = []

    def add(
        self, step: int, values: Mapping[str, Any], real_tokens: int, peak: float | None = None
    ) -> None:
        """Take a step's metrics, and write those of the step before.

        ``real_tokens`` are without padding, and ``peak`` tokens a second would fully use the
        devices.
        """
        self.flush()
        self._pending, self._skipped = (step, dict(values), real_tokens, peak), False

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
        (step, on_device, tokens, peak), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(on_device).items()}
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self.elapsed += seconds
        self._metrics.advance()
        if not self._skipped:
            self._timed.append(_Timed(seconds, tokens, peak))
        wrong = not_finite({name: values[name] for name in ("loss", "grad_norm") if name in values})
        if wrong or step % self._every == 0:
            more = {**_speed(self._timed), **_memory(), "elapsed": self.elapsed}
            self._timed.clear()
            self._metrics.write(self._stage, step, {**values, **more})
        if wrong:
            raise self._diverged(step, wrong)


def _speed(steps: Sequence[_Timed]) -> dict[str, float]:
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


def _memory() -> dict[str, float]:
    """Most bytes that were in use on any of this process's devices, where they report it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": max(peaks)} if peaks else {}


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


def not_finite(values: Mapping[str, float]) -> str:
    """Names and values of what is not a finite number; empty if all are."""
    wrong = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
    return " and ".join(wrong)


def _is_turn(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


@jax.jit
def _all_finite(state: TrainState) -> jax.Array:
    leaves = jax.tree.leaves(state)
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


@contextmanager
def stop_signals() -> Iterator[Callable[[int], int]]:
    """The exit status to stop with before a step; 0 to continue.

    A run stops after SIGTERM or SIGINT, or when any process got a SIGTERM. Elsewhere than in the
    main thread signals are left alone. With several processes jax listens for SIGTERM, and makes
    all of them stop before the same step.
    """
    if jax.process_count() > 1:
        yield lambda step: TRY_AGAIN * multihost_utils.reached_preemption_sync_point(step)
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: 0
        return
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda got, _: received.append(got)) for number in numbers]
    statuses = {signal.SIGTERM: TRY_AGAIN, signal.SIGINT: cli.INTERRUPTED}
    try:
        yield lambda step: statuses[signal.Signals(received[0])] if received else 0
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
