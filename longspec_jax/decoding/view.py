"""What a drafter sees in a round: the rows, the target's cache, and the target itself."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths, TreeMask
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel
from longspec_jax.decoding.walk import Walk, walk
from longspec_jax.drafters.base import NOTHING, Glance, Needs, Uncommitted
from longspec_jax.drafters.selection import Selection
from longspec_jax.drafters.tree import Tree


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

    @property
    def keys(self) -> tuple[CacheSlots, ...]:
        """The target's cached keys of every layer."""
        return self.cache.keys

    @property
    def values(self) -> tuple[CacheSlots, ...]:
        """The target's cached values of every layer."""
        return self.cache.values

    def uncommitted(self, tokens: int) -> Uncommitted:
        """Room for so many tokens outside the cache."""
        return self.cache.rows(tokens)

    def glance(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        selection: Selection,
        fresh: Uncommitted,
        mask: TreeMask,
        at: int,
        needs: Needs = NOTHING,
    ) -> Glance:
        """Run the target over tokens that see a selection of the cache, and fresh tokens."""
        return self.target.glance(
            self.params, self.cache, tokens, positions, selection, fresh, mask, at, needs
        )

    def walk(self, tree: Tree, draws: Int[Array, "B T"], levels: int) -> Walk:
        """The path that draws take through a tree of so many levels."""
        return walk(tree, draws, levels)

    def ahead(self, pending: Int[Array, " B"], position: Lengths) -> "CacheView":
        """The same cache, seen from a token further on."""
        return dataclasses.replace(self, pending=pending, position=position)
