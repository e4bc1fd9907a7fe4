"""Run a prepared call through the decode loop, and time its phases apart.

A call whose rows all have a slot is prefilled as a batch and decoded to the end. One with more rows
than slots flows: its prompts pass through the slots, each prefilled while the others decode.

The first call of a shape is preceded by a short run of the same shape: at most two prefill
chunks and one round of every tree. Whatever is compiled or loaded on first use is paid there and
reported as compile time, so that prefill and decode seconds mean the same in every call. On one
device, with its cache there and a slot for every row, prefill and rounds are compiled side by side
before that run begins (:mod:`longspec_jax.decoding.compiling`).
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Set
from dataclasses import replace
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding.compiling import compile_side_by_side
from longspec_jax.decoding.engine import slack_slots
from longspec_jax.decoding.programs import RECENT
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Rows
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.activity import Compiling, OnActivity, Prefilling
from longspec_jax.generation.job import Job
from longspec_jax.generation.progress import Progress, Run, Timing


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
          streams: whether :meth:`Job.rounds` will run it, not :meth:`Job.bursts`.
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
            if job.foreseeable:
                programs = short.round_programs(streams) if rounds else ()
                compile_side_by_side(chain(programs, short.prefill_programs()))
            if job.flows:
                for _ in _flow(Waiting(short, Timing())):
                    pass
            else:
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


class Waiting(NamedTuple):
    """A compiled call whose prompts will flow through its row slots."""

    job: Job
    timing: Timing
    on_activity: OnActivity | None = None


Begin: TypeAlias = Callable[[bool], Ready | Waiting]
"""``streams -> ready``: makes a call ready to run, all at once or to be followed round by round."""


def ready(
    job: Job,
    warm: WarmShapes,
    *,
    streams: bool,
    rounds: bool = True,
    on_activity: OnActivity | None = None,
) -> Ready | Waiting:
    """Compile what is new and, where every row has a slot, run the prompts through the target.

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
    if job.flows:
        return Waiting(job, Timing(compiled), on_activity)
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
    record = start.state.record
    height = slack_slots(job.drafter.tree.num_levels)
    emitted = record.output.shape[1] - record.histogram.shape[1] + height
    return SpecState(
        rows_for(job, start),
        replace(
            record,
            output=record.output[:, :emitted],
            drafted=record.drafted[:, :emitted],
            histogram=record.histogram[:, :height],
        ),
    )


def rows_for(job: Job, start: Ready) -> Rows:
    """The rows of :func:`state_for`."""
    rows = start.state.rows
    plain = isinstance(job.drafter, NoDraft)
    return replace(rows, draft=() if plain else start.job.own_state(job.drafter, rows.draft))


def run(start: Ready | Waiting) -> Run:
    """Run to the end, on the device alone where there is nothing to choose or to admit."""
    if isinstance(start, Waiting):
        *_, last = _flow(start)
        return last
    job, state, timing = start
    begin = time.perf_counter()
    result = job.unmoved(state)
    for result in job.bursts(state):  # noqa: B007 - only the last one counts.
        pass
    jax.block_until_ready(result.state)
    timing = replace(timing, decode=time.perf_counter() - begin)
    progress = Progress.of(result.state).check_finite(job)
    return Run(progress, timing, result.state.rows, result.totals)


def run_rounds(start: Ready | Waiting) -> Generator[Run, None, None]:
    """Yield after the prefill and after every round, while the next round already runs.

    Where the rows flow, the prefill of each is reported as it comes.

    The consumer's time is not counted. Close the iterator to stop early.
    """
    if isinstance(start, Waiting):
        yield from _flow(start)
        return
    job, state, timing = start
    progress = Progress.of(state).check_finite(job)
    if progress.done.all():
        yield Run(progress, timing, state.rows, job.unmoved(state).totals)
        return
    with job.rounds(state.rows) as rounds:
        yield Run(progress, timing, rounds.rows, rounds.totals)
        for report in rounds:
            progress = progress.after(report).check_finite(job)
            decode = sum(total.seconds for total in rounds.totals)
            yield Run(progress, replace(timing, decode=decode), rounds.rows, rounds.totals)


def run_steps(start: Ready) -> Iterator[Run]:
    """As :func:`run_rounds`, but no round is launched before the one before it was consumed.

    Slower, for a consumer that needs the very state behind the round it looks at.
    """
    job, state, timing = start
    totals = job.unmoved(state).totals
    yield Run(Progress.of(state).check_finite(job), timing, state.rows, totals)
    begin = time.perf_counter()
    for result in job.bursts(state, stride=1):
        progress = Progress.of(result.state).check_finite(job)
        timing = replace(timing, decode=timing.decode + time.perf_counter() - begin)
        yield Run(progress, timing, result.state.rows, result.totals)
        begin = time.perf_counter()


def _flow(start: Waiting) -> Generator[Run, None, None]:
    """Decode in row slots, the prompts admitted in order; yield whenever rows gain tokens.

    Until the first row does, the prefill of its prompt is reported.
    """
    job, timing, on_activity = start
    batch = job.continuous()
    height = slack_slots(job.drafter.tree.num_levels)
    progress = Progress.none(len(job.prompts), job.shape.max_emitted, height)
    waiting = deque(enumerate(zip(job.prompts, job.requests(), strict=True)))
    while waiting or batch.busy:
        if waiting and batch.wants_more:
            row, (prompt, request) = waiting.popleft()
            batch.admit(row, prompt, request)
        gained = batch.step()
        if not gained:
            if on_activity and not progress.emitted.any():
                on_activity(Prefilling(batch.prefilled, len(job.prompts[0])))
            continue
        for part in gained:
            progress = progress.with_gained(part)
        decode = sum(total.seconds for total in batch.totals)
        timing = replace(timing, prefill=batch.prefill_seconds, decode=decode)
        yield Run(progress.check_finite(job), timing, batch.rows, batch.totals)
