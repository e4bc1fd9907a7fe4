"""A few steps of a stage as a trace of the profiler: what device and host did, and when."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

from .config import RunConfig
from .report import Report


def check_window(run: RunConfig, per_epoch: Sequence[int]) -> None:
    """Refuse a trace that none of the draft's stages would get to.

    Args:
      run: what says where the trace begins.
      per_epoch: steps that a pass over the data of each of its stages takes.

    Raises:
      ValueError: if all of them end before.
    """
    if not run.profile_steps or run.pretraining is not None:  # Which may be what is traced.
        return
    limits = [stage.limit(steps) for stage, steps in zip(run.stages, per_epoch, strict=True)]
    if all(0 < limit <= run.profile_at for limit in limits):
        named = zip(run.stages, limits, strict=True)
        ends = ", ".join(f"{stage.name} ends after {limit}" for stage, limit in named)
        raise ValueError(
            f"no stage gets to --config.profile_at={run.profile_at}, counted in the steps of each: "
            f"{ends}; choose an earlier step"
        )


class Trace:
    """The trace of a stage, which process 0 writes of its own devices.

    What goes wrong with it is told, and the training goes on without it. Traced steps are not
    timed, as writing the trace takes part of their time.

    Args:
      folder: where it is written.
      steps: those that are traced; the others around them have ended, or not yet begun.
      report: the stage's.
    """

    def __init__(self, folder: Path, steps: range, report: Report):
        self._folder, self._report = folder, report
        self._steps = steps if jax.process_index() == 0 else range(0)
        self.running = False
        """Whether the step at hand is part of it."""

    def before(self, step: int) -> None:
        """Begin with the first of the steps, when the step before it has ended."""
        if self._steps and step == self._steps[0]:
            self._report.flush()
            with self._steadily():
                jax.profiler.start_trace(self._folder)
                self.running = True
            self._report.skip()

    def after(self, step: int) -> None:
        """End when the last of the steps, which is on its way, has ended."""
        if self.running and step == self._steps[-1]:
            self._report.flush()
            self.close()
            self._report.skip()

    def close(self) -> None:
        """Write what there is of it."""
        if self.running:
            self.running = False
            with self._steadily():
                jax.profiler.stop_trace()
                print(f"a trace is in {self._folder}", file=sys.stderr, flush=True)

    @contextmanager
    def _steadily(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # A profiler that is not there, a folder that is full.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"no trace is written ({reason})", file=sys.stderr, flush=True)


def traced_steps(run: RunConfig, first: int) -> range:
    """The steps of a stage that are traced, where this call begins with the given one.

    The first step of a call compiles, and is not traced.
    """
    begin = run.profile_at + (run.profile_at == first)
    return range(begin, begin + run.profile_steps)
