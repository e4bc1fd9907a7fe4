"""What streaming costs: rounds driven from Python, beside the same rounds in one executable.

Twice: as the library streams, each round launched before the one before it is read
(:class:`longspec_jax.decoding.ahead.Rounds`), and step by step, each launched after that, which is
what a stream costs whose device waits for the host. Every report is fetched and its tokens are
taken out, as :func:`longspec_jax.generation.runner.run_rounds` and its consumers do; turning tokens
into text is not counted. The time ends with the device's work: the round that was launched before
the last report was read is part of it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import jax
from jaxtyping import UInt

from longspec_jax.axes import Array
from longspec_jax.decoding.ahead import Report, Rounds, fetch, report_of
from longspec_jax.decoding.policy import Always
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params

from .simulated import simulated_step

Advance: TypeAlias = Callable[[SpecState], tuple[SpecState, Array]]
"""Starts a round, donates the state, and returns the next one and the round's report."""
Added: TypeAlias = list[list[int]]
"""Tokens that a round adds to every row."""


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "seed"),
    donate_argnames=("state",),
)
def simulated_round(
    target: TargetModel,
    drafter: Drafter,
    seed: int,
    edges: UInt[Array, " h"],
    params: Params,
    state: SpecState,
) -> tuple[SpecState, Array]:
    """:func:`longspec_jax.decoding.ahead.one_round` with the acceptance of ``simulated_decode``."""
    after, emitted = simulated_step(target, drafter, seed, edges, params, state)
    return after, report_of(emitted, after.rows)


def stream(advance: Advance, state: SpecState) -> Iterator[Added]:
    """Yield the tokens of every round as the library does; returns the last state.

    Arguments as in :func:`stream_by_steps`.
    """
    with Rounds(lambda _, state: advance(state), state, Always(), 1) as rounds:
        for report in rounds:
            yield _added(report)
    return rounds.rows


def stream_by_steps(advance: Advance, state: SpecState) -> Iterator[Added]:
    """Yield the tokens of every round, launched when the one before it was read.

    Args:
      advance: starts a round.
      state: the state before the first round, with a row that is not done; donated.
    """
    done = False
    while not done:
        state, packed = advance(state)
        report = Report.of(fetch(packed))
        done = report.done.all()
        yield _added(report)
    return state


def read_all(rounds: Any) -> SpecState:
    """Go through a stream to its end as one that reads every round; returns the last state."""
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return end.value


def _added(report: Report) -> Added:
    rows = zip(report.tokens, report.count, strict=True)
    return [row[:count].tolist() for row, count in rows]
