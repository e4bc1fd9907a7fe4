"""What a drafter sees in a round: the rows, the target's cache, and the target itself."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Lengths, TreeMask
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NOTHING, Needs, PartialForward, Selection, Uncommitted
from longspec_jax.drafters.tree import AcceptedPath, Tree, accept
from longspec_jax.ops.attention.operands import Prefix


class Between(NamedTuple):
    """Tokens behind the committed ones and before the pending one, which are not in the cache."""

    rows: Uncommitted
    there: Bool[Array, "B U"]
    """Which of them exist in each row."""


@dataclass(frozen=True, eq=False)
class CacheView:
    """Satisfies :class:`longspec_jax.drafters.base.View`; lives while a round is traced."""

    target: TargetModel
    params: Any
    """The target's."""
    cache: KVCache
    pending: Int[Array, " B"]
    position: Lengths
    length: Lengths
    done: Bool[Array, " B"]
    between: Between | None = None
    selected: Prefix | None = None
    """What drafts read of their layer; all of it if absent."""

    def read_layer(self) -> Prefix:
        """All of the layer that drafts read, or what is selected of it."""
        if self.selected is not None:
            return dataclasses.replace(self.selected, scales=self.cache.read_scales)
        return self.cache.read(self.length)

    def uncommitted(self, tokens: int) -> Uncommitted:
        """Zeros for the keys and values of this many tokens outside the cache."""
        return self.cache.uncommitted(len(self.pending), tokens, self.target.dtype)

    def partial_forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        selection: Selection,
        fresh: Uncommitted,
        mask: TreeMask,
        at: int,
        needs: Needs = NOTHING,
    ) -> PartialForward:
        """Run the target over tokens that see a selection of the cache, and fresh tokens."""
        run = partial(
            self.target.partial_forward,
            self.params,
            self.cache,
            tokens,
            positions,
            selection,
            length=self.length,
            needs=needs,
        )
        if self.between is None:
            return run(fresh, mask, at)
        before = self.between.there.shape[1]
        shape = (*tokens.shape, before)
        mask = jnp.concatenate([jnp.broadcast_to(self.between.there[:, None], shape), mask], axis=2)
        forward = run(_joined(self.between.rows, fresh), mask, before + at)
        fresh = jax.tree.map(lambda row: row[:, before:], forward.fresh)
        return forward._replace(fresh=fresh)

    def accept(self, tree: Tree, draws: Int[Array, "B T"], levels: int) -> AcceptedPath:
        """The path that draws take through a tree of ``levels`` levels."""
        return accept(tree, draws, levels)

    def ahead(self, pending: Int[Array, " B"], steps: Lengths, past: Uncommitted) -> "CacheView":
        """The same cache, seen from ``steps[b]`` tokens further on, which are not in it."""
        there = jnp.arange(jax.tree.leaves(past)[0].shape[1]) < steps[:, None]
        if self.between is not None:
            there = jnp.concatenate([self.between.there, there], axis=1)
            past = _joined(self.between.rows, past)
        return dataclasses.replace(
            self, pending=pending, position=self.position + steps, between=Between(past, there)
        )

    def within(self, selection: Selection) -> "CacheView":
        """The same, but that drafts read what was selected of their layer, if it lies apart."""
        return dataclasses.replace(self, selected=selection.apart(self.cache.read_layer))


def _joined(first: Uncommitted, second: Uncommitted) -> Uncommitted:
    """The tokens of both, one behind the other."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
