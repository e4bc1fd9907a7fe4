"""Simulated acceptance: real rounds whose accepted length is drawn instead of earned.

Random weights accept almost nothing, so a benchmark without a trained draft decides by itself how
many drafted tokens a round accepts. Everything else is the real round: the draft grows its tree,
the target verifies it, the real walk runs, and the chosen path, an existing one of the tree, is
committed. Tokens per second at a published acceptance length are then measured end to end. The
acceptance is an array that a program is given when it runs, so that a sweep over it compiles once.

The output is *not* the target's. Nothing in the library imports this module.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Int, UInt

from longspec_jax.axes import Array, Lengths
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.engine import spec_step
from longspec_jax.decoding.record import Emitted, SpecState
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.tree import AcceptedPath, Tree, accept, node_depths

GOLDEN = 2654435769
"""2**32 divided by the golden ratio: multiples of it, modulo 2**32, fill the range evenly."""


@dataclass(frozen=True)
class AcceptanceLengths:
    """How often a round emits 1, 2, ... tokens, the bonus included."""

    probabilities: tuple[float, ...]
    """Entry ``i`` is the probability of ``i + 1`` emitted tokens."""

    def __post_init__(self) -> None:
        if min(self.probabilities) < 0 or not math.isclose(sum(self.probabilities), 1.0):
            raise ValueError(
                f"probabilities must be non-negative and sum to 1, got {self.probabilities}"
            )

    @property
    def mean(self) -> float:
        """The acceptance length: emitted tokens per target pass."""
        return sum((i + 1) * p for i, p in enumerate(self.probabilities))

    @property
    def edges(self) -> UInt[Array, " h"]:
        """The acceptance lengths as an array, for a number of 32 bits that is drawn evenly.

        A round emits a token for every edge that is not above the number, and one more.
        """
        passed = itertools.accumulate(self.probabilities[:-1])
        return jnp.asarray([min(round(share * 2**32), 2**32 - 1) for share in passed], jnp.uint32)

    @classmethod
    def geometric(cls, mean: float, levels: int) -> "AcceptanceLengths":
        """Every level accepted with the same probability, given the one before; of a given mean."""
        if not 1 <= mean <= levels + 1:
            raise ValueError(
                f"a tree of {levels} levels emits 1 to {levels + 1} tokens per round; its mean "
                f"acceptance length cannot be {mean}. Choose another, or a deeper tree"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            rate = (low + high) / 2
            if sum(rate**depth for depth in range(levels + 1)) < mean:
                low = rate
            else:
                high = rate
        reached = [high**depth for depth in range(levels + 1)] + [0.0]
        return cls(tuple(a - b for a, b in zip(reached, reached[1:], strict=False)))

    @classmethod
    def from_histogram(cls, rounds: Sequence[int]) -> "AcceptanceLengths":
        """As recorded: ``rounds[i]`` rounds emitted ``i + 1`` tokens."""
        total = sum(rounds)
        if total == 0:
            raise ValueError("the histogram counts no rounds")
        return cls(tuple(count / total for count in rounds))


def drawn_count(edges: UInt[Array, " h"], seed: int, rounds: Lengths) -> Lengths:
    """Tokens that each row's next round emits, 1 to the tree's levels + 1.

    The golden-ratio sequence, not independent draws: any run of rounds has nearly the wanted mean,
    so that a short measurement is not off by luck. Rows start at different places.
    """
    rows = jnp.arange(rounds.shape[0], dtype=jnp.uint32)
    start = (rows + jnp.uint32(seed)) * jnp.uint32(0x85EBCA6B) + jnp.uint32(seed)
    place = start + rounds.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    return 1 + (place[:, None] >= edges).sum(axis=1, dtype=jnp.int32)


def simulated_walk(
    tree: Tree,
    draws: Int[Array, "B T"],
    levels: int,
    *,
    shape: TreeConfig,
    edges: UInt[Array, " h"],
    seed: int,
    rounds: Lengths,
) -> AcceptedPath:
    """The path to the first node of the drawn depth, as if the target had drawn its tokens.

    The first three arguments are those of :func:`longspec_jax.drafters.tree.accept`, which runs
    too, so that its cost is part of the round.
    """
    if edges.size > levels:
        raise ValueError(
            f"acceptance lengths up to {edges.size + 1} do not fit a tree of {levels} "
            f"levels, which emits at most {levels + 1}"
        )
    depths = node_depths(tree, shape)
    count = drawn_count(edges, seed, rounds)
    # A budget may have left no node so deep: the path then ends early, and is committed all the
    # same.
    deepest = jnp.minimum(count - 1, depths.max(axis=1))
    last = jnp.argmax(depths == deepest[:, None], axis=1)
    on_path = jnp.take_along_axis(tree.mask, last[:, None, None], axis=1)
    at_depth = on_path & (depths[:, None, :] == jnp.arange(levels + 1)[:, None])
    nodes = jnp.where(at_depth.any(axis=2), jnp.argmax(at_depth, axis=2), last[:, None])
    accepted = jnp.take_along_axis(tree.tokens, nodes, axis=1)
    accepted = jnp.concatenate([accepted[:, 1:], accepted[:, :1]], axis=1)
    bonus = jnp.take_along_axis(draws, last[:, None], axis=1)
    tokens = jnp.where(jnp.arange(levels + 1) < count[:, None] - 1, accepted, bonus)
    ours = AcceptedPath(nodes.astype(jnp.int32), tokens, count)
    # Never true, but the compiler does not know: the real walk has to run.
    real = accept(tree, draws, levels)
    impossible = real.count < 1
    return jax.tree.map(
        lambda theirs, mine: jnp.where(
            impossible.reshape(impossible.shape + (1,) * (mine.ndim - 1)), theirs, mine
        ),
        real,
        ours,
    )


def simulated_step(
    target: TargetModel,
    drafter: Drafter,
    seed: int,
    edges: UInt[Array, " h"],
    params: Params,
    state: SpecState,
) -> tuple[SpecState, Emitted]:
    """One real round with a drawn acceptance length, and what it emitted.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      seed: of the drawn lengths.
      edges: of :class:`AcceptanceLengths`.
      params: parameters of both.
      state: before the round.
    """
    rounds = state.record.rounds
    walker = partial(simulated_walk, shape=drafter.tree, edges=edges, seed=seed, rounds=rounds)
    rows, emitted = spec_step(target, drafter, params, state.rows, walker)
    return SpecState(rows, state.record.add(emitted)), emitted


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "seed"),
    donate_argnames=("state",),
)
def simulated_decode(
    target: TargetModel,
    drafter: Drafter,
    seed: int,
    edges: UInt[Array, " h"],
    params: Params,
    state: SpecState,
) -> SpecState:
    """Rounds until every row is done, in one executable, as in ``engine.decode``.

    Arguments as of :func:`simulated_step`; the state is donated.
    """
    return jax.lax.while_loop(
        lambda state: ~state.rows.done.all(),
        lambda state: simulated_step(target, drafter, seed, edges, params, state)[0],
        state,
    )
