"""Run a prepared call through the decode loop, and time its phases apart.

The first call of a shape is preceded by a short run of the same shape: at most two prefill
chunks and one round of every tree. Whatever is compiled or loaded on first use is paid there and
reported as compile time, so that prefill and decode seconds mean the same in every call.
"""

import time
from collections.abc import Callable, Generator, Iterator, Set
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding import ahead
from longspec_jax.decoding.engine import SpecState, room
from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.programs import RECENT
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.drafters.base import Drafter, NoDraft
from longspec_jax.generation.activity import Compiling, OnActivity, Prefilling
from longspec_jax.generation.job import Job
from longspec_jax.generation.memory import tree_bytes
from longspec_jax.generation.result import Stats, TreeUse


class Progress(NamedTuple):
    """The small arrays of a state, on the host."""

    output: np.ndarray
    drafted: np.ndarray
    emitted: np.ndarray
    done: np.ndarray
    rounds: np.ndarray
    histogram: np.ndarray

    @classmethod
    def of(cls, state: SpecState) -> "Progress":
        """Fetch them in one transfer."""
        return cls(*jax.device_get([getattr(state, name) for name in cls._fields]))

    def after(self, report: ahead.Report) -> "Progress":
        """The progress one round later, as the device's own state counts it."""
        output, drafted, histogram = self.output.copy(), self.drafted.copy(), self.histogram.copy()
        for row, (begin, count) in enumerate(zip(self.emitted, report.count, strict=True)):
            output[row, begin : begin + count] = report.tokens[row, :count]
            drafted[row, begin : begin + count] = report.drafted[row, :count]
            if count:
                histogram[row, np.count_nonzero(report.drafted[row, :count])] += 1
        emitted, rounds = self.emitted + report.count, self.rounds + (report.count > 0)
        return Progress(output, drafted, emitted, report.done, rounds, histogram)

    def check_finite(self, job: Job) -> "Progress":
        """Return itself; raise if the target's logits were not finite somewhere, and say where."""
        for row, (tokens, count) in enumerate(zip(self.output, self.emitted, strict=True)):
            if tokens[count - 1] == NO_TOKEN:
                where = f"of row {row} " if len(self.emitted) > 1 else ""
                dtype = job.target.config.dtype
                remedy = "" if dtype == "float32" else "dtype float32, which has more range, or "
                raise FloatingPointError(
                    f"the target's logits {where}behind {len(job.prompts[row]) + count - 1} "
                    "tokens are not finite, so that no token can be drawn: its weights or norms "
                    f"overflow {dtype}; try {remedy}another checkpoint"
                )
        return self


@dataclass(frozen=True)
class Timing:
    """Seconds of a call's phases so far."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Run(NamedTuple):
    """A call at one point of its way."""

    progress: Progress
    timing: Timing
    state: SpecState
    """The live state; donated when the run goes on, and a round ahead where that was launched."""
    totals: tuple[Measurement, ...]
    """What every drafter of the job has done so far."""


class WarmShapes:
    """The shapes whose programs this process holds, and how to compile one more."""

    def __init__(self) -> None:
        """Start with none."""
        self._programs: dict[Any, Set[Any]] = {}
        self._lock = Lock()

    def prepare(self, job: Job, streams: bool = False, rounds: bool = True) -> float:
        """Make a short run if the job's shape is new; return its seconds, 0 if it is not.

        Args:
          job: the prepared call.
          streams: whether :meth:`Job.rounds` will run it, not :meth:`Job.legs`.
          rounds: whether it will be decoded at all, and not prefilled alone.
        """
        if self.knows(job, streams, rounds):
            return 0.0
        two = np.minimum(job.request.max_new_tokens, 2)
        short = replace(
            job,
            # Two chunks where there are two: on a mesh the second one's arrays may lie elsewhere.
            prompts=tuple(row[: 2 * job.shape.chunk] for row in job.prompts),
            request=replace(job.request, max_new_tokens=jnp.asarray(two)),
        )
        start = time.perf_counter()
        with RECENT.noted() as used:
            state = short.prefill()
            state = short.rehearse(state, streams) if rounds else state
        Progress.of(jax.block_until_ready(state))
        seconds = time.perf_counter() - start
        with self._lock:
            kept = {old: its for old, its in self._programs.items() if RECENT.keeps(its)}
            self._programs = {**kept, (streams, rounds, job.signature): used}
        return seconds

    def knows(self, job: Job, streams: bool = False, rounds: bool = True) -> bool:
        """Whether everything the job will run is compiled; it is then the last to be let go."""
        used = self._programs.get((streams, rounds, job.signature))
        return used is not None and RECENT.renew(used)


class Ready(NamedTuple):
    """A compiled and prefilled call; used up by the run that begins with it."""

    job: Job
    state: SpecState
    timing: Timing


Begin: TypeAlias = Callable[[bool], Ready]
"""``streams -> ready``: makes a call ready to run, all at once or to be followed round by round."""


def ready(
    job: Job,
    warm: WarmShapes,
    *,
    streams: bool,
    rounds: bool = True,
    on_activity: OnActivity | None = None,
) -> Ready:
    """Compile what is new, and run the prompts through the target.

    Args:
      job: the prepared call.
      warm: the shapes compiled so far.
      streams: whether :func:`run_rounds` will run it, not :func:`run` or :func:`run_steps`.
      rounds: whether it will be decoded at all, and not prefilled alone.
      on_activity: told of compilation and prefill.
    """
    if on_activity and not warm.knows(job, streams, rounds):
        on_activity(Compiling())
    compiled = warm.prepare(job, streams, rounds)
    start = time.perf_counter()
    state = jax.block_until_ready(job.prefill(_prefill_reporter(job, on_activity)))
    return Ready(job, state, Timing(compiled, time.perf_counter() - start))


def _prefill_reporter(job: Job, on_activity: OnActivity | None) -> Callable[[int], None] | None:
    if on_activity is None:
        return None
    total = max(map(len, job.prompts))
    return lambda done: on_activity(Prefilling(done, total))


def state_for(job: Job, start: Ready) -> SpecState:
    """The prefilled state for another job of the same call, whose tree is no taller; shares arrays.

    Prefill does not depend on the tree, nor but for its own state on the drafter: what it computed
    for one serves all.
    """
    state = start.state
    height = room(job.drafter.tree.num_levels)
    emitted = state.output.shape[1] - state.histogram.shape[1] + height
    plain = isinstance(job.drafter, NoDraft)
    return replace(
        state,
        draft=() if plain else start.job.own_state(job.drafter, state.draft),
        output=state.output[:, :emitted],
        drafted=state.drafted[:, :emitted],
        histogram=state.histogram[:, :height],
    )


def run(start: Ready) -> Run:
    """Run to the end on the device, the host asked only where there is something to choose."""
    job, state, timing = start
    begin = time.perf_counter()
    leg = job.unmoved(state)
    for leg in job.legs(state):  # noqa: B007 - only the last one counts.
        pass
    jax.block_until_ready(leg.state)
    timing = replace(timing, decode=time.perf_counter() - begin)
    return Run(Progress.of(leg.state).check_finite(job), timing, *leg)


def run_rounds(start: Ready) -> Generator[Run, None, None]:
    """Yield after the prefill and after every round, while the next round already runs.

    The consumer's time is not counted. Close the iterator to stop early.
    """
    job, state, timing = start
    progress = Progress.of(state).check_finite(job)
    if progress.done.all():
        yield Run(progress, timing, *job.unmoved(state))
        return
    with job.rounds(state) as rounds:
        yield Run(progress, timing, rounds.state, rounds.totals)
        for report in rounds:
            progress = progress.after(report).check_finite(job)
            decode = sum(total.seconds for total in rounds.totals)
            yield Run(progress, replace(timing, decode=decode), rounds.state, rounds.totals)


def run_steps(start: Ready) -> Iterator[Run]:
    """As :func:`run_rounds`, but no round is launched before the one before it was consumed.

    Slower, for a consumer that needs the very state behind the round it looks at.
    """
    job, state, timing = start
    yield Run(Progress.of(state).check_finite(job), timing, *job.unmoved(state))
    begin = time.perf_counter()
    for leg in job.legs(state, stride=1):
        progress = Progress.of(leg.state).check_finite(job)
        timing = replace(timing, decode=timing.decode + time.perf_counter() - begin)
        yield Run(progress, timing, *leg)
        begin = time.perf_counter()


def _shown(drafter: Drafter) -> str:
    """A drafter's name; without a tree it is that of plain decoding."""
    return drafter.name if drafter.tree.widths else NoDraft().name


def statistics(job: Job, run: Run) -> Stats:
    """The counts of a run so far."""
    progress, timing = run.progress, run.timing
    used = zip(job.drafters, run.totals, strict=True)
    return Stats(
        prompt_tokens=tuple(len(row) for row in job.prompts),
        new_tokens=tuple(progress.emitted.tolist()),
        target_passes=tuple(progress.rounds.tolist()),
        histograms=tuple(map(tuple, progress.histogram.tolist())),
        trees=tuple(
            TreeUse(_shown(drafter), drafter.tree, total.rounds, total.tokens, total.seconds)
            for drafter, total in used
        ),
        prefill_seconds=timing.prefill,
        decode_seconds=timing.decode,
        compile_seconds=timing.compile,
        draft_state_bytes=tree_bytes(run.state.draft),
        memory=job.memory,
    )
