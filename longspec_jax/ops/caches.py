"""Keys, values and states of rows that stay where they lie, while a launch is of some of the rows.

A launch of few rows takes what else there is of them out of the arrays of all rows
(:func:`take_rows`) and puts it back (:func:`put_rows`). Caches are too large for that: attention
reads the launch's rows in place, and commits write to them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import jax
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, CachedRows, CacheSlots, LayerSlots, Leaf, Lengths
from longspec_jax.config.layers import HeadScales
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.recurrence.operands import RecurrentState

Tree = TypeVar("Tree")


@struct.dataclass
class Caches:
    """Keys and values, one array a layer, and the states of recurrent layers.

    A layer with a window has a ring, in which position ``p`` lies in slot ``p % S``.
    """

    keys: tuple[Leaf[LayerSlots] | None, ...]
    """Of every layer, rotary applied; None of a recurrent one, or one that reads another's."""
    values: tuple[Leaf[LayerSlots] | None, ...]
    """Of every layer."""
    cache_rows: Leaf[Lengths] | None = None
    """The row of the arrays for every batch row; its own if absent."""
    rings: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """The layers whose slots are a ring."""
    states: Mapping[int, RecurrentState] = struct.field(default_factory=dict)
    """Of every recurrent layer, after all committed tokens."""
    read_layer: int = struct.field(pytree_node=False, default=-1)
    """The layer that drafts read (:attr:`longspec_jax.config.target.TargetConfig.read_layer`)."""
    read_scales: HeadScales | None = struct.field(pytree_node=False, default=None)
    """The scales of its keys and values."""

    @property
    def capacity(self) -> int:
        """Slots of a row in the longest layer (``S``)."""
        return max(keys.shape[2] for keys in self.keys if keys is not None)

    def layer(self, index: int, length: Lengths) -> Prefix:
        """What one layer's attention reads: the slots up to ``length[b]``."""
        keys, values = self.slots(index)
        return Prefix(keys, values, length, cache_rows=self.cache_rows)

    def slots(self, index: int) -> tuple[Array, Array]:
        """Keys and values of a layer with attention."""
        keys, values = self.keys[index], self.values[index]
        assert keys is not None and values is not None, f"layer {index} has no keys"
        return keys, values

    def state(self, index: int) -> RecurrentState:
        """What a recurrent layer keeps of the batch's rows."""
        return self.states[index].of_batch(self.cache_rows)

    def read(self, length: Lengths) -> Prefix:
        """The layer that drafts read, with the scales of its keys and values."""
        return replace(self.layer(self.read_layer, length), scales=self.read_scales)


Cache = TypeVar("Cache", bound=Caches)


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


def put_tokens(
    layer: CacheSlots, cache_rows: Lengths | None, at: Int[Array, "B n"], fresh: CachedRows
) -> CacheSlots:
    """One layer with fresh tokens at these slots; those that do not exist are dropped."""
    if cache_rows is not None:
        return layer.at[cache_rows[:, None], :, at].set(fresh, mode="drop")
    write = jax.vmap(lambda row, at, new: row.at[:, at].set(new.swapaxes(0, 1), mode="drop"))
    return write(layer, at, fresh)


def _is_cache(part: object) -> bool:
    return isinstance(part, Caches)
