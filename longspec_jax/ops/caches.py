"""Keys and values of rows that stay where they lie, while a launch is of some of the rows.

A launch of few rows takes what else there is of them out of the arrays of all rows
(:func:`take_rows`) and puts it back (:func:`put_rows`). Caches are too large for that: attention
reads the launch's rows in place, and commits write to them.
"""

from dataclasses import replace
from typing import Any, TypeVar

import jax
from flax import struct

from longspec_jax.axes import CacheSlots, Leaf, Lengths
from longspec_jax.ops.attention.operands import Prefix

Tree = TypeVar("Tree")


@struct.dataclass
class Caches:
    """Keys and values, one array a layer."""

    keys: tuple[Leaf[CacheSlots], ...]
    """Of every layer, rotary applied."""
    values: tuple[Leaf[CacheSlots], ...]
    """Of every layer."""
    cache_rows: Leaf[Lengths] | None = None
    """The row of the arrays for every batch row; its own if absent."""
    read_layer: int = struct.field(pytree_node=False, default=-1)
    """The layer that drafts read (:attr:`longspec_jax.config.TargetConfig.read_layer`)."""

    def layer(self, index: int, length: Lengths) -> Prefix:
        """What one layer's attention reads: the slots up to ``length[b]``."""
        return Prefix(self.keys[index], self.values[index], length, cache_rows=self.cache_rows)


def take_rows(state: Tree, rows: Lengths) -> Tree:
    """These rows of a state, every leaf ``[B, ...]``; of caches the same arrays, read in place."""

    def take(part: Any) -> Any:
        if isinstance(part, Caches):
            return replace(part, cache_rows=rows)
        return part.at[rows].get(mode="promise_in_bounds")

    return jax.tree.map(take, state, is_leaf=_is_cache)


def put_rows(state: Tree, rows: Lengths, before: Tree, after: Tree) -> Tree:
    """The state of all rows, with some of them changed.

    Args:
      state: of all rows.
      rows: no two alike.
      before: what :func:`take_rows` took; a part that is the same object afterwards is not written.
      after: what became of it.
    """

    def put(whole: Any, old: Any, new: Any) -> Any:
        if isinstance(whole, Caches):
            return replace(new, cache_rows=None)
        if new is old:
            return whole
        return whole.at[rows].set(new, mode="promise_in_bounds", unique_indices=True)

    return jax.tree.map(put, state, before, after, is_leaf=_is_cache)


def _is_cache(part: object) -> bool:
    return isinstance(part, Caches)
