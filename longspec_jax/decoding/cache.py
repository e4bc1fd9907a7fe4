"""The target's key/value cache: committed tokens only, one array per layer.

A tree's K/V come back from verification beside the logits; after acceptance the accepted rows are
appended. Nothing is moved, and a rejected branch never touches the cache. How many slots hold
committed tokens is the row's ``length``, kept by the decode state; memory beyond it may hold
anything, because every op masks by length.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths, TreeRows
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.base import Uncommitted
from longspec_jax.ops.attention.operands import Reading
from longspec_jax.ops.caches import Caches
from longspec_jax.ops.layer import append_rows


class CacheBytes(NamedTuple):
    """Bytes of a cache, by where they are."""

    device: int
    """Of all devices together, what a pass brings there for a time included."""
    host: int


@struct.dataclass
class KVCache(Caches):
    """The target's keys and values. DONATED by every function that returns a new one."""

    @property
    def capacity(self) -> int:
        """Slots of a row (``S``)."""
        return self.keys[0].shape[2]

    def reading(self, length: Lengths) -> Reading:
        """What attention reads in a pass that asks for every layer once, in their order."""
        return lambda index, queries: (queries, self.layer(index, length))

    def shardings(self, sharding: Any) -> Any:
        """The sharding of every array, where the part on the device has this one."""
        return jax.tree.map(lambda _: sharding, self)

    def append(
        self, keys: tuple[TreeRows, ...], values: tuple[TreeRows, ...], at: Lengths
    ) -> "KVCache":
        """The cache with the K/V of consecutive tokens at the slots from ``at[b]`` on.

        The caller guarantees room for all of them, and masks those that are no row's own.
        """
        write = partial(append_chunk, at=at)
        keys, values = tuple(map(write, self.keys, keys)), tuple(map(write, self.values, values))
        return replace(self, keys=keys, values=values)

    def commit(
        self,
        keys: tuple[TreeRows, ...],
        values: tuple[TreeRows, ...],
        path: Int[Array, "B h"],
        at: Lengths,
    ) -> "KVCache":
        """The cache with the K/V of the tree nodes ``path[b]`` at the slots from ``at[b]`` on.

        ``path`` has a static height; what stands behind the accepted nodes lands behind the new
        length, where the next commit overwrites it. The caller guarantees ``at + h <= S``.
        """
        layers = len(keys)
        caches, rows = (*self.keys, *self.values), self.cache_rows
        written = append_rows(caches, (*keys, *values), path, at, rows)
        return replace(self, keys=written[:layers], values=written[layers:])

    def uncommitted(self, batch: int, tokens: int) -> Uncommitted:
        """Zeros for the keys and values of ``tokens`` outside the cache in each batch row."""

        def empty(slots: Array) -> Array:
            _, heads, _, width = slots.shape
            return jnp.zeros((batch, tokens, heads, width), slots.dtype)

        return Uncommitted(tuple(map(empty, self.keys)), tuple(map(empty, self.values)))


def append_chunk(slots: CacheSlots, fresh: TreeRows, at: Lengths) -> CacheSlots:
    """One layer's keys or values with consecutive tokens' at the slots from ``at[b]`` on."""
    fresh = fresh.swapaxes(1, 2)
    if slots.shape[0] == 1:  # A plain slice update; vmap would turn it into a scatter.
        return jax.lax.dynamic_update_slice_in_dim(slots, fresh, at[0], axis=2)
    update = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(update)(slots, fresh, at)


def allocate(config: TargetConfig, batch: int, capacity: int) -> KVCache:
    """A zero-filled cache; uninitialised memory could hold NaNs that survive a masked product."""
    shape = (batch, config.num_kv_heads, capacity, config.head_width)
    dtype = jnp.dtype(config.dtype)
    keys = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    values = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return KVCache(keys, values, read_layer=config.read_layer)


def cache_bytes(config: TargetConfig, batch: int, capacity: int) -> int:
    """Bytes of :func:`allocate`'s result, known before allocation."""
    slot = 2 * config.num_kv_heads * config.head_width * jnp.dtype(config.dtype).itemsize
    return config.num_layers * batch * capacity * slot


def bucket_capacity(slots: int) -> int:
    """The smallest bucketed capacity that holds ``slots``, so that few shapes are ever compiled.

    Steps of an eighth of the power of two below, and of at least 256: at most 12.5 % is wasted.
    """
    step = max(256, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step
