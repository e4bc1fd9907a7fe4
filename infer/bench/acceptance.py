"""Simulated acceptance: how many tokens a round of random weights accepts is drawn, not earned.

Random weights accept almost nothing, so a benchmark without a trained draft decides by itself how
many drafted tokens a round accepts. All else is the real round: the draft grows its tree, the
target verifies it, the real accept runs, and a path that the tree has is committed. Tokens per
second at a published acceptance length are then measured end to end. The acceptance is an array
that a program takes when it runs, so that a sweep over it compiles once.

The output is *not* the target's. Nothing in the library imports this module.
"""

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Int, UInt
from scipy.optimize import root_scalar

from longspec_jax.axes import Array, Lengths
from longspec_jax.config import TreeConfig
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
        """The acceptance length: emitted tokens per target forward."""
        return sum((i + 1) * p for i, p in enumerate(self.probabilities))

    @property
    def edges(self) -> UInt[Array, " h"]:
        """The acceptance lengths as an array, for evenly drawn numbers of 32 bits.

        A round emits one token, and one more for every edge that the number is not below.
        """
        passed = itertools.accumulate(self.probabilities[:-1])
        return jnp.asarray([min(round(share * 2**32), 2**32 - 1) for share in passed], jnp.uint32)

    @classmethod
    def geometric(cls, mean: float, tree: TreeConfig) -> "AcceptanceLengths":
        """Every level accepted with the same probability, given the one before.

        Args:
          mean: the acceptance length.
          tree: of which it is; a budget of N nodes verifies at most N - 1 levels.

        Raises:
          ValueError: for a mean that the tree cannot emit.
        """
        deepest = min(tree.num_levels, tree.num_nodes - 1)
        if not 1 <= mean <= deepest + 1:
            raise ValueError(
                f"a round of tree {tree} emits 1 to {deepest + 1} tokens, and their mean cannot be "
                f"{mean}; choose another, or a deeper tree"
            )
        depths = range(deepest + 1)
        rate = root_scalar(
            lambda rate: sum(rate**depth for depth in depths) - mean, bracket=(0.0, 1.0)
        ).root
        reached = [rate**depth for depth in depths]
        reached += [0.0] * (tree.num_levels + 2 - len(reached))
        return cls(tuple(a - b for a, b in itertools.pairwise(reached)))


def drawn_count(edges: UInt[Array, " h"], rounds: Lengths) -> Lengths:
    """Tokens that each row's next round emits, 1 to the tree's levels + 1.

    The golden-ratio sequence, not independent draws: any run of rounds has nearly the wanted mean,
    so that a short measurement is not off by luck. Rows start at different places.
    """
    rows = jnp.arange(rounds.shape[0], dtype=jnp.uint32)
    place = rows * jnp.uint32(0x85EBCA6B) + rounds.astype(jnp.uint32) * jnp.uint32(GOLDEN)
    return 1 + (place[:, None] >= edges).sum(axis=1, dtype=jnp.int32)


def accept_drawn(
    tree: Tree,
    draws: Int[Array, "B T"],
    levels: int,
    *,
    shape: TreeConfig,
    edges: UInt[Array, " h"],
    rounds: Lengths,
) -> AcceptedPath:
    """The path to the first node of the drawn depth, as if the target had drawn its tokens.

    Where a budget has left no node so deep, the path ends earlier and the tokens are repeated. The
    real accept runs, too, so that its cost is part of the round. The first three arguments are
    those of :func:`longspec_jax.drafters.tree.accept`.

    Raises:
      ValueError: for acceptance lengths that the tree does not hold.
    """
    if edges.size > levels:
        raise ValueError(
            f"acceptance lengths up to {edges.size + 1} do not fit a tree of {levels} "
            f"levels, which emits at most {levels + 1}"
        )
    count = drawn_count(edges, rounds)
    depths = jnp.broadcast_to(node_depths(tree, shape), tree.tokens.shape)
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
    real = accept(tree, draws, levels)
    impossible = real.count < 1  # Never true, which the compiler does not know.
    return jax.tree.map(
        lambda theirs, mine: jnp.where(
            impossible.reshape(impossible.shape + (1,) * (mine.ndim - 1)), theirs, mine
        ),
        real,
        ours,
    )
