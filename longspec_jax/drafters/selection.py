"""Which of a row's committed tokens a partial pass of the target sees, and where they lie.

Some are read where they lie in the cache, as spans of its slots; others were gathered into a
compact one. Attention takes either as prefixes: another way of reading them is another type here.
Who chooses them is :mod:`longspec_jax.drafters.selectors`' matter.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.selection.blocks import BlockTable
from longspec_jax.ops.selection.gather import gather_blocks


@runtime_checkable
class Cached(Protocol):
    """A cache, as far as a selection reads it; see :class:`longspec_jax.decoding.cache.KVCache`."""

    def layer(self, index: int, length: Lengths, start: Lengths | None = None) -> Prefix:
        """The slots of one layer from ``start[b]``, or 0, to ``length[b]``."""
        ...


@runtime_checkable
class Selection(Protocol):
    """A part of every row's committed tokens; no token is in it twice."""

    def prefixes(self, layer: int, cache: Cached) -> Sequence[Prefix]:
        """What attention of a layer reads one after the other."""
        ...


@struct.dataclass
class Spans:
    """Spans of cache slots that do not overlap; an empty one starts where it ends."""

    start: Leaf[Int[Array, "B n"]]
    """First slot of every span."""
    stop: Leaf[Int[Array, "B n"]]
    """Slot behind its last one."""

    def prefixes(self, layer: int, cache: Cached) -> Sequence[Prefix]:
        """The cache itself, once a span."""
        whole = cache.layer(layer, self.stop[:, 0], self.start[:, 0])
        bounds = zip(self.start.T, self.stop.T, strict=True)
        return [replace(whole, start=start, length=stop) for start, stop in bounds]


@struct.dataclass
class WorkingSet:
    """Keys and values that were gathered; rotary positions are in the keys, so order is free."""

    keys: tuple[Leaf[CacheSlots], ...]
    """Of every layer."""
    values: tuple[Leaf[CacheSlots], ...]
    """Of every layer."""
    length: Leaf[Lengths]
    """How many of its slots hold tokens, in every layer alike."""

    def prefixes(self, layer: int, cache: Cached) -> Sequence[Prefix]:
        """The layer's part of it, and nothing of the cache."""
        return [Prefix(self.keys[layer], self.values[layer], self.length)]


def everything(length: Lengths) -> Spans:
    """All committed tokens, where they lie."""
    return Spans(jnp.zeros_like(length)[:, None], length[:, None])


def end_to_end(
    keys: Sequence[CacheSlots], values: Sequence[CacheSlots], table: BlockTable, block: int
) -> WorkingSet:
    """The blocks of every layer, laid end to end.

    Args:
      keys: of every layer.
      values: of every layer.
      table: of all layers alike ``[B, k]``, or of every layer and head ``[B, L, K, k]``.
      block: slots of a block.
    """
    tables = [table] * len(keys)
    if table.blocks.ndim > 2:
        tables = [BlockTable(table.blocks[:, i], table.length) for i in range(len(keys))]
    found = [
        tuple(gather_blocks(slots, own, block) for slots, own in zip(all_, tables, strict=True))
        for all_ in (keys, values)
    ]
    return WorkingSet(found[0], found[1], table.length)
