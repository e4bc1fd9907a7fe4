"""Seconds of an idle engine's chunks and rounds, measured before its first request.

From them follow the size of chunks that keeps running streams moving, and which tree pays beside
how many live rows.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from longspec_jax.decoding.choices import load_of
from longspec_jax.decoding.chunks import KnownChunks
from longspec_jax.decoding.copies import copy_prefix
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.policy import Choice, FastestWithinBudget
from longspec_jax.decoding.prefill import prefill_chunks
from longspec_jax.decoding.round import slack_slots
from longspec_jax.decoding.rows import Request, RowShardings
from longspec_jax.decoding.sampling import SamplingKind

TIMINGS = 3
"""Of which the least counts: what else runs on the machine only adds to them."""
SMALLEST_CHUNK = 64
"""Tokens of the smallest chunk that is tried."""


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
    engine: Engine,
    candidate: int,
    live: int,
    context: int,
    kind: SamplingKind,
    rounds: int = 1,
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
            engine._rows, _ = engine._launch(Choice(candidate, 1), kind)
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
