"""The warm-up of an idle engine: everything is compiled, and its rounds and chunks are timed.

Before the first request every program runs once, so that no later one compiles. From the seconds of
chunks and rounds follow the size of chunks that keeps running streams moving, and which tree pays
alongside how many live rows.
"""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import jax
import numpy as np

from longspec_jax.decoding.cache_transfer import copy_prefix
from longspec_jax.decoding.chooser import Choice, load_of
from longspec_jax.decoding.constrained import (
    FREE,
    Anything,
    Constraint,
    Guarded,
    constrained_programs,
)
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.jit_cache import compile_side_by_side
from longspec_jax.decoding.policy import FastestWithinBudget
from longspec_jax.decoding.prefill import (
    KnownChunks,
    prefill_chunks,
    prefill_programs,
    rows_outline,
    slot_programs,
)
from longspec_jax.decoding.report import shown_by
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.decoding.rows import Request, stack
from longspec_jax.decoding.sampling import SamplingKind

TIMINGS = 3
"""Of which the least counts: what else runs on the machine only adds to them."""
LONG = 0.5
"""Seconds of a launch that is timed once: a short run would wait for no more of them."""
ROUNDS = 5
"""Rounds of a longer launch, against which one of a single round shows the wait."""
BRIEF = 0.02
"""Seconds of a round below which the host's wait, some milliseconds, is timed apart."""
SMALLEST_CHUNK = 64
"""Tokens of the smallest chunk that is tried."""


def rehearse(
    engine: Engine, kind: SamplingKind, constraints: Mapping[int, Guarded] = FREE
) -> float:
    """Run a round of every candidate and size of launch, so that no later one compiles.

    The engine is of no use afterwards, unless it is idle. On a mesh there are two: a launch's rows
    may be sharded otherwise than those of the prefill, so that the second round compiles, too.

    Args:
      engine: whose launches are compiled.
      kind: of the launches to come.
      constraints: of the launches to come, by slot.

    Returns:
      Seconds of the last candidate's last round, at most.
    """
    # A copy, because the launches donate the rows.
    length = jax.device_put(engine.rows.length, may_alias=False)
    remaining = jax.device_put(np.ones(engine.runner.slots, np.int32), length.sharding)
    begun = 0.0
    for candidate in range(len(engine.runner.drafters)):
        # From the start again, so that no row outgrows its budget.
        engine.begin_at(length, remaining)
        for size in engine.launch_sizes * (1 if engine.runner.target.mesh is None else 2):
            begun = engine.clock()
            np.asarray(engine.try_rounds(Choice(candidate, 1), kind, range(size), constraints))
    return engine.clock() - begun


def programs(
    engine: Engine,
    requests: Sequence[Request],
    *,
    chunks: Sequence[int],
    prompt_logprobs: Collection[int | None],
    rounds: bool = True,
    constrained: bool = False,
) -> Iterator[jax.stages.Lowered]:
    """Lower what takes longest to compile of all that requests may ask for, the slowest first.

    Args:
      engine: of one device, without arrays of its own yet.
      requests: of one row, one of every kind; the last one asks for all that can be reported.
      chunks: sizes of the chunks that prompts are prefilled in.
      prompt_logprobs: alternatives of a prompt's tokens that are reported; None for none.
      rounds: whether requests are decoded at all.
      constrained: whether requests may have a constraint.
    """
    runner = engine.runner
    models = runner.target, runner.drafter, runner.params
    last = runner.request(requests[-1])
    slots = stack([last] * runner.slots)
    rows = rows_outline(*models, slots, batch=runner.slots, capacity=runner.capacity)
    kinds = sorted({request.sampling.kind for request in requests}, reverse=True)
    # The more nodes, the longer a round takes to compile, as a rule.
    slowest_first = sorted(runner.drafters, key=lambda one: -one.tree.num_nodes)
    for drafter, size in product(slowest_first if rounds else (), reversed(engine.launch_sizes)):
        round_of, some = (
            (runner.target, drafter, runner.params, rows),
            runner.slot_arguments(range(size)),
        )
        if constrained:
            contents = runner.reported[SamplingKind.ANY]
            yield from constrained_programs(*round_of, contents, *some)
        for kind in kinds:
            launched = runner.target, drafter, kind, runner.params, rows
            contents = runner.reported[kind]
            if runner.streams:
                yield one_round.lower(*launched, contents, *some)
            else:
                yield many_rounds.lower(*launched, runner.limit(1), contents, *some)
    batch = runner.slots if runner.together else 1
    for logprobs in prompt_logprobs:
        yield from prefill_programs(
            *models,
            stack([last] * batch),
            batch=batch,
            capacity=runner.capacity,
            chunks=chunks,
            logprobs=logprobs,
        )
    if runner.slots > 1 and not runner.together:
        yield from slot_programs(*models, slots, slots=runner.slots, capacity=runner.capacity)


def rehearse_requests(
    engine: Engine, requests: Sequence[Request], *, constrained: bool = False
) -> None:
    """Run requests through an idle engine, so that no later one compiles anything.

    Args:
      engine: an idle one, that goes on to serve.
      requests: of one row, one of every kind, of few new tokens; the last one asks for all that
        can be reported.
      constrained: whether requests may have a constraint.
    """
    prompts = engine.prompts
    chunks = prompts.chunks
    if engine.runner.target.mesh is None:
        asked = {None, engine.runner.contents.logprobs}
        compile_side_by_side(
            programs(
                engine, requests, chunks=chunks, prompt_logprobs=asked, constrained=constrained
            )
        )

    def pass_through(length: int, request: Request, constraint: Constraint | None = None) -> None:
        engine.submit(np.zeros(length, np.int32), request, constraint=constraint)
        while engine.busy:
            engine.step()

    for request in requests:
        pass_through(1, request)
        if constrained:
            pass_through(1, request, Anything())
    slack = engine.runner.slack
    most = engine.runner.capacity - slack - int(requests[0].max_new_tokens[0])
    for chunk in chunks:
        for request in (requests[0], requests[-1]):
            pass_through(min(chunk, most), request)
    # The second one copies the first one's chunk out of its slot, and the third one moves it there.
    twice = min(chunks[-1] + 1, most)
    pass_through(twice, requests[0])
    pass_through(twice, requests[0])
    if engine.prefixes is not None:
        engine.prefixes.collect(wait=True)
        engine.prefixes.forget_slots()
    pass_through(twice, requests[0])
    # A vacated slot, as a request leaves it that is cancelled.
    engine.vacate(0)
    for request in requests:
        rehearse(engine, request.sampling.kind)
    if constrained:
        rehearse(engine, SamplingKind.ANY, {0: Guarded(Anything())})
    engine.vacate(0)


def chunk_seconds(engine: Engine, chunk: int, request: Request) -> float:
    """Seconds of a chunk of a prompt at the longest context that a row holds.

    Args:
      engine: an idle one.
      chunk: tokens of the chunk.
      request: options of one row, of any kind.
    """
    longest, found = engine.runner.capacity // chunk * chunk, []
    tokens, length = np.zeros((1, longest), np.int32), np.asarray([longest], np.int32)
    shardings = engine.runner.shardings, engine.runner.row_shardings
    # Only the last chunk is run, after a context of zeros.
    known = max(longest // chunk - 2, 0)
    for _ in range(TIMINGS):
        zeros = copy_prefix(*shardings, engine.rows.cache, np.int32(0), np.int32(0))
        launches = prefill_chunks(
            engine.runner.target,
            engine.runner.drafter,
            engine.runner.params,
            tokens,
            length,
            request,
            shardings=engine.runner.row_shardings,
            capacity=engine.runner.capacity,
            chunk=chunk,
            known=KnownChunks(zeros, known),
        )
        # The first one compiles, and goes along with what a draft learns of the known chunks.
        if longest > chunk:
            jax.block_until_ready(next(launches).ready)
        begun = time.perf_counter()
        jax.block_until_ready(next(launches).ready)
        found.append(time.perf_counter() - begun)
    return min(found)


class RoundTimes(NamedTuple):
    """What rounds take of every candidate."""

    seconds: tuple[float, ...] = ()
    """Of a round; of none where none ran."""
    wait: float = 0.0
    """Seconds that the host adds to a launch."""
    unverified: tuple[float, ...] = ()
    """Of a round that finds its tree not to pay; empty where rounds weigh none."""


def round_times(engine: Engine, live: int, context: int, kind: SamplingKind) -> RoundTimes:
    """What rounds of every candidate take, told from the wait by launches of two lengths.

    Arguments as in :func:`launch_seconds`.
    """
    at, several = (live, context, kind), range(len(engine.runner.drafters))
    single = [launch_seconds(engine, Choice(index, 1), *at) for index in several]
    # Rounds that are launched one by one are queued ahead, and the device waits for nothing.
    brief = [index for index in several if single[index] < BRIEF]
    longer = {index: launch_seconds(engine, Choice(index, ROUNDS), *at) for index in brief}
    waits = [(ROUNDS * single[index] - longer[index]) / (ROUNDS - 1) for index in brief]
    wait = max(float(np.median(waits)), 0.0) if brief else 0.0
    seconds = [
        max(longer[index] - wait, 0.1 * longer[index]) / ROUNDS if index in longer else each
        for index, each in enumerate(single)
    ]
    return RoundTimes(tuple(seconds), 0.0 if engine.runner.streams else wait)


def launch_seconds(
    engine: Engine, choice: Choice, live: int, context: int, kind: SamplingKind
) -> float:
    """Seconds of rounds that are launched together.

    Args:
      engine: an idle one, whose slots hold nothing that is needed.
      choice: the candidate, and how many rounds of it.
      live: rows that take part.
      context: tokens of each of them.
      kind: the sampling kind of the launch.
    """
    found, rows = [], np.arange(engine.runner.slots)
    slots = range(next(size for size in engine.launch_sizes if size >= live))
    length = np.full(engine.runner.slots, context, np.int32)
    remaining = np.where(rows < live, choice.rounds, 0).astype(np.int32)
    for _ in range(1 + TIMINGS):
        engine.begin_at(length, remaining)
        jax.block_until_ready(engine.rows)
        begun = time.perf_counter()
        for _ in range(choice.rounds if engine.runner.streams else 1):
            engine.try_rounds(choice, kind, slots)
        jax.block_until_ready(engine.rows)
        found.append(time.perf_counter() - begun)
        if len(found) > 1 and found[-1] > LONG:
            break
    # The first one may compile.
    return min(found[1:])


def timed_policies(engine: Engine, kind: SamplingKind) -> tuple[FastestWithinBudget, ...]:
    """A policy for every number of live rows, by powers of two, that knows the rounds' seconds.

    They are measured at a quarter of the longest context.

    Args:
      engine: an idle one.
      kind: the sampling kind of the rounds.
    """
    context = engine.runner.capacity // 4
    loads = [
        min(1 << load, engine.runner.slots) for load in range(load_of(engine.runner.slots) + 1)
    ]
    times = [round_times(engine, live, context, kind) for live in loads]
    known = shown_by(engine.runner.drafters, engine.runner.params)
    return tuple(
        FastestWithinBudget.timed(each.seconds, wait=each.wait, shows=known) for each in times
    )


def longest_round(engine: Engine, kind: SamplingKind) -> float:
    """Seconds of the slowest candidate's round with all rows at the longest context."""
    context = engine.runner.capacity - engine.runner.slack - 1
    context -= engine.runner.slack
    return max(
        launch_seconds(engine, Choice(candidate, 1), engine.runner.slots, max(context, 1), kind)
        for candidate in range(len(engine.runner.drafters))
    )


def largest_chunk(
    sizes: Sequence[int], seconds: Callable[[int], float], a_round: float, most: float
) -> int:
    """The largest chunk that, with a round after it, takes no longer than allowed.

    Warns where none does, and takes the smallest.

    Args:
      sizes: tokens of chunks, descending; those after the first that fits are not timed.
      seconds: of a chunk, by its tokens.
      a_round: seconds of a round.
      most: seconds allowed.
    """
    needed = math.inf
    for size in sizes:
        needed = seconds(size) + a_round
        if needed <= most:
            return size
    warnings.warn(
        f"max_itl_ms={1000 * most:g} cannot be kept: a chunk of {sizes[-1]} tokens and a round "
        f"take {1000 * needed:.0f} ms at the longest context; allow more, or shorter contexts",
        stacklevel=2,
    )
    return sizes[-1]


def smaller_chunks(chunk: int) -> list[int]:
    """A chunk's size and its halves, down to :data:`SMALLEST_CHUNK`; descending."""
    sizes = [chunk]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= SMALLEST_CHUNK:
        sizes.append(sizes[-1] // 2)
    return sizes
