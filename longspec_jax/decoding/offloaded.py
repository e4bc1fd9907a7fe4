"""A key/value cache in the host's memory, for contexts that the device has no room for.

Attention reads one layer after the other, so no more than two need to be on the device: while one
is read, the next is on its way. A pass then takes as long as moving the cache takes, however many
tokens it verifies: the more tokens a pass yields, the better. What a selection
(:mod:`longspec_jax.drafters.retrieval.selection`) has gathered of the host stays on the device for
as long as the selection does; spans that it reads in place are moved as whole layers, one behind
the other.

One layer is never moved: drafts read it in every step of a proposal.
"""

from dataclasses import replace
from typing import Any

import jax
from flax import struct
from jax.sharding import Sharding
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, TreeRows
from longspec_jax.config import TargetConfig
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding.cache import CacheBytes, KVCache, append_chunk
from longspec_jax.ops.attention.operands import Prefix, Reading
from longspec_jax.ops.layer import append_rows
from longspec_jax.ops.placement import HOST_MEMORY, to_device, to_host
from longspec_jax.ops.slicing import along

STAGED_LAYERS = 2
"""Layers that are on the device at a time: the one that attention reads, and the next."""


@struct.dataclass
class OffloadedCache(KVCache):
    """Keys and values on the host, except for the layer that drafts read. DONATED as they."""

    def layer(self, index: int, length: Lengths) -> Prefix:
        """One layer on the device; it is moved there, where it does not lie there."""
        keys, values = to_device((self.keys[index], self.values[index]))
        return Prefix(keys, values, length)

    def reading(self, length: Lengths) -> Reading:
        """Each layer on the device, the next one on its way to it."""
        moved = [index for index in range(len(self.keys)) if index != self.read_layer]
        following_of = dict(zip(moved, moved[1:], strict=False))
        staged = {index: self.layer(index, length) for index in moved[:1]}

        def read(index: int, queries: Queries) -> tuple[Queries, Prefix]:
            following = following_of.get(index)
            if following is not None:
                # The queries are there when the layers before have been read, and are let go.
                # Without this all layers would set out at once, and need room at once. A barrier
                # is about what is used of its results alone.
                queries, keys, values = jax.lax.optimization_barrier(
                    (queries, self.keys[following], self.values[following])
                )
                staged[following] = Prefix(to_device(keys), to_device(values), length)
            return queries, staged.pop(index) if index in staged else self.layer(index, length)

        return read

    def shardings(self, sharding: Sharding) -> "OffloadedCache":
        """The host's memory beside the device, for all layers but the one that drafts read."""
        host = sharding.with_memory_kind(HOST_MEMORY)
        layers: Any = tuple(
            sharding if index == self.read_layer else host for index in range(len(self.keys))
        )
        return replace(self, keys=layers, values=layers)

    def append(
        self, keys: tuple[TreeRows, ...], values: tuple[TreeRows, ...], at: Lengths
    ) -> "OffloadedCache":
        """As of a cache on the device."""
        at, keys = _once_read(at, keys)

        def write(layers: tuple[CacheSlots, ...], fresh: tuple[TreeRows, ...]) -> tuple:
            return tuple(
                append_chunk(*pair, at) if index == self.read_layer else _append_on_host(*pair, at)
                for index, pair in enumerate(zip(layers, fresh, strict=True))
            )

        return replace(self, keys=write(self.keys, keys), values=write(self.values, values))

    def commit(
        self,
        keys: tuple[TreeRows, ...],
        values: tuple[TreeRows, ...],
        path: Int[Array, "B h"],
        at: Lengths,
    ) -> "OffloadedCache":
        """As of a cache on the device."""
        at, keys = _once_read(at, keys)

        read = self.read_layer
        here = append_rows(
            (self.keys[read], self.values[read]), (keys[read], values[read]), path, at
        )

        def write(
            layers: tuple[CacheSlots, ...], fresh: tuple[TreeRows, ...], here: CacheSlots
        ) -> tuple[CacheSlots, ...]:
            return tuple(
                here if index == read else _append_on_host(slots, along(path, rows), at)
                for index, (slots, rows) in enumerate(zip(layers, fresh, strict=True))
            )

        return replace(
            self,
            keys=write(self.keys, keys, here[0]),
            values=write(self.values, values, here[1]),
        )


def _once_read(at: Lengths, keys: tuple[TreeRows, ...]) -> tuple[Lengths, tuple[TreeRows, ...]]:
    """The slots to write at, known when the pass has read all layers that are not on the device.

    The last layer's fresh keys are made of what the other layers found. The compiler might write
    before it has read, otherwise, and copy whole caches to be able to. It may do so with the last
    layer, where that is not the one on the device.
    """
    # What is not used of a barrier's results is not waited for.
    at, last = jax.lax.optimization_barrier((at, keys[-1]))
    return at, (*keys[:-1], last)


def _append_on_host(slots: CacheSlots, fresh: TreeRows, at: Lengths) -> CacheSlots:
    """Slice updates, row by row: in one they would be a scatter, which nothing does over there."""
    rows = fresh.swapaxes(1, 2)
    for row in range(slots.shape[0]):
        # Cut on the device: a slice of what lies over there would be left to the host's processor.
        own = to_host(jax.lax.slice_in_dim(rows, row, row + 1, axis=0))
        slots = jax.lax.dynamic_update_slice(slots, own, (row, 0, at[row], 0))
    return slots


def allocate(config: TargetConfig, batch: int, capacity: int) -> OffloadedCache:
    """A zero-filled cache, as :func:`longspec_jax.decoding.cache.allocate` makes it."""
    empty = cache_lib.allocate(config, batch, capacity)
    zeros, layers = empty.keys[config.read_layer], []
    for index in range(2 * config.num_layers):
        if index // 2 == config.read_layer:
            layers.append((empty.keys, empty.values)[index % 2][config.read_layer])
            continue
        # Each from the device: the compiler would make one, and copy it where no copies are made.
        zeros = jax.lax.optimization_barrier(zeros)
        layers.append(to_host(zeros))
    return OffloadedCache((*layers[::2],), (*layers[1::2],), read_layer=config.read_layer)


def cache_bytes(config: TargetConfig, batch: int, capacity: int) -> CacheBytes:
    """Bytes of :func:`allocate`'s result, and of the layers that are on the device for a time."""
    layer = cache_lib.cache_bytes(config, batch, capacity) // config.num_layers
    moved = config.num_layers - 1
    return CacheBytes((1 + min(STAGED_LAYERS, moved)) * layer, moved * layer)
