"""One stage of training: steps until its end, checkpoints, metrics, signals.

:func:`run_stage` is the loop. It knows no model: it drives a step over batches. It stays one step
ahead of the device, fetching the metrics of a step only after the next one is on its way. Before a
save or a measurement it waits for the step's own, so that nothing is saved of a training whose
values are not finite.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from longspec_jax import cli
from longspec_jax.ops.partitioned import use_mesh

from .checkpoint import Checkpoints
from .config import OptimizerConfig, RunConfig, StageConfig
from .data.batches import Batches, prefetch
from .fingerprint import Fingerprint, check_same_run
from .meter import Meter, not_finite
from .metrics import Metrics
from .step import ROWS, Batch, Objective, Step, TrainState, learning_rate

FIRST_SECONDS = 1.0
"""What the first step of a stage is taken to last, where the clock says how far the stage is."""
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

    @property
    def steps(self) -> int:
        """Steps after which it ends even if time is left; 0 if only time ends it."""
        return self.config.limit(self.batches.per_epoch)

    def progress(self, step: int, elapsed: float) -> float:
        """How much of it is done, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed / self.config.max_seconds if self.config.max_seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def learning_rate(self, step: int, elapsed: float, optimizer: OptimizerConfig) -> float:
        """That of a step: of how much is done with it; by the clock it takes the mean time."""
        # What the first step will take is not known.
        seconds = elapsed / step if step else FIRST_SECONDS
        return learning_rate(
            self.progress(step + 1, elapsed + seconds),
            self.config.learning_rate,
            warmup=optimizer.warmup,
            floor=optimizer.floor,
        )


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
    # Go on after the newest intact checkpoint, and forget what was recorded after it.
    name, step, elapsed, records = stage.config.name, 0, 0.0, 0
    if (saved := checkpoints.find()) is not None:
        check_same_run(saved.meta["run"], stage.fingerprint, saved.folder)
        state = checkpoints.restore(saved, state)
        if saved.meta["done"]:
            return state
        step, elapsed, records = (saved.meta[each] for each in ("step", "elapsed", "records"))
    metrics.rewind(name, records)
    meter = Meter(name, run.log_every, metrics, checkpoints, elapsed)
    keeper = Keeper(stage, run, mesh, checkpoints, metrics, meter)

    # Steps, one ahead of the device, until steps, epochs or time are up or a signal comes.
    metrics.start(name, step, stage.steps)
    ahead = prefetch(stage.batches, step, NamedSharding(mesh, ROWS))
    compiled = set[tuple[int, ...]]()
    with stop_signals() as stop, closing(ahead) as batches:
        meter.skip()
        while not (stopped := stop(step)) and stage.progress(step, meter.elapsed) < 1:
            rate = stage.learning_rate(step, meter.elapsed, run.optimizer)
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
            meter.add(step, {**values, **more}, real)
            step += 1
            if compiles:  # Compilation is not training time.
                compiled.add(shape)
                jax.block_until_ready(values)
                meter.skip()
            keeper.after(step, state)
        meter.flush()
        if stopped or (stopped := stop(step)):  # A signal may have come in the last step.
            keeper.save(step, state)
            raise Interrupted(f"stopped at step {step} of stage {name}", stopped)

    # The end.
    keeper.measure(step, state)
    metrics.finish()
    keeper.save(step, state, done=True)
    return state


@dataclass(frozen=True)
class Keeper:
    """Measures and saves the states of a stage."""

    stage: Stage
    run: RunConfig
    mesh: Mesh
    checkpoints: Checkpoints
    metrics: Metrics
    meter: Meter

    def after(self, step: int, state: TrainState) -> None:
        """Measure and save where a step is due, once all steps up to it are checked."""
        measures, saves = _is_turn(step, self.run.accept_every), _is_turn(step, self.run.save_every)
        if not (measures or saves):
            return
        self.meter.flush()
        if self.stage.progress(step, self.meter.elapsed) < 1:  # The stage's end does both.
            if measures:
                self.measure(step, state)
            if saves:
                self.save(step, state)
        self.meter.skip()

    def measure(self, step: int, state: TrainState) -> None:
        """Record what the objective measures on the held-out rows."""
        stage = self.stage
        try:
            with use_mesh(self.mesh.abstract_mesh):
                values = stage.objective.measure(state.params, stage.frozen, stage.held_out)
        except FloatingPointError as error:
            raise self.meter.diverged(step, str(error)) from error
        if bad := not_finite(values):
            raise self.meter.diverged(step, bad)
        self.metrics.write(stage.config.name, step, {**values, "elapsed": self.meter.elapsed})

    def save(self, step: int, state: TrainState, *, done: bool = False) -> None:
        """Save a state whose steps have been checked; itself, it is checked here."""
        if not _all_finite(state):
            raise self.meter.diverged(step, "parameters or optimiser state that are not finite")
        meta = {
            "step": step,
            "elapsed": self.meter.elapsed,
            "done": done,
            "records": self.metrics.count(self.stage.config.name),
            "run": self.stage.fingerprint,
        }
        self.checkpoints.save(step, state, meta)


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
