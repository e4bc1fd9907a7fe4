"""A key/value cache in the host's memory, for contexts that the device has no room for.

Attention reads one layer after the other, so no more than two need to be on the device: while one
is read, the next is on its way. A pass then takes as long as moving the cache takes, however many
tokens it verifies: the more tokens a pass yields, the better. What a selection
(:mod:`longspec_jax.drafters.retrieval.selection`) has gathered of the host stays on the device for
as long as the selection does; spans that it reads in place are moved as whole layers, one after
the other.

One layer is never moved: drafts read it in every step of a proposal.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from flax import struct
from jax.sharding import Sharding
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, LayerRows, Lengths, Queries, TreeRows
from longspec_jax.config.target import TargetConfig
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding.cache import CacheBytes, KVCache
from longspec_jax.ops.attention.operands import Prefix, Reading
from longspec_jax.ops.placement import HOST_MEMORY, to_device, to_host
from longspec_jax.ops.recurrence.operands import RecurrentRows, RecurrentState
from longspec_jax.ops.slicing import along

STAGED_LAYERS = 2
"""Layers that are on the device at a time: the one that attention reads, and the next."""


@struct.dataclass
class OffloadedCache(KVCache):
    """Keys and values on the host, except for :attr:`resident` layers. DONATED as they."""

    @property
    def resident(self) -> tuple[int, ...]:
        """The layers that stay on the device: the one that drafts read, rings and states.

        And those that have nothing.
        """
        nothing = (index for index, each in enumerate(self.keys) if each is None)
        here = {self.read_layer % len(self.keys), *self.rings, *self.states, *nothing}
        return tuple(sorted(here))

    def layer(self, index: int, length: Lengths) -> Prefix:
        """One layer on the device; it is moved there, where it does not lie there."""
        return Prefix(*to_device(self.slots(index)), length)

    def reading(self, length: Lengths) -> Reading:
        """Each layer on the device, the next one on its way to it."""
        moved = [index for index in range(len(self.keys)) if index not in self.resident]
        following_of = dict(zip(moved, moved[1:], strict=False))
        staged = {index: self.layer(index, length) for index in moved[:1]}

        def read(index: int, queries: Queries) -> tuple[Queries, Prefix]:
            following = following_of.get(index)
            if following is not None:
                # The queries are there when the layers before have been read, and are let go.
                # Without this all layers would start at once, and need memory at once. A barrier
                # concerns only those of its results that are used.
                queries, keys, values = jax.lax.optimization_barrier(
                    (queries, *self.slots(following))
                )
                staged[following] = Prefix(to_device(keys), to_device(values), length)
            return queries, staged.pop(index) if index in staged else self.layer(index, length)

        return read

    def shardings(self, sharding: Sharding) -> "OffloadedCache":
        """The host's memory next to the device, for all layers but the resident ones."""
        host = sharding.with_memory_kind(HOST_MEMORY)
        here = jax.tree.map(lambda _: sharding, self)
        keys, values = (
            tuple(each if index in self.resident else host for index, each in enumerate(layers))
            for layers in (here.keys, here.values)
        )
        return replace(here, keys=keys, values=values)

    def append(
        self,
        keys: tuple[LayerRows | None, ...],
        values: tuple[LayerRows | None, ...],
        at: Lengths,
        count: Lengths | None = None,
        states: Mapping[int, RecurrentState] = {},
    ) -> "OffloadedCache":
        """Does what a cache on the device does."""
        at, keys = _once_read(at, keys)
        own = self._resident_of(keys), self._resident_of(values)
        here = self._here().append(*own, at, count, states)
        return self._joined(here, keys, values, at, lambda fresh: fresh)

    def commit(
        self,
        keys: tuple[LayerRows | None, ...],
        values: tuple[LayerRows | None, ...],
        path: Int[Array, "B h"],
        at: Lengths,
        count: Lengths | None = None,
        rows: Mapping[int, RecurrentRows] = {},
    ) -> "OffloadedCache":
        """Does what a cache on the device does."""
        at, keys = _once_read(at, keys)
        own = self._resident_of(keys), self._resident_of(values)
        here = self._here().commit(*own, path, at, count, rows)
        return self._joined(here, keys, values, at, lambda fresh: along(path, fresh))

    def _resident_of(self, layers: tuple[Any, ...]) -> tuple[Any, ...]:
        """The resident ones."""
        return tuple(layers[index] for index in self.resident)

    def _here(self) -> KVCache:
        """The resident layers, as a cache of their own, whose states keep their numbers."""
        rings = [n for n, index in enumerate(self.resident) if index in self.rings]
        keys, values = self._resident_of(self.keys), self._resident_of(self.values)
        return KVCache(keys, values, rings=tuple(rings), states=self.states)

    def _joined(
        self,
        here: KVCache,
        keys: tuple[LayerRows | None, ...],
        values: tuple[LayerRows | None, ...],
        at: Lengths,
        written: Callable[[TreeRows], TreeRows],
    ) -> "OffloadedCache":
        """The resident layers, and the others with the rows that are ``written`` of the fresh."""

        def layers(
            slots: tuple[Any, ...], fresh: tuple[Any, ...], own: tuple[Array | None, ...]
        ) -> tuple[Array | None, ...]:
            return tuple(
                own[self.resident.index(index)]
                if index in self.resident
                else _append_on_host(layer, written(rows), at)
                for index, (layer, rows) in enumerate(zip(slots, fresh, strict=True))
            )

        keys, values = layers(self.keys, keys, here.keys), layers(self.values, values, here.values)
        return replace(self, keys=keys, values=values, states=here.states)


def _once_read(
    at: Lengths, keys: tuple[LayerRows | None, ...]
) -> tuple[Lengths, tuple[LayerRows | None, ...]]:
    """The slots to write at, known when the pass has read all layers that are not on the device.

    The last layer's fresh keys are made of what the other layers found. The compiler might write
    before it has read, otherwise, and copy whole caches to be able to. It may do so with the last
    layer, where that is not the one on the device.
    """
    index = max(index for index, each in enumerate(keys) if each is not None)
    # What is not used of a barrier's results is not waited for.
    at, last = jax.lax.optimization_barrier((at, keys[index]))
    return at, (*keys[:index], last, *keys[index + 1 :])


def _append_on_host(slots: CacheSlots, fresh: TreeRows, at: Lengths) -> CacheSlots:
    """Slice updates, row by row: one for all would be a scatter, which host memory lacks."""
    rows = cache_lib.as_cached(slots, fresh)
    rows = rows.swapaxes(1, 2)
    for row in range(slots.shape[0]):
        # Cut on the device: the host's processor would cut what lies in its memory.
        own = to_host(jax.lax.slice_in_dim(rows, row, row + 1, axis=0))
        slots = jax.lax.dynamic_update_slice(slots, own, (row, 0, at[row], 0))
    return slots


def allocate(config: TargetConfig, batch: int, capacity: int) -> OffloadedCache:
    """A zero-filled cache, as :func:`longspec_jax.decoding.cache.allocate` makes it."""
    empty = cache_lib.allocate(config, batch, capacity)
    zeros = empty.keys[config.read_layer]
    layers: list[tuple[Any, Any]] = []
    for pair in zip(empty.keys, empty.values, strict=True):
        if pair[0] is not None and len(layers) not in (config.read_layer, *empty.rings):
            # Each from the device: the compiler would make one, and copy it where no copies are
            # made.
            zeros = jax.lax.optimization_barrier(zeros)
            keys, zeros = to_host(zeros), jax.lax.optimization_barrier(zeros)
            pair = keys, to_host(zeros)
        layers.append(pair)
    keys, values = (tuple(pair[part] for pair in layers) for part in (0, 1))
    return OffloadedCache(
        keys,
        values,
        rings=empty.rings,
        states=empty.states,
        read_layer=config.read_layer,
        read_scales=empty.read_scales,
    )


def cache_bytes(config: TargetConfig, batch: int, capacity: int) -> CacheBytes:
    """Bytes of :func:`allocate`'s result, and of the layers that are on the device for a time."""
    whole = cache_lib.cache_bytes(config, batch, capacity)
    moved = len({*config.full_layers} - {config.read_layer})
    layer = batch * capacity * cache_lib.slot_bytes(config)
    return CacheBytes(whole - (moved - min(STAGED_LAYERS, moved)) * layer, moved * layer)
