"""Some rounds of a prefilled call, timed as it will run them: what a tree costs and earns there."""

import math
import time
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding import adaptive
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.engine import slack_slots
from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Rows
from longspec_jax.generation import runner
from longspec_jax.generation.job import Job
from longspec_jax.generation.runner import Ready
from longspec_jax.generation.timings import TreeTiming

Arrays = TypeVar("Arrays")

ROUNDS = 10
"""Of one timing at least; the fastest counts, since whatever else runs only adds."""
PASSES = 2, 1
"""Timings of every tree in each of the passes over all of them, behind a first round each."""
SPAN = 0.05
"""Seconds of one timing at least: ten rounds of a small model on a GPU take less than the threads
of a stream need to come into step."""
LONG = 2.0
"""Seconds of a timing after which a tree's next ones are left out."""


def most_tokens(job: Job) -> int:
    """Tokens that a row of the call's buffers has room for."""
    longest = max(map(len, job.prompts))
    beside = job.shape.capacity - longest - slack_slots(job.drafter.tree.num_levels)
    return min(job.shape.max_emitted, beside)


def timed_pace(start: Ready, job: Job, streams: bool, timings: int) -> tuple[TreeTiming, Ready]:
    """Time some rounds of a job, as it will run them, and give the prefilled call back.

    The fastest of so many ``timings`` counts; but for the first round, which may have to wait. They
    append to the call's own cache, of which nothing behind the committed tokens is ever read
    before it is written anew: of many rows no second one would fit. All else is copied.
    """
    most = jnp.full_like(start.state.rows.remaining, most_tokens(start.job) - 1)
    if streams:
        rows = _copy(runner.rows_for(job, start), but=start.state.rows.cache)
        seen, rows = _streamed(job, replace(rows, remaining=most), timings)
    else:
        state = _copy(runner.state_for(job, start), but=start.state.rows.cache)
        state = replace(state, rows=replace(state.rows, remaining=most))
        seen, rows = _in_bursts(job, state, timings)
    total = sum(seen, Measurement())
    # The first round and what follows it may have to wait for the copy.
    seconds = min(part.seconds / part.rounds for part in seen[1:] or seen)
    pace = TreeTiming(job.drafter.name, job.drafter.tree, seconds, total.tokens / total.row_rounds)
    before = replace(start.state, rows=replace(start.state.rows, cache=rows.cache))
    return pace, start._replace(state=before)


def _copy(arrays: Arrays, but: KVCache) -> Arrays:
    """The same arrays once more, all but those of a cache among them."""
    return jax.tree.map(
        lambda part: part if part is but else jnp.copy(part),
        arrays,
        is_leaf=lambda part: part is but,
    )


def _in_bursts(job: Job, state: SpecState, timings: int) -> tuple[list[Measurement], Rows]:
    """A round and bursts of rounds, and the rows behind them; the state is donated."""
    seen: list[Measurement] = []
    for _ in range(1 + timings):
        count = max(ROUNDS, math.ceil(SPAN * seen[-1].rounds / seen[-1].seconds)) if seen else 1
        begin = time.perf_counter()
        models = job.target, job.drafter, job.params
        state, report = adaptive.burst(*models, state, np.int32(count))
        rounds, row_rounds, tokens, live = np.asarray(report).tolist()
        seen.append(Measurement(rounds, row_rounds, tokens, time.perf_counter() - begin))
        if not live or seen[-1].seconds > LONG:
            break
    return seen, state.rows


def _streamed(job: Job, rows: Rows, timings: int) -> tuple[list[Measurement], Rows]:
    """The same, each round read while the next one runs; the rows are donated."""
    seen: list[Measurement] = []
    with job.rounds(rows) as rounds:
        for report in rounds:
            part = rounds.totals[0] - sum(seen, Measurement())
            over = report.done.all() or part.seconds > LONG
            enough = part.rounds >= ROUNDS and part.seconds >= SPAN if seen else part.rounds > 0
            if over or enough:
                seen.append(part)
            if over or len(seen) == 1 + timings:
                break
        return seen, rounds.rows
