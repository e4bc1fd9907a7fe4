"""An engine tried out beside its requests: rehearsed, measured while idle, branched off its rows.

A rehearsal before the first request compiles everything. From the seconds of an idle engine's
chunks and rounds follow the size of chunks that keeps running streams moving, and which tree pays
beside how many live rows. What is here reads and sets an engine's own state; the engine knows
nothing of it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding.choices import load_of
from longspec_jax.decoding.chunks import KnownChunks
from longspec_jax.decoding.constrained import (
    FREE,
    Anything,
    Constraint,
    Guarded,
    constrained_programs,
)
from longspec_jax.decoding.copies import copy_prefix
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.policy import Choice, FastestWithinBudget
from longspec_jax.decoding.prefill import (
    prefill_chunks,
    prefill_programs,
    rows_outline,
    slot_programs,
)
from longspec_jax.decoding.programs import compile_side_by_side
from longspec_jax.decoding.round import one_round, slack_slots
from longspec_jax.decoding.rows import Request, RowShardings, release, stack
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.ops.caches import with_ends

TIMINGS = 3
"""Of which the least counts: what else runs on the machine only adds to them."""
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
    length, remaining = engine.rows.length, jnp.maximum(engine.rows.remaining, 1)
    begun = 0.0
    for candidate in range(len(engine.drafters)):
        # From the start again, so that no row outgrows its budget.
        fresh = {"length": jnp.copy(length), "remaining": jnp.copy(remaining)}
        engine._rows = replace(engine.rows, **fresh)
        for size in engine.launch_sizes * (1 if engine.target.mesh is None else 2):
            begun = engine.clock()
            launched = Choice(candidate, 1), kind, range(size), constraints
            engine._rows, report = engine._launch(*launched)
            np.asarray(report)
    return engine.clock() - begun


def programs_of_requests(
    engine: Engine, requests: Sequence[Request], *, constrained: bool
) -> Iterator[jax.stages.Lowered]:
    """Lower what takes longest to compile of all that requests may ask for, the slowest first.

    Arguments as of :func:`rehearse_requests`, on one device.
    """
    models = engine.target, engine.drafter, engine.params
    own = [engine.as_it_takes(request) for request in requests]
    slots = stack([own[-1]] * engine.slots)
    rows = rows_outline(*models, slots, batch=engine.slots, capacity=engine.capacity)
    for drafter, size in product(reversed(engine.drafters), reversed(engine.launch_sizes)):
        round_of, some = (engine.target, drafter, engine.params, rows), engine.some(range(size))
        if constrained:
            yield from constrained_programs(*round_of, engine.contents, *some)
        for kind in sorted({request.sampling.kind for request in requests}, reverse=True):
            launched = engine.target, drafter, kind, engine.params, rows
            yield one_round.lower(*launched, engine.contents.of_kind(kind), *some)
    prompts = engine.prompts
    sizes = {"capacity": engine.capacity, "chunks": (*prompts.short_chunks, prompts.chunk)}
    for logprobs in {None, engine.contents.logprobs}:
        first = stack([own[-1]])
        yield from prefill_programs(*models, first, batch=1, logprobs=logprobs, **sizes)
    if engine.slots > 1:
        yield from slot_programs(*models, slots, slots=engine.slots, capacity=engine.capacity)


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
    if engine.target.mesh is None and engine.streams:
        programs = programs_of_requests(engine, requests, constrained=constrained)
        compile_side_by_side(programs)

    def pass_through(length: int, request: Request, constraint: Constraint | None = None) -> None:
        engine.submit(np.zeros(length, np.int32), request, constraint=constraint)
        while engine.busy:
            engine.step()

    for request in requests:
        pass_through(1, request)
        if constrained:
            pass_through(1, request, Anything())
    prompts, slack = engine.prompts, slack_slots(engine.drafter.tree.num_levels)
    most = engine.capacity - slack - int(requests[0].max_new_tokens[0])
    for chunk in (*prompts.short_chunks, prompts.chunk):
        for request in (requests[0], requests[-1]):
            pass_through(min(chunk, most), request)
    # The second one copies the first one's chunk out of its slot, and the third one moves it there.
    twice = min(prompts.chunk + 1, most)
    pass_through(twice, requests[0])
    pass_through(twice, requests[0])
    engine.prefixes.collect(wait=True)
    engine.prefixes.forget_slots()
    pass_through(twice, requests[0])
    # A vacated slot, as a request leaves it that is cancelled.
    engine._rows = release(engine.rows, 0)
    for request in requests:
        rehearse(engine, request.sampling.kind)
    if constrained:
        rehearse(engine, SamplingKind.ANY, {0: Guarded(Anything())})
    engine._rows = release(engine.rows, 0)


def branch(
    engine: Engine,
    drafters: Sequence[Drafter],
    params: Params,
    draft: Any,
    *,
    own_cache: bool,
    tokens: int | None = None,
    **options: Any,
) -> Engine:
    """An engine whose rows go on from where another's are, with other drafters.

    Call it when all that was submitted is placed and read.

    Args:
      engine: the other one.
      drafters: its candidates.
      params: parameters of both models, as they take them.
      draft: their state behind the same tokens; copied.
      own_cache: whether the cache is copied. Else the other engine must not be stepped before
        :func:`rejoin`. Rings and states always are: what a branch appends overwrites them.
      tokens: most tokens that its rows emit, instead of what they may still emit.
      **options: of the constructor, instead of the other engine's.
    """
    own = {"streams": engine.streams, "ahead": engine.ahead, "clock": engine.clock, **options}
    other = Engine(
        *(engine.target, drafters, params),
        slots=engine.slots,
        capacity=engine.capacity,
        chunk=engine.prompts.chunk,
        short_chunks=engine.prompts.short_chunks,
        stop_width=engine.stop_width,
        adjusted=engine.adjusted,
        contents=engine.contents,
        **own,
    )
    shared = engine.rows.cache
    borrowed = None if own_cache else with_ends(shared, shared, jnp.copy)
    rows = jax.tree.map(
        lambda part: borrowed if borrowed and part is shared else jax.tree.map(jnp.copy, part),
        replace(engine.rows, draft=draft),
        is_leaf=lambda part: part is shared,
    )
    if tokens is not None:
        rows = replace(rows, remaining=jnp.full_like(rows.remaining, tokens))
    other._rows, other._next_id = rows, engine._next_id
    other._slots.copy_of(engine._slots, tokens)
    return other


def rejoin(engine: Engine, branch: Engine) -> None:
    """Take the cache back from a branch, but for rings and states; what it appended is unread."""
    cache = with_ends(branch.rows.cache, engine.rows.cache)
    engine._rows = replace(engine.rows, cache=cache)
    branch.close()


def chunk_seconds(engine: Engine, chunk: int, request: Request) -> float:
    """Seconds of a chunk of a prompt at the longest context that a row holds.

    Args:
      engine: an idle one.
      chunk: tokens of the chunk.
      request: options of one row, of any kind.
    """
    longest, found = engine.capacity // chunk * chunk, []
    tokens, length = np.zeros((1, longest), np.int32), np.asarray([longest], np.int32)
    shardings = [RowShardings.beside(engine.params.target, rows) for rows in (engine.slots, 1)]
    # The last chunk alone is run, behind a context of zeros.
    known = max(longest // chunk - 2, 0)
    for _ in range(TIMINGS):
        zeros = copy_prefix(*shardings, engine.rows.cache, np.int32(0), np.int32(0))
        launches = prefill_chunks(
            *(engine.target, engine.drafter, engine.params, tokens, length, request),
            capacity=engine.capacity,
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


def round_seconds(
    engine: Engine, candidate: int, live: int, context: int, kind: SamplingKind, rounds: int = 1
) -> float:
    """Seconds of a round of a candidate.

    Args:
      engine: an idle one, whose slots hold nothing that is needed.
      candidate: index of the candidate.
      live: rows that take part.
      context: tokens of each of them.
      kind: the sampling kind of the launch.
      rounds: that are launched before the first one is read.
    """
    found, rows = [], np.arange(engine.slots)
    slots = range(next(size for size in engine.launch_sizes if size >= live))
    length = np.full(engine.slots, context, np.int32)
    # A round may emit as many tokens as its tree has levels, and one more.
    most = rounds * slack_slots(engine.drafter.tree.num_levels)
    remaining = np.where(rows < live, most, 0).astype(np.int32)
    sharding = engine.rows.length.sharding
    for _ in range(1 + TIMINGS):
        fresh = jax.device_put({"length": length, "remaining": remaining}, sharding)
        engine._rows = replace(engine.rows, **fresh)
        jax.block_until_ready(engine.rows)
        begun = time.perf_counter()
        for _ in range(rounds):
            engine._rows, _ = engine._launch(Choice(candidate, 1), kind, slots)
        jax.block_until_ready(engine.rows)
        found.append((time.perf_counter() - begun) / rounds)
    # The first one may compile.
    return min(found[1:])


def timed_policies(engine: Engine, kind: SamplingKind) -> tuple[FastestWithinBudget, ...]:
    """A policy for every number of live rows, by powers of two, that knows the rounds' seconds.

    They are measured at a quarter of the longest context.

    Args:
      engine: an idle one.
      kind: the sampling kind of the rounds.
    """
    context = engine.capacity // 4
    loads = [min(1 << load, engine.slots) for load in range(load_of(engine.slots) + 1)]
    return tuple(
        FastestWithinBudget.timed(
            [
                round_seconds(engine, candidate, live, context, kind)
                for candidate in range(len(engine.drafters))
            ]
        )
        for live in loads
    )


def longest_round(engine: Engine, kind: SamplingKind) -> float:
    """Seconds of the slowest candidate's round with all rows at the longest context."""
    context = engine.capacity - slack_slots(engine.drafter.tree.num_levels) - 1
    context -= slack_slots(engine.drafter.tree.num_levels)
    return max(
        round_seconds(engine, candidate, engine.slots, max(context, 1), kind)
        for candidate in range(len(engine.drafters))
    )


def largest_chunk(
    sizes: Sequence[int], seconds: Callable[[int], float], a_round: float, most: float
) -> int:
    """The largest chunk that, with a round behind it, takes no longer than allowed.

    Warns where none does, and takes the smallest.

    Args:
      sizes: tokens of chunks, descending; those behind the first that fits are not timed.
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
        f"max_gap_ms={1000 * most:g} cannot be kept: a chunk of {sizes[-1]} tokens and a round "
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
