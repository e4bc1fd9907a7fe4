"""A key/value cache in the host's memory, for contexts that the device has no room for.

Attention reads one layer after the other, so no more than two need to be on the device: while one
is read, the next is on its way. A pass then takes as long as moving the cache takes, however many
tokens it verifies: the more tokens a pass yields, the better. What a selection
(:mod:`longspec_jax.drafters.retrieval.selection`) has gathered of the host stays on the device for
as long as the selection does; spans that it reads in place are moved as whole layers, one behind
the other.

The last layer is never moved: drafts read it in every step of a proposal.
"""

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
    """Keys and values of every layer, in the host's memory but for the last. DONATED as they."""

    def layer(self, index: int, length: Lengths) -> Prefix:
        """One layer on the device; it is moved there, where it does not lie there."""
        keys, values = to_device((self.keys[index], self.values[index]))
        return Prefix(keys, values, length)

    def reading(self, length: Lengths) -> Reading:
        """Each layer on the device, the next one on its way to it."""
        last, staged = len(self.keys) - 1, {0: self.layer(0, length)}

        def read(index: int, queries: Queries) -> tuple[Queries, Prefix]:
            following = index + 1
            if following < last:
                # The queries are there when the layers before have been read, and are let go.
                # Without this all layers would set out at once, and need room at once. A barrier
                # is about what is used of its results alone.
                queries, keys, values = jax.lax.optimization_barrier(
                    (queries, self.keys[following], self.values[following])
                )
                staged[following] = Prefix(to_device(keys), to_device(values), length)
            return queries, staged.pop(index) if index < last else self.layer(last, length)

        return read

    def shardings(self, sharding: Sharding) -> "OffloadedCache":
        """The host's memory beside the device, for all layers but the last."""
        host = sharding.with_memory_kind(HOST_MEMORY)
        layers: Any = (*[host] * (len(self.keys) - 1), sharding)
        return OffloadedCache(layers, layers)

    def append(
        self, keys: tuple[TreeRows, ...], values: tuple[TreeRows, ...], at: Lengths
    ) -> "OffloadedCache":
        """As of a cache on the device."""
        at, keys = _once_read(at, keys)

        def write(layers: tuple[CacheSlots, ...], fresh: tuple[TreeRows, ...]) -> tuple:
            *moved, last = zip(layers, fresh, strict=True)
            return (*(_append_on_host(*pair, at) for pair in moved), append_chunk(*last, at))

        return OffloadedCache(write(self.keys, keys), write(self.values, values))

    def commit(
        self,
        keys: tuple[TreeRows, ...],
        values: tuple[TreeRows, ...],
        path: Int[Array, "B h"],
        at: Lengths,
    ) -> "OffloadedCache":
        """As of a cache on the device."""
        at, keys = _once_read(at, keys)

        def write(layers: tuple[CacheSlots, ...], fresh: tuple[TreeRows, ...]) -> list[CacheSlots]:
            pairs = zip(layers[:-1], fresh[:-1], strict=True)
            return [_append_on_host(slots, along(path, rows), at) for slots, rows in pairs]

        last = (self.keys[-1], self.values[-1]), (keys[-1], values[-1])
        last_keys, last_values = append_rows(*last, path, at)
        return OffloadedCache(
            (*write(self.keys, keys), last_keys), (*write(self.values, values), last_values)
        )


def _once_read(at: Lengths, keys: tuple[TreeRows, ...]) -> tuple[Lengths, tuple[TreeRows, ...]]:
    """The slots to write at, known when the pass has read all layers that are not on the device.

    The last layer's fresh keys are made of what the other layers found. The compiler might write
    before it has read, otherwise, and copy whole caches to be able to.
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
    zeros, moved = empty.keys[-1], []
    for _ in range(2 * (config.num_layers - 1)):
        # Each from the device: the compiler would make one, and copy it where no copies are made.
        zeros = jax.lax.optimization_barrier(zeros)
        moved.append(to_host(zeros))
    keys, values = moved[::2], moved[1::2]
    return OffloadedCache((*keys, empty.keys[-1]), (*values, empty.values[-1]))


def cache_bytes(config: TargetConfig, batch: int, capacity: int) -> CacheBytes:
    """Bytes of :func:`allocate`'s result, and of the layers that are on the device for a time."""
    layer = cache_lib.cache_bytes(config, batch, capacity) // config.num_layers
    moved = config.num_layers - 1
    return CacheBytes((1 + min(STAGED_LAYERS, moved)) * layer, moved * layer)
