"""Run a prepared call through the decode loop, and time its phases apart.

The first call of a shape is preceded by a short run of the same shape: one prefill chunk and one
round of every tree. Whatever is compiled or loaded on first use is paid there and reported as compile
time, so that prefill and decode seconds mean the same in every call.
"""

import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding import adaptive, ahead, engine
from longspec_jax.decoding.adaptive import Leg
from longspec_jax.decoding.cache import bucket_capacity
from longspec_jax.decoding.engine import Params, Request, SpecState
from longspec_jax.decoding.policy import Always, FastestWithinBudget, Measurement, Policy
from longspec_jax.decoding.programs import RECENT
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft
from longspec_jax.generation.inputs import Prompts
from longspec_jax.generation.memory import MemoryPlan, tree_bytes
from longspec_jax.generation.result import Stats, TreeUse

SMALLEST_OUTPUT = 64
"""Output buffers are powers of two from here, so that few budgets are ever compiled."""


@dataclass(frozen=True)
class Shape:
    """The static sizes of a call."""

    capacity: int
    max_emitted: int
    chunk: int

    @classmethod
    def for_call(cls, longest: int, new_tokens: int, levels: int, chunk: int) -> "Shape":
        """Bucketed sizes that hold the longest prompt, its new tokens and a round's overhang."""
        slots = longest + new_tokens + engine.room(levels)
        slots = max(slots, -(-longest // chunk) * chunk)
        emitted = max(SMALLEST_OUTPUT, 1 << (new_tokens - 1).bit_length())
        return cls(bucket_capacity(slots), emitted, chunk)


@dataclass(frozen=True, eq=False)
class Job:
    """Everything one call needs, checked and on its way to the device."""

    target: CachedTarget
    drafters: tuple[Drafter, ...]
    """What a round may run, the cheapest first; the run chooses by the clock if there are several."""
    params: Params
    prompts: Prompts
    request: Request
    shape: Shape
    memory: MemoryPlan

    @property
    def drafter(self) -> Drafter:
        """The drafter that was asked for: of several, the one with the tallest tree."""
        return adaptive.tallest(self.drafters)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a compilation depends on."""
        sampling = self.request.sampling
        return (
            *(self.target, self.drafters, self.shape, len(self.prompts)),
            *(self.request.stop_tokens.shape, sampling.stochastic, sampling.filtered),
            tuple(leaf.shape for leaf in jax.tree.leaves(self.params.draft)),
        )

    def prefill(self) -> SpecState:
        """The state before the first round."""
        chunk = self.shape.chunk
        length = np.asarray([len(row) for row in self.prompts], np.int32)
        # Padded to whole chunks here: prompts of any length then meet one compiled shape.
        tokens = np.zeros((len(length), -(-int(length.max()) // chunk) * chunk), np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        return engine.prefill(
            self.target,
            self.drafter,
            self.params,
            jnp.asarray(tokens),
            jnp.asarray(length),
            self.request,
            capacity=self.shape.capacity,
            max_emitted=self.shape.max_emitted,
            chunk=chunk,
        )

    def outset(self, state: SpecState) -> Leg:
        """The run before its first round."""
        return Leg(state, (Measurement(),) * len(self.drafters))

    def legs(self, state: SpecState, stride: int | None = None) -> Iterator[Leg]:
        """Decode to the end in bursts of at most ``stride`` rounds; one burst if nothing is chosen."""
        models = self.target, self.drafters, self.params
        return adaptive.decode_bursts(*models, self.request, state, self._policy, stride=stride)

    def rounds(self, state: SpecState) -> ahead.Rounds:
        """Decode to the end round by round, each launched before the last one is read."""
        return ahead.Rounds(self._launch, state, self._policy, len(self.drafters))

    def rehearse(self, state: SpecState, ahead_of_host: bool) -> SpecState:
        """Run one round of everything that :meth:`legs` may, or :meth:`rounds`."""
        if not ahead_of_host:
            return adaptive.rehearse(self.target, self.drafters, self.params, self.request, state)
        for candidate in range(len(self.drafters)):
            state, _ = self._launch(candidate, state)
        return state

    @property
    def _policy(self) -> Policy:
        """What chooses among the drafters."""
        count = len(self.drafters)
        return FastestWithinBudget.over(count) if count > 1 else Always()

    def _launch(self, candidate: int, state: SpecState) -> tuple[SpecState, jax.Array]:
        """Start a round of one of the drafters; the state is donated."""
        drafter = self.drafters[candidate]
        return ahead.one_round(self.target, drafter, self.params, self.request, state)

    def without_draft(self) -> "Job":
        """The same call, decoded plainly."""
        return replace(self, drafters=(NoDraft(),), params=Params(self.params.target, None))


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
            histogram[row, count - 1] += count > 0
        emitted, rounds = self.emitted + report.count, self.rounds + (report.count > 0)
        return Progress(output, drafted, emitted, report.done, rounds, histogram)


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

    def prepare(self, job: Job, ahead_of_host: bool = False) -> float:
        """Make a short run if the job's shape is new; return its seconds, 0 if it is not.

        Args:
          job: the prepared call.
          ahead_of_host: whether :meth:`Job.rounds` will run it, not :meth:`Job.legs`.
        """
        signature = ahead_of_host, job.signature
        if signature in self._programs and RECENT.renew(self._programs[signature]):
            return 0.0
        two = jnp.minimum(job.request.max_new_tokens, 2)
        short = replace(
            job,
            prompts=tuple(row[: job.shape.chunk] for row in job.prompts),
            request=replace(job.request, max_new_tokens=two),
        )
        start = time.perf_counter()
        with RECENT.noted() as used:
            state = short.rehearse(short.prefill(), ahead_of_host)
        Progress.of(jax.block_until_ready(state))
        seconds = time.perf_counter() - start
        kept = {old: its for old, its in self._programs.items() if RECENT.keeps(its)}
        self._programs = {**kept, signature: used}
        return seconds


class Start(NamedTuple):
    """A prefilled state and the seconds it took; used up by the run that begins with it."""

    state: SpecState
    seconds: float


def prefill(job: Job) -> Start:
    """Run the prompts through the target, and time it."""
    start = time.perf_counter()
    state = jax.block_until_ready(job.prefill())
    return Start(state, time.perf_counter() - start)


def plain_copy(start: Start) -> Start:
    """A copy of a prefilled state from which plain decoding can begin.

    Prefill does not depend on the drafter, so what it computed serves both; the copy makes the plain
    run independent of whatever the speculative one writes.
    """
    state = start.state
    emitted = state.output.shape[1] - state.histogram.shape[1] + 1
    plain = state.replace(
        draft=(),
        output=state.output[:, :emitted],
        drafted=state.drafted[:, :emitted],
        histogram=state.histogram[:, :1],
    )
    return Start(jax.tree.map(jnp.copy, plain), start.seconds)


def run(job: Job, warm: WarmShapes, begin: Callable[[], Start] | None = None) -> Run:
    """Run to the end on the device, the host asked only where there is something to choose.

    Args:
      job: the prepared call.
      warm: the shapes compiled so far.
      begin: makes the prefilled state, after the warm-up; the job's own prefill if absent.
    """
    compiled = warm.prepare(job)
    state, seconds = begin() if begin else prefill(job)
    start = time.perf_counter()
    leg = job.outset(state)
    for leg in job.legs(state):  # noqa: B007 - only the last one counts.
        pass
    jax.block_until_ready(leg.state)
    timing = Timing(compiled, seconds, time.perf_counter() - start)
    return Run(Progress.of(leg.state), timing, *leg)


def run_rounds(
    job: Job, warm: WarmShapes, begin: Callable[[], Start] | None = None
) -> Iterator[Run]:
    """Yield after the prefill and after every round, while the next round already runs.

    The consumer's time is not counted. Arguments as in :func:`run`.
    """
    compiled = warm.prepare(job, ahead_of_host=True)
    state, seconds = begin() if begin else prefill(job)
    progress, timing = Progress.of(state), Timing(compiled, seconds)
    if progress.done.all():
        yield Run(progress, timing, *job.outset(state))
        return
    with job.rounds(state) as rounds:
        yield Run(progress, timing, rounds.state, rounds.totals)
        for report in rounds:
            progress = progress.after(report)
            decode = sum(total.seconds for total in rounds.totals)
            yield Run(progress, replace(timing, decode=decode), rounds.state, rounds.totals)


def run_steps(job: Job, warm: WarmShapes) -> Iterator[Run]:
    """As :func:`run_rounds`, but no round is launched before the one before it was consumed.

    Slower, for a consumer that needs the very state behind the round it looks at.
    """
    compiled = warm.prepare(job)
    state, seconds = prefill(job)
    timing = Timing(compiled, seconds)
    yield Run(Progress.of(state), timing, *job.outset(state))
    start = time.perf_counter()
    for leg in job.legs(state, stride=1):
        progress = Progress.of(leg.state)
        timing = replace(timing, decode=timing.decode + time.perf_counter() - start)
        yield Run(progress, timing, *leg)
        start = time.perf_counter()


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
            TreeUse(drafter.tree, total.rounds, total.tokens, total.seconds)
            for drafter, total in used
        ),
        prefill_seconds=timing.prefill,
        decode_seconds=timing.decode,
        compile_seconds=timing.compile,
        draft_state_bytes=tree_bytes(run.state.draft),
        memory=job.memory,
    )
