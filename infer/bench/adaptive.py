"""What adaptive decoding costs with a draft that is of no use.

It decodes as the library's ``adaptive=True``: bursts of rounds with no tree, with a smaller one or
with the setting's own, as a policy chooses by the clock
(:func:`longspec_jax.decoding.adaptive.decode_bursts`). Every decode begins with a policy that knows
nothing, as every call of the library does, so its time includes finding out. No acceptance is
simulated: the walk is the real one, a random draft earns next to nothing, and what is lost to plain
decoding is the price of the choice.
"""

import statistics
import time
from collections import deque
from typing import Any, NamedTuple

import jax

from longspec_jax.config import TreeConfig
from longspec_jax.decoding import adaptive
from longspec_jax.decoding.policy import FastestWithinBudget, Measurement

from .decode_setting import Bench
from .timing import rounded


class AdaptiveTime(NamedTuple):
    """A whole adaptive decode, timed."""

    seconds: float
    """From its first choice to the end of the device's work."""
    totals: tuple[Measurement, ...]
    """What every candidate did, the one without a tree first."""


def time_adaptive(bench: Bench, plain_step: float) -> dict[str, Any]:
    """What an emitted token of a row costs, and how the rounds of all repetitions were shared out.

    A candidate's milliseconds per round hold the host's part of its bursts.

    Args:
      bench: what is decoded, once to compile it and then in the setting's repetitions.
      plain_step: seconds in which plain decoding emits a token in every row.
    """
    setting = bench.setting
    trees = [drafter.tree for drafter in adaptive.candidates([bench.drafter])]
    _, *runs = [decode(bench) for _ in range(setting.repetitions + 1)]
    by_tree = zip(*(run.totals for run in runs), strict=True)
    totals = [sum(measured, Measurement()) for measured in by_tree]
    whole = sum(totals, Measurement())
    row_tokens = whole.tokens / (setting.repetitions * setting.batch)
    token = statistics.median(run.seconds for run in runs) / row_tokens
    named = [(name(tree), total) for tree, total in zip(trees, totals, strict=True)]
    return {
        "adaptive_ms_per_token": rounded(1e3 * token),
        "adaptive_over_plain": rounded(token / plain_step),
        "adaptive_acceptance_length": rounded(whole.tokens / whole.row_rounds),
        "adaptive_choices": {candidate: total.rounds for candidate, total in named},
        "adaptive_ms_per_round": {
            candidate: rounded(1e3 * total.seconds / total.rounds)
            for candidate, total in named
            if total.rounds
        },
    }


def decode(bench: Bench) -> AdaptiveTime:
    """Decode the setting's tokens; the state at the end leaves its cache to the bench."""
    drafters = adaptive.candidates([bench.drafter])
    state = jax.block_until_ready(bench.state(adaptive.tallest(drafters)))
    begin = time.perf_counter()
    results = adaptive.decode_bursts(
        bench.model.target,
        drafters,
        bench.model.params,
        state,
        FastestWithinBudget.over(len(drafters)),
    )
    result = deque(results, maxlen=1).pop()
    jax.block_until_ready(result.state)
    seconds = time.perf_counter() - begin
    bench.cache = result.state.rows.cache
    return AdaptiveTime(seconds, result.totals)


def name(tree: TreeConfig) -> str:
    """A candidate in a row."""
    return f"tree {tree}" if tree.widths else "plain"
