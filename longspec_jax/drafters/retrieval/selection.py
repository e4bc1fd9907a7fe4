"""Parts of a cache that a partial forward reads, and what chooses them.

Some parts are read where they lie in the cache, as spans of its slots; others are gathered into a
compact copy. Attention takes either as prefixes: another way of reading is another type here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths, Queries
from longspec_jax.drafters.base import (
    NOTHING,
    Committed,
    Needs,
    ReadParts,
    Selection,
    View,
)
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.caches import Caches
from longspec_jax.ops.selection.blocks import BlockTable, gather_blocks


@struct.dataclass
class Spans:
    """Spans of cache slots that do not overlap; an empty one starts where it ends."""

    start: Leaf[Int[Array, "B n"]]
    """First slot of every span."""
    stop: Leaf[Int[Array, "B n"]]
    """Slot behind its last one."""

    def reading(self, cache: Any) -> ReadParts:
        """The cache itself, once a span."""
        read = cache.reading(self.stop[:, 0])
        bounds = [*zip(self.start.T, self.stop.T, strict=True)]

        def spans(layer: int, queries: Queries) -> tuple[Queries, Sequence[Prefix]]:
            queries, whole = read(layer, queries)
            return queries, [replace(whole, start=start, length=stop) for start, stop in bounds]

        return spans

    def apart(self, layer: int) -> None:
        """Nothing: spans are read where they lie."""


@struct.dataclass
class WorkingSet:
    """Gathered keys and values; rotary positions are in the keys, so their order is free."""

    keys: tuple[Leaf[CacheSlots], ...]
    """Of every layer that attends to the whole context."""
    values: tuple[Leaf[CacheSlots], ...]
    """Of these layers."""
    length: Leaf[Lengths]
    """How many of its slots hold tokens, the same in every layer."""
    layers: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """Which layers these are; all if empty."""

    def reading(self, cache: Any) -> ReadParts:
        """A layer's part of it, and nothing of the cache."""
        return lambda layer, queries: (queries, [self.apart(layer)])

    def apart(self, layer: int) -> Prefix:
        """A layer's part of it."""
        index = self.layers.index(layer) if self.layers else layer
        return Prefix(self.keys[index], self.values[index], self.length)


def everything(length: Lengths) -> Spans:
    """All committed tokens, where they lie."""
    return Spans(jnp.zeros_like(length)[:, None], length[:, None])


def end_to_end(cache: Caches, table: BlockTable, block: int) -> WorkingSet:
    """The blocks of every layer that attends to the whole context, laid end to end.

    Args:
      cache: keys and values of every layer.
      table: of all layers alike ``[B, k]``, or of each of these and each head ``[B, L, K, k]``.
      block: slots of a block.
    """
    full = [i for i, keys in enumerate(cache.keys) if keys is not None and i not in cache.rings]
    layers = tuple(full)
    tables = [table] * len(layers)
    if table.blocks.ndim > 2:
        tables = [BlockTable(table.blocks[:, i], table.length) for i in range(len(layers))]
    found = [
        tuple(
            gather_blocks(cache.slots(layer)[part], own, block, cache.cache_rows)
            for layer, own in zip(layers, tables, strict=True)
        )
        for part in (0, 1)
    ]
    every = len(layers) == len(cache.keys)
    return WorkingSet(found[0], found[1], table.length, () if every else layers)


class Selector:
    """Chooses what partial forwards read: pure functions of a state; the object is hashable.

    By default it keeps no state and copies nothing.
    """

    @property
    def needs(self) -> Needs:
        """What it needs to learn of committed tokens."""
        return NOTHING

    def begin(self, batch: int, capacity: int) -> Any:
        """The state of rows without a token, every leaf ``[B, ...]``."""
        return ()

    def extend(self, state: Any, committed: Committed) -> Any:
        """The state after more tokens were committed: a chunk of a prompt, or an accepted path."""
        return state

    def choose(self, state: Any, view: View) -> Selection:
        """What partial forwards see of the ``view.length[b]`` tokens in the cache."""
        raise NotImplementedError

    def gathered_slots(self, capacity: int) -> int:
        """Slots that it copies of a cache with ``capacity``; 0 where it reads them in place."""
        return 0


@dataclass(frozen=True)
class SinksAndRecent(Selector):
    """The first tokens of a row, which attention falls back on, and the last (StreamingLLM)."""

    sinks: int = 32
    recent: int = 1024

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(
                f"sinks={self.sinks} must be at least 0 and recent={self.recent} at least 1: a "
                "draft that sees no recent token has nothing to go on"
            )

    def __call__(self, length: Lengths) -> Spans:
        """The spans in rows of ``length[b]`` committed tokens."""
        sinks = jnp.minimum(length, self.sinks)
        recent = jnp.maximum(sinks, length - self.recent)
        start = jnp.stack([jnp.zeros_like(sinks), recent], axis=1)
        return Spans(start, jnp.stack([sinks, length], axis=1))

    def choose(self, state: tuple[()], view: View) -> Spans:
        """The spans of the rows in view."""
        return self(view.length)
