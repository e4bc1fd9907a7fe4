"""The target's key/value cache: committed tokens only, one array per layer.

A tree's K/V come back from verification beside the logits; after acceptance the accepted rows are
appended. Nothing is moved, and a rejected branch never touches the cache. How many slots hold
committed tokens is the row's ``length``, kept by the decode state; memory beyond it may hold
anything, because every op masks by length.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.base import Uncommitted
from longspec_jax.ops.layer.append_rows import append_rows


@struct.dataclass
class KVCache:
    """Keys and values of every layer. DONATED by every function that returns a new one."""

    keys: tuple[Leaf, ...]
    """``L x [B, K, S, H]``, rotary applied."""
    values: tuple[Leaf, ...]
    """``L x [B, K, S, H]``."""

    @property
    def capacity(self) -> int:
        """Slots of a row (``S``)."""
        return self.keys[0].shape[2]

    def rows(self, tokens: int) -> Uncommitted:
        """Zeros for the keys and values of so many tokens outside the cache."""

        def empty(slots: Array) -> Array:
            batch, heads, _, width = slots.shape
            return jnp.zeros((batch, tokens, heads, width), slots.dtype)

        return Uncommitted(tuple(map(empty, self.keys)), tuple(map(empty, self.values)))


def allocate(config: TargetConfig, batch: int, capacity: int) -> KVCache:
    """A zero-filled cache; uninitialised memory could hold NaNs that survive a masked product."""
    shape = (batch, config.num_kv_heads, capacity, config.head_width)
    dtype = jnp.dtype(config.dtype)
    keys = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    values = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return KVCache(keys, values)


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


def append_chunk(
    cache: KVCache, keys: tuple[Array, ...], values: tuple[Array, ...], offset: Array
) -> KVCache:
    """Write one prefill chunk ``[B, C, K, H]`` per layer at the same slot of every row."""

    def write(slots: Array, fresh: Array) -> Array:
        fresh = fresh.swapaxes(1, 2)
        return jax.lax.dynamic_update_slice_in_dim(slots, fresh, offset, axis=2)

    return KVCache(tuple(map(write, cache.keys, keys)), tuple(map(write, cache.values, values)))


def commit(
    cache: KVCache,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    path: Int[Array, "B h"],
    length: Lengths,
) -> KVCache:
    """Append the K/V of the tree nodes ``path[b]`` at slot ``length[b]``.

    ``path`` has a static height; rows beyond the accepted count write garbage behind the new
    length, where the next commit overwrites it. The caller guarantees ``length + h <= S``.
    """
    layers = len(keys)
    written = append_rows((*cache.keys, *cache.values), (*keys, *values), path, length)
    return KVCache(written[:layers], written[layers:])
