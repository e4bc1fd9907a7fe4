"""One stage of training: steps until its end, checkpoints, metrics, signals.

The loop knows no model: it drives a step over batches. It stays one step ahead of the device,
fetching the metrics of a step only after the next one is on its way.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from .checkpoint import Checkpoints
from .config import OptimizerConfig, RunConfig, StageConfig
from .data.batches import Batches, prefetch
from .metrics import Metrics
from .optim import learning_rate
from .step import ROWS, Batch, Objective, Step, TrainState


class Interrupted(Exception):
    """A signal asked the run to stop; the state is saved."""


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


@dataclass(frozen=True)
class Stage:
    """Everything a stage is made of."""

    config: StageConfig
    objective: Objective
    step: Step
    frozen: Any
    batches: Batches
    held_out: Batch
    """One micro-batch that is never trained on; the objective is measured on it."""

    @property
    def steps(self) -> int:
        """Steps after which it ends whatever the clock says; 0 if time alone ends it."""
        limits = (self.config.steps, self.config.epochs * self.batches.per_epoch)
        return min((limit for limit in limits if limit), default=0)

    def progress(self, step: int, elapsed: float) -> float:
        """How much of it is done, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / self.config.max_seconds if self.config.max_seconds else 0.0
        return min(1.0, max(by_steps, by_time))


def run_stage(
    stage: Stage,
    state: TrainState,
    run: RunConfig,
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: Metrics,
) -> TrainState:
    """Train from the stage's newest checkpoint, or the given state, to its end.

    Raises:
      Interrupted: after a SIGTERM or SIGINT, with the state saved.
    """
    _check_clock(stage.config)
    clock, step, done = Clock(), 0, False
    if restored := checkpoints.restore(state):
        state, meta = restored
        step, done = _check_meta(stage, meta)
        clock.elapsed = meta["elapsed"]
    if done:
        return state
    report = _Report(stage, run.log_every, metrics, clock)
    metrics.start(stage.config.name, step, stage.steps)
    with stop_signals() as stop:
        batches = prefetch(stage.batches, step, NamedSharding(mesh, ROWS))
        clock.skip()
        first = step
        while not (stopped := stop(step)) and (progress := stage.progress(step, clock.elapsed)) < 1:
            rate = _rate(stage.config, run.optimizer, progress)
            state, values = stage.step(state, stage.frozen, next(batches), np.float32(rate))
            report.add(step, rate, values)
            step += 1
            if step == first + 1:  # Compilation is not training time.
                jax.block_until_ready(values)
                report.skip()
            if run.save_every and step % run.save_every == 0:
                checkpoints.save(step, state, _meta(stage, step, clock, done=False))
                report.skip()
            if run.accept_every and step % run.accept_every == 0:
                _measure(stage, state, step, clock, metrics)
                report.skip()
        report.flush()
        batches.close()
        if stopped:
            checkpoints.save(step, state, _meta(stage, step, clock, done=False))
            checkpoints.close()
            raise Interrupted(f"stopped at step {step} of stage {stage.config.name}")
    _measure(stage, state, step, clock, metrics)
    metrics.finish()
    checkpoints.save(step, state, _meta(stage, step, clock, done=True))
    return state


class _Report:
    """Metrics fetched one step late, so that the device never waits for the host."""

    def __init__(self, stage: Stage, every: int, metrics: Metrics, clock: Clock):
        self._stage, self._every, self._metrics, self._clock = stage, every, metrics, clock
        self._pending: tuple[int, float, dict[str, Any]] | None = None
        self._timed = True

    def add(self, step: int, rate: float, values: dict[str, Any]) -> None:
        """Take a step's metrics, and write those of the step before."""
        self.flush()
        self._pending = (step, rate, values)

    def skip(self) -> None:
        """Do not count the time since the last tick; the pending step, part of it, has no speed."""
        self._clock.skip()
        self._timed = False

    def flush(self) -> None:
        """Wait for the pending step and write its metrics if it is its turn."""
        if self._pending is None:
            return
        step, rate, values = self._pending
        self._pending = None
        timed, self._timed = self._timed, True
        jax.block_until_ready(values)
        seconds = self._clock.tick()
        self._metrics.advance()
        if step % self._every == 0:
            tokens = self._stage.config.batch * self._stage.config.seq_len
            speed = {"step_time": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
            speed = speed if timed else {}
            elapsed = {"elapsed": self._clock.elapsed}
            scalars = {name: float(value) for name, value in values.items()}
            self._metrics.write(
                self._stage.config.name, step, {**scalars, "lr": rate, **speed, **elapsed}
            )


@contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """Whether to stop before a step: after SIGTERM or SIGINT, or when any process got a SIGTERM.

    Elsewhere than in the main thread signals are left alone. With several processes jax listens for
    SIGTERM, and makes all of them stop before the same step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield lambda step: event.is_set()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _rate(stage: StageConfig, optimizer: OptimizerConfig, progress: float) -> float:
    return learning_rate(
        progress, stage.learning_rate, warmup=optimizer.warmup, floor=optimizer.floor
    )


def _measure(stage: Stage, state: TrainState, step: int, clock: Clock, metrics: Metrics) -> None:
    values = stage.objective.measure(state.params, stage.frozen, stage.held_out)
    metrics.write(stage.config.name, step, {**values, "elapsed": clock.elapsed})


def _meta(stage: Stage, step: int, clock: Clock, *, done: bool) -> dict[str, Any]:
    epoch, index = stage.batches.position(step)
    return {"step": step, "epoch": epoch, "index": index, "elapsed": clock.elapsed, "done": done}


def _check_meta(stage: Stage, meta: dict[str, Any]) -> tuple[int, bool]:
    """Step and completion of a checkpoint, if it belongs to this stage and data."""
    position = stage.batches.position(meta["step"])
    if position != (meta["epoch"], meta["index"]):
        raise ValueError(
            f"the checkpoint of stage {stage.config.name} stands at epoch {meta['epoch']}, row "
            f"{meta['index']}, but step {meta['step']} of these data is epoch {position[0]}, row "
            f"{position[1]}: data or batch changed since; restore them or use a new workdir"
        )
    return meta["step"], meta["done"]


def _check_clock(stage: StageConfig) -> None:
    if stage.max_seconds and jax.process_count() > 1:
        raise ValueError(
            f"stage {stage.name}: max_seconds={stage.max_seconds} would end each process by its "
            "own clock; with several processes limit the stage by steps or epochs"
        )
