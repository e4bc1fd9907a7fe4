"""Which of a row's committed tokens a partial pass of the target sees, and where they lie.

Some are read where they lie in the cache, as spans of its slots; others were gathered into a
compact one. Attention takes either as prefixes: another way of reading them is another type here.
Who chooses them is :mod:`longspec_jax.drafters.selectors`' matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths, Queries
from longspec_jax.ops.attention.operands import Prefix, Reading
from longspec_jax.ops.selection.blocks import BlockTable
from longspec_jax.ops.selection.gather import gather_blocks


@runtime_checkable
class Cached(Protocol):
    """A cache, as far as a selection reads it; see :class:`longspec_jax.decoding.cache.KVCache`."""

    def reading(self, length: Lengths) -> Reading:
        """What attention reads in a pass: of every layer the slots up to ``length[b]``."""
        ...


Parts: TypeAlias = Callable[[int, Queries], tuple[Queries, Sequence[Prefix]]]
"""A :class:`Reading` of several prefixes, which attention reads one after the other."""


@runtime_checkable
class Selection(Protocol):
    """A part of every row's committed tokens; no token is in it twice."""

    def reading(self, cache: Cached) -> Parts:
        """What attention reads in a pass."""
        ...

    def apart(self, layer: int) -> Prefix | None:
        """What it holds of a layer (-1: the last), if that lies apart from the cache."""
        ...


@struct.dataclass
class Spans:
    """Spans of cache slots that do not overlap; an empty one starts where it ends."""

    start: Leaf[Int[Array, "B n"]]
    """First slot of every span."""
    stop: Leaf[Int[Array, "B n"]]
    """Slot behind its last one."""

    def reading(self, cache: Cached) -> Parts:
        """The cache itself, once a span."""
        read = cache.reading(self.stop[:, 0])
        bounds = [*zip(self.start.T, self.stop.T, strict=True)]

        def spans(layer: int, queries: Queries) -> tuple[Queries, Sequence[Prefix]]:
            queries, whole = read(layer, queries)
            return queries, [replace(whole, start=start, length=stop) for start, stop in bounds]

        return spans

    def apart(self, layer: int) -> None:
        """Nothing: it is read where it lies."""


@struct.dataclass
class WorkingSet:
    """Keys and values that were gathered; rotary positions are in the keys, so order is free."""

    keys: tuple[Leaf[CacheSlots], ...]
    """Of every layer."""
    values: tuple[Leaf[CacheSlots], ...]
    """Of every layer."""
    length: Leaf[Lengths]
    """How many of its slots hold tokens, in every layer alike."""

    def reading(self, cache: Cached) -> Parts:
        """A layer's part of it, and nothing of the cache."""
        return lambda layer, queries: (queries, [self.apart(layer)])

    def apart(self, layer: int) -> Prefix:
        """A layer's part of it."""
        return Prefix(self.keys[layer], self.values[layer], self.length)


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
