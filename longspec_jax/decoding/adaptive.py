"""Decode in bursts of rounds, each with the tree, or none, that pays best at the moment.

Every candidate is one executable that runs some rounds on the device. Between two bursts the host
reads four numbers and asks a :class:`~longspec_jax.decoding.policy.Policy` what to run next. All
candidates share one drafter's state, and plain decoding keeps it up to date as well, so that every
switch finds the draft as if it had run throughout.

A switch changes no token: what is emitted are the target's own draws, keyed by seed and position.
As everywhere this is exact in float32; in bfloat16 trees of different sizes may settle a near-tie
differently, and which tree meets it depends on the clock.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.config import PLAIN, TreeConfig
from longspec_jax.decoding.engine import recorded_step
from longspec_jax.decoding.policy import Measurement, Policy
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy, on_one_level


class BurstResult(NamedTuple):
    """An adaptive run between two bursts."""

    state: SpecState
    """The live state; donated when the run goes on."""
    totals: tuple[Measurement, ...]
    """What every candidate has done so far."""


def smaller_tree(tree: TreeConfig) -> TreeConfig:
    """A chain of half a tree's levels: most of what is accepted, where every node costs.

    ``(4, 16, 16, 16, 16)`` becomes ``(1, 1, 1)``. Of a chain with a tree at its end it is half the
    chain with the same tree.
    """
    if tree.chain:
        half, end = -(-tree.chain // 2), tree.end
        budget = None if end.budget is None else half + end.budget
        return TreeConfig((1,) * half + end.widths, budget, tree.threshold, half)
    return TreeConfig((1,) * -(-tree.num_levels // 2), chain=tree.chain)


def candidates(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What a run may choose among: no tree, and the drafters; a smaller tree too of a single one.

    Partial verification does not pay everywhere, so of a single hierarchy its draft's own tree is
    one as well, verified on one level.

    Args:
      drafters: of which each differs from the others in its tree, or is one of several with a
        common state (:class:`longspec_jax.drafters.draft.OneOf`).

    Returns:
      The candidates, the cheapest first.
    """
    own = list(drafters)
    if len(own) == 1:
        [alone] = own
        own.insert(0, with_tree(alone, smaller_tree(alone.tree)))
        if isinstance(alone, Hierarchy) and alone.levels:
            own.append(with_tree(alone, on_one_level(alone.inner.tree)))
    own.sort(key=lambda drafter: drafter.tree.num_nodes)
    return tuple(dict.fromkeys([with_tree(own[0], PLAIN), *own]))


def tallest(drafters: Sequence[Drafter]) -> Drafter:
    """The drafter that shapes the state: output and histogram must hold the longest round."""
    return max(drafters, key=lambda drafter: drafter.tree.num_levels)


@program(static_argnames=("target", "drafter"), donate_argnames=("state",))
def burst(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    state: SpecState,
    limit: Array,
) -> tuple[SpecState, Array]:
    """At most ``limit`` rounds, fewer if every row is done; the state is donated.

    Args:
      target: the target's static part.
      drafter: the drafter's static part; its tree no taller than the one that shaped the state.
      params: parameters of both.
      state: the state before the first round.
      limit: most rounds; traced, so that every number of rounds is one executable.

    Returns:
      The state, and ``[4]`` int32: rounds, rounds of live rows, tokens emitted, rows not done.
    """

    def unfinished(carry: tuple[Array, SpecState]) -> Array:
        rounds, state = carry
        return (rounds < limit) & ~state.rows.done.all()

    def advance(carry: tuple[Array, SpecState]) -> tuple[Array, SpecState]:
        rounds, state = carry
        return rounds + 1, recorded_step(target, drafter, params, state)

    before = state.record.rounds.sum(), state.record.emitted.sum()
    rounds, state = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), state))
    gained = state.record.rounds.sum() - before[0], state.record.emitted.sum() - before[1]
    report = jnp.stack([rounds, *gained, (~state.rows.done).sum()])
    return state, report.astype(jnp.int32)


def rehearse(
    target: TargetModel,
    drafters: Sequence[Drafter],
    params: Params,
    state: SpecState,
) -> SpecState:
    """One round of every candidate: compiles and loads all that :func:`decode_bursts` runs.

    Rows that are done take part as if they were not; the state is donated and of no further use.
    """
    length, emitted = state.rows.length, state.record.emitted
    for drafter in drafters:
        # Every candidate from the start anew, so that no row outgrows its budget.
        rows = replace(
            state.rows, length=jnp.copy(length), remaining=jnp.maximum(state.rows.remaining, 1)
        )
        state = SpecState(rows, replace(state.record, emitted=jnp.copy(emitted)))
        state, _ = burst(target, drafter, params, state, np.int32(1))
    return state


def check_one_clock(candidates: int) -> None:
    """Refuse a choice by the clock where several clocks would disagree."""
    if candidates > 1 and jax.process_count() > 1:
        raise NotImplementedError(
            f"{jax.process_count()} processes would each choose by their own clock and run "
            "different programs; decode with one fixed tree instead"
        )


def decode_bursts(
    target: TargetModel,
    drafters: Sequence[Drafter],
    params: Params,
    state: SpecState,
    policy: Policy,
    *,
    stride: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[BurstResult]:
    """Rounds until every row is done; yields after each burst: take what you need, then resume.

    With one drafter and the policy :class:`~longspec_jax.decoding.policy.Always` it is the whole
    run in one executable. Compile beforehand with :func:`rehearse`, or the first timing of every
    candidate holds its compilation. The time in which the consumer holds a result is not counted.

    Args:
      target: the target's static part.
      drafters: the candidates, in the policy's order; they share parameters and state.
      params: parameters of both models.
      state: the prefilled state, shaped by the :func:`tallest` of the candidates; donated.
      policy: chooses the candidate and the rounds of every burst.
      stride: most rounds of a burst, 1 to see every round; whole bursts if absent.
      clock: seconds, for the policy and the totals.

    Raises:
      NotImplementedError: if there is a choice in a computation of several processes, whose clocks
        would disagree.
    """
    check_one_clock(len(drafters))
    # All bursts of a run have one shape, so their programs are looked up once.
    limited = np.int32(0)
    programs = [burst.of_shape(target, drafter, params, state, limited) for drafter in drafters]
    totals = [Measurement()] * len(drafters)
    live = not np.asarray(state.rows.done).all()
    while live:
        index, rounds = policy.choose()
        seen = Measurement()
        while live and seen.rounds < rounds:
            limit = min(rounds - seen.rounds, stride or rounds)
            start = clock()
            state, report = programs[index](target, drafters[index], params, state, np.int32(limit))
            ran, row_rounds, tokens, rows = np.asarray(report).tolist()
            this = Measurement(ran, row_rounds, tokens, clock() - start)
            live, seen, totals[index] = rows > 0, seen + this, totals[index] + this
            yield BurstResult(state, tuple(totals))
        policy = policy.observe(index, seen)
