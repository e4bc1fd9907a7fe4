"""A draft's own entries of committed tokens: all of them, or the first and the last in a ring.

Entries are keys and values that a draft makes of the target's features. They depend only on
(features, token, position), so a ring of the last entries is exact for a window of its size, and
its order does not matter to attention.

The first entries (sinks) lie next to the ring. Their keys are turned each round to stand right
before it: no distance is ever longer than sinks and ring, so that a draft that was trained on short
texts goes on at any length, in constant memory.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf, Lengths, TreeRows
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.caches import Caches, put_tokens
from longspec_jax.ops.layer import rotate

SLOTS = 8
"""A cache has a multiple of this many slots, as kernels need it."""
Angles: TypeAlias = Callable[[Array], tuple[Array, Array]]
"""``positions [B, T] -> cosines and sines [B, T, H / 2]`` of the draft's rotary embedding."""
Rows: TypeAlias = tuple[TreeRows, TreeRows]
"""Keys and values of neighbouring entries."""


@struct.dataclass
class Entries:
    """One layer's entries; which are present follows only from the committed length."""

    cache: Caches
    """Of one layer, rotary applied at the entry's own position."""
    sink_keys: Leaf[TreeRows]
    """Of the first entries, which are not in the ring; rotary applied at their own positions."""
    sink_values: Leaf[TreeRows]


class DraftWindow(NamedTuple):
    """Which of the entries a draft sees."""

    window: int | None
    """The last ones; all if None."""
    sinks: int
    """The first ones besides them."""

    def checked(self) -> "DraftWindow":
        """The same; raises ValueError for what there cannot be."""
        if self.window is None and self.sinks:
            raise ValueError(f"sinks={self.sinks} need a window; without one all entries are seen")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 entry")
        return self

    def begin(
        self, batch: int, capacity: int, heads: int, head_width: int, dtype: DTypeLike
    ) -> Entries:
        """No entry yet: a ring whatever the capacity, or a cache of it."""
        slots = -(-(self.window or capacity) // SLOTS) * SLOTS
        entries, first = (batch, heads, slots, head_width), (batch, self.sinks, heads, head_width)
        keys, values, *sinks = (
            jnp.zeros(shape, dtype) for shape in (entries, entries, first, first)
        )
        return Entries(Caches((keys,), (values,)), *sinks)

    def written(
        self, entries: Entries, fresh: Rows, at: Int[Array, "B n"], count: Lengths
    ) -> Entries:
        """The entries with fresh ones at ``at[b]``; the first ``count[b]`` of them joined.

        Args:
          entries: those so far.
          fresh: those to write.
          at: their numbers, ascending by one; a negative one is not an entry.
          count: how many of them joined.
        """
        offsets = jnp.arange(at.shape[1])
        known = (offsets < count[:, None]) & (at >= 0)
        ring, slots = known & (at >= self.sinks), at - self.sinks
        if self.window is not None:
            ring &= offsets >= (count - self.window)[:, None]
            slots %= self.window
        # What is not kept goes to a slot that does not exist, and is dropped.
        cache = entries.cache
        layers = cache.slots(0)
        slots = jnp.where(ring, slots, layers[0].shape[2])
        keys, values = (
            (put_tokens(layer, cache.cache_rows, slots, new),)
            for layer, new in zip(layers, fresh, strict=True)
        )
        sinks = entries.sink_keys, entries.sink_values
        if self.sinks:
            slots = jnp.where(known & (at < self.sinks), at, self.sinks)
            write = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
            sinks = write(sinks[0], slots, fresh[0]), write(sinks[1], slots, fresh[1])
        return Entries(Caches(keys, values, cache.cache_rows), *sinks)

    def past(self, entries: Entries, count: Lengths) -> Prefix:
        """What is read of the cache in rows of ``count[b]`` entries."""
        length = count
        if self.window is not None:
            length = jnp.clip(count - self.sinks, 0, self.window)
        return entries.cache.layer(0, length)

    def first(
        self, entries: Entries, count: Lengths, angles: Angles
    ) -> tuple[Rows, Bool[Array, "B s"]]:
        """The sinks, turned to right before the ring, and which there are.

        Args:
          entries: those so far.
          count: how many there are in each row.
          angles: of the draft's rotary embedding.
        """
        seen = jnp.arange(self.sinks) < count[:, None]
        if not self.sinks:
            return (entries.sink_keys, entries.sink_values), seen
        left_out = jnp.maximum(count - self.sinks - (self.window or 0), 0)
        shift = angles(jnp.broadcast_to(left_out[:, None], seen.shape))
        return (rotate(entries.sink_keys, shift), entries.sink_values), seen
