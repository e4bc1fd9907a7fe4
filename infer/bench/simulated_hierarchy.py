"""Simulated acceptance on two levels: rounds under partial verification, and the full one.

Random weights agree with themselves neither on what a draft proposed nor on what a part of the
cache made them draw. Here a partial round accepts as many tokens as a draft of the wanted
acceptance length would, and the full verification confirms every token of the chain with the
wanted agreement, given the one before; behind a chain that is confirmed to its end it accepts as
many tokens of the draft's tree as a partial round would, as far as that tree is so deep. The work
is the real one: the same selection, passes, walks and commits. Both numbers are arrays, so that a
sweep over them compiles nothing.

The output is *not* the target's. Nothing in the library imports this module.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, UInt

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config import TreeConfig
from longspec_jax.decoding.engine import spec_step
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.target import TargetModel
from longspec_jax.decoding.view import CacheView
from longspec_jax.drafters.base import Committed, Params, SamplingNoise, View
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy, HierarchyState
from longspec_jax.drafters.tree import AcceptedPath, Tree, accept, node_depths

from .simulated import GOLDEN, AcceptanceLengths


@struct.dataclass
class Odds:
    """How often what is accepted."""

    edges: Leaf[UInt[Array, "B h"]]
    """Of a partial round: it yields a token for each that is not above the drawn number, and one
    more."""
    agreement: Leaf[Float[Array, " B"]]
    """Of a token of the chain, given that the one before is confirmed."""

    @classmethod
    def of(cls, lengths: AcceptanceLengths, agreement: float, batch: int) -> "Odds":
        """The same for all rows."""
        spread = jnp.broadcast_to(lengths.edges, (batch, lengths.edges.size))
        return cls(spread, jnp.full((batch,), agreement, jnp.float32))


@struct.dataclass
class SimulatedState:
    """The drafter's real state, and the odds."""

    real: HierarchyState
    odds: Odds


@dataclass(frozen=True)
class SimulatedHierarchy(Hierarchy):
    """A hierarchy whose partial rounds yield what the odds in its state say."""

    def begin(self, params: Params, batch: int, capacity: int) -> Any:
        """The real state, and odds to be replaced."""
        levels = self.inner.tree.num_levels
        nothing = AcceptanceLengths((1.0,) + (0.0,) * levels)
        return SimulatedState(super().begin(params, batch, capacity), Odds.of(nothing, 0.0, batch))

    def extend(self, params: Params, state: Any, committed: Committed) -> Any:
        """The real state."""
        return state.replace(real=super().extend(params, state.real, committed))

    def before_round(self, params: Params, state: Any, view: View) -> Any:
        """The real state."""
        return state.replace(real=super().before_round(params, state.real, view))

    def propose(self, params: Params, state: Any, view: View, noise: SamplingNoise) -> Tree:
        """The real proposal, with walks of the simulated lengths."""
        assert isinstance(view, CacheView)
        fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
        simulated = SimulatedView(**fields, shape=self.inner.tree, edges=state.odds.edges)
        return super().propose(params, state.real, simulated, noise)


@dataclass(frozen=True, eq=False)
class SimulatedView(CacheView):
    """A view in which walks are as long as is drawn, by where they begin."""

    shape: TreeConfig = TreeConfig()
    edges: Any = None

    def accept(self, tree: Tree, draws: Int[Array, "B T"], levels: int) -> AcceptedPath:
        """The path to the first node of the drawn depth; the real walk runs, too."""
        place = _scattered(self.position)[:, None]
        count = 1 + (place >= self.edges).sum(axis=1, dtype=jnp.int32)
        depths = jnp.broadcast_to(node_depths(tree, self.shape), tree.tokens.shape)
        deepest = jnp.minimum(count - 1, depths.max(axis=1))
        last = jnp.argmax(depths == deepest[:, None], axis=1)
        return _instead(tree, draws, levels, _path_to(tree, depths, last, levels), count)


def agreeing_walk(
    tree: Tree,
    draws: Int[Array, "B T"],
    levels: int,
    *,
    odds: Odds,
    chain: int,
    rounds: Lengths,
) -> AcceptedPath:
    """What a full pass of these odds confirms of a chain and accepts behind it, and a bonus.

    The first three arguments are those of :func:`longspec_jax.drafters.tree.accept`; the tree's
    first levels are a chain of so many.
    """
    offered = (tree.parents[:, 1 : chain + 1] >= 0).sum(axis=1, dtype=jnp.int32)
    drawn = (_evenly(rounds).astype(jnp.float32) + 0.5) / 2.0**32
    confirmed = jnp.log(drawn) / jnp.log(jnp.clip(odds.agreement, 1e-6, 1 - 1e-6))
    confirmed = jnp.minimum(jnp.minimum(confirmed, chain).astype(jnp.int32), offered)
    wanted = (_scattered(rounds)[:, None] >= odds.edges).sum(axis=1, dtype=jnp.int32)
    # Of the tree at the chain's end the first node of the drawn depth, or of the deepest there is.
    depths = tree.mask.sum(axis=2, dtype=jnp.int32) - 1
    behind = (jnp.arange(depths.shape[1]) > chain) & (tree.parents >= 0)
    hangs = (behind & (tree.parents == offered[:, None])).any(axis=1)
    reached = jnp.minimum(offered + wanted, jnp.where(behind, depths, 0).max(axis=1, initial=0))
    further = hangs & (confirmed == offered) & (reached > offered)
    node = jnp.argmax(behind & (depths == reached[:, None]), axis=1)
    last = jnp.where(further, node, confirmed)
    count = 1 + jnp.where(further, reached, confirmed)
    return _instead(tree, draws, levels, _path_to(tree, depths, last, levels), count)


def _path_to(tree: Tree, depths: Int[Array, "B T"], last: Lengths, levels: int) -> Array:
    """The nodes from the root to one of every row ``[B, levels + 1]``, which is repeated."""
    on_path = jnp.take_along_axis(tree.mask, last[:, None, None], axis=1)
    at_depth = on_path & (depths[:, None, :] == jnp.arange(levels + 1)[:, None])
    return jnp.where(at_depth.any(axis=2), jnp.argmax(at_depth, axis=2), last[:, None])


def _evenly(number: Lengths) -> UInt[Array, " B"]:
    """A sequence that fills 0 ... 2**32 evenly in any run of numbers, another in every row."""
    row = jnp.arange(number.shape[0], dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)
    return row + (number.astype(jnp.uint32) + 1) * jnp.uint32(GOLDEN)


def _scattered(number: Lengths) -> UInt[Array, " B"]:
    """The same without order: of positions, whose steps depend on what was drawn before."""
    bits = _evenly(number)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def _instead(tree: Tree, draws: Array, levels: int, nodes: Array, count: Lengths) -> AcceptedPath:
    """This path in the place of the real walk's, which the compiler cannot know is not needed."""
    accepted = jnp.take_along_axis(tree.tokens, nodes, axis=1)
    accepted = jnp.concatenate([accepted[:, 1:], accepted[:, :1]], axis=1)
    bonus = jnp.take_along_axis(draws, nodes[:, -1:], axis=1)
    tokens = jnp.where(jnp.arange(levels + 1) < count[:, None] - 1, accepted, bonus)
    real = accept(tree, draws, levels)
    impossible = (real.count < 1)[:, None]
    return AcceptedPath(
        jnp.where(impossible, real.path, nodes).astype(jnp.int32),
        jnp.where(impossible, real.tokens, tokens),
        jnp.where(impossible[:, 0], real.count, count),
    )


@partial(jax.jit, static_argnames=("target", "drafter"), donate_argnames=("state",))
def simulated_decode(
    target: TargetModel, drafter: SimulatedHierarchy, params: Params, state: SpecState
) -> SpecState:
    """Rounds until every row is done, in one executable, as in ``engine.decode``."""

    def turn(state: SpecState) -> SpecState:
        odds, rounds = state.rows.draft.odds, state.record.rounds
        walker = partial(agreeing_walk, odds=odds, chain=drafter.levels, rounds=rounds)
        rows, emitted = spec_step(target, drafter, params, state.rows, walker)
        return SpecState(rows, state.record.add(emitted))

    return jax.lax.while_loop(lambda state: ~state.rows.done.all(), turn, state)
