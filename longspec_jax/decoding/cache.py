"""The target's key/value cache: committed tokens only, one array per layer.

A tree's K/V come back from verification beside the logits; after acceptance the accepted rows are
appended. Nothing is moved, and a rejected branch never touches the cache. How many slots hold
committed tokens is the row's ``length``, kept by the decode state; memory beyond it may hold
anything, because every op masks by length.

A layer with a window of ``W`` tokens has a ring of that many slots, and of what a round writes at
once: what an append overwrites is then older than the window of every later query.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths, TreeRows
from longspec_jax.config import MAX_TREE_LEVELS, TargetConfig
from longspec_jax.drafters.base import Uncommitted
from longspec_jax.ops.attention.float8 import E4M3
from longspec_jax.ops.attention.operands import Reading
from longspec_jax.ops.caches import Caches, put_tokens
from longspec_jax.ops.layer import append_rows
from longspec_jax.ops.slicing import along


class CacheBytes(NamedTuple):
    """Bytes of a cache, by where they are."""

    device: int
    """Of all devices together, what a pass brings there for a time included."""
    host: int


@struct.dataclass
class KVCache(Caches):
    """The target's keys and values. DONATED by every function that returns a new one."""

    def reading(self, length: Lengths) -> Reading:
        """What attention reads in a pass that asks for every layer once, in their order."""
        return lambda index, queries: (queries, self.layer(index, length))

    def shardings(self, sharding: Any) -> Any:
        """The sharding of every array, where the part on the device has this one."""
        return jax.tree.map(lambda _: sharding, self)

    def append(
        self,
        keys: tuple[TreeRows, ...],
        values: tuple[TreeRows, ...],
        at: Lengths,
        count: Lengths | None = None,
    ) -> "KVCache":
        """The cache with the K/V of consecutive tokens at the positions from ``at[b]`` on.

        The first ``count[b]`` of them are the row's own, or all if absent. The caller guarantees
        room for all in layers without a window; what is no row's own lands behind its length there.
        """
        if count is None:
            count = jnp.full_like(at, keys[0].shape[1])
        write = partial(self._appended, at=at, count=count)
        return replace(self, keys=write(self.keys, keys), values=write(self.values, values))

    def _appended(
        self,
        layers: tuple[Array, ...],
        fresh: tuple[TreeRows, ...],
        at: Lengths,
        count: Lengths,
    ) -> tuple[Array, ...]:
        return tuple(
            append_to_ring(layer, new, at, count)
            if index in self.rings
            else append_chunk(layer, new, at)
            for index, (layer, new) in enumerate(zip(layers, as_cached(layers, fresh), strict=True))
        )

    def commit(
        self,
        keys: tuple[TreeRows, ...],
        values: tuple[TreeRows, ...],
        path: Int[Array, "B h"],
        at: Lengths,
    ) -> "KVCache":
        """The cache with the K/V of the tree nodes ``path[b]`` at the slots from ``at[b]`` on.

        ``path`` has a static height; what stands behind the accepted nodes lands behind the new
        length, where the next commit overwrites it. The caller guarantees ``at + h <= S`` in layers
        without a window.
        """
        caches, layers = [*self.keys, *self.values], len(keys)
        fresh = as_cached(caches, (*keys, *values))
        for slots in dict.fromkeys(cache.shape[2] for cache in caches):  # One launch a shape.
            some = [i for i, cache in enumerate(caches) if cache.shape[2] == slots]
            chosen = [caches[i] for i in some], [fresh[i] for i in some]
            ring = some[0] % layers in self.rings
            written = append_rows(*chosen, path, at, self.cache_rows, ring=ring)
            for index, cache in zip(some, written, strict=True):
                caches[index] = cache
        return replace(self, keys=tuple(caches[:layers]), values=tuple(caches[layers:]))

    def uncommitted(self, batch: int, tokens: int, dtype: DTypeLike) -> Uncommitted:
        """Zeros for the keys and values of ``tokens`` outside the cache in each batch row.

        They have the dtype of activations, whatever that of the cache.
        """

        def empty(slots: Array) -> Array:
            _, heads, _, width = slots.shape
            return jnp.zeros((batch, tokens, heads, width), dtype)

        return Uncommitted(tuple(map(empty, self.keys)), tuple(map(empty, self.values)))


def as_cached(caches: Sequence[Array], fresh: Sequence[TreeRows]) -> tuple[TreeRows, ...]:
    """Fresh rows in the dtype of their caches; exact, as the target rounded them."""
    return tuple(new.astype(cache.dtype) for cache, new in zip(caches, fresh, strict=True))


def append_chunk(slots: CacheSlots, fresh: TreeRows, at: Lengths) -> CacheSlots:
    """One layer's keys or values with consecutive tokens' at the slots from ``at[b]`` on."""
    fresh = fresh.swapaxes(1, 2)
    if slots.shape[0] == 1:  # A plain slice update; vmap would turn it into a scatter.
        return jax.lax.dynamic_update_slice_in_dim(slots, fresh, at[0], axis=2)
    update = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(update)(slots, fresh, at)


def append_to_ring(slots: CacheSlots, fresh: TreeRows, at: Lengths, count: Lengths) -> CacheSlots:
    """One ring with the last of ``count[b]`` consecutive tokens, as many as it holds."""
    size, given = slots.shape[2], fresh.shape[1]
    offsets = jnp.maximum(count - size, 0)[:, None] + jnp.arange(min(size, given))
    if given > size:
        fresh = along(offsets, fresh)
    # What is not the row's own goes to a slot that does not exist, and is dropped.
    places = jnp.where(offsets < count[:, None], (at[:, None] + offsets) % size, size)
    return put_tokens(slots, None, places, fresh)


def layer_slots(config: TargetConfig, capacity: int) -> tuple[int, ...]:
    """Slots of a row in every layer of a cache of this capacity."""
    windows = [config.layer(index).window for index in range(config.num_layers)]
    return tuple(capacity if each is None else min(capacity, ring_slots(each)) for each in windows)


def ring_slots(window: int) -> int:
    """Slots of a ring for this window, by eight: the window, and what a round writes at once."""
    return -(-(window + MAX_TREE_LEVELS) // 8) * 8


def rings_of(config: TargetConfig) -> tuple[int, ...]:
    """The layers with a window."""
    return tuple(i for i in range(config.num_layers) if i not in config.full_layers)


def allocate(config: TargetConfig, batch: int, capacity: int) -> KVCache:
    """A zero-filled cache; uninitialised memory could hold NaNs that survive a masked product."""

    def zeros(slots: int) -> Array:
        shape = (batch, config.num_kv_heads, slots, config.head_width)
        return jnp.zeros(shape, cache_dtype(config))

    sizes = layer_slots(config, capacity)
    return KVCache(
        tuple(map(zeros, sizes)),
        tuple(map(zeros, sizes)),
        read_layer=config.read_layer,
        read_scales=config.scales(config.read_layer),
        rings=rings_of(config),
    )


def cache_dtype(config: TargetConfig) -> Any:
    """The dtype of cached keys and values."""
    return jnp.dtype(config.dtype if config.kv_dtype is None else E4M3)


def slot_bytes(config: TargetConfig) -> int:
    """Bytes of a token's keys and values in one layer."""
    return 2 * config.num_kv_heads * config.head_width * cache_dtype(config).itemsize


def cache_bytes(config: TargetConfig, batch: int, capacity: int) -> int:
    """Bytes of :func:`allocate`'s result, known before allocation."""
    return sum(layer_slots(config, capacity)) * batch * slot_bytes(config)


def bucket_capacity(slots: int) -> int:
    """The smallest bucketed capacity that holds ``slots``, so that few shapes are ever compiled.

    Steps of an eighth of the power of two below, and of at least 256: at most 12.5 % is wasted.
    """
    step = max(256, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step
