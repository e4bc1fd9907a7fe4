"""Keys and values that move: a slot's row to a prompt that shares it, chunks to the host and back.

Each program serves all slots and positions of an engine.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.rows import RowShardings


@program(static_argnames=("slots", "row"))
def copy_prefix(
    slots: RowShardings, row: RowShardings, cache: KVCache, slot: Array, tokens: Array
) -> KVCache:
    """The cache of a batch of one row, with the first tokens of a slot and zeros after them.

    Zeros, because what lies after may be NaN, which survives a masked product. Of a cache with
    rings or states no tokens can be copied but all that the slot holds: they lack the earlier ones.

    Args:
      slot: whose tokens are copied; traced.
      tokens: how many of them; traced.
    """

    def own_row(layer: Array) -> Array:
        if slots.row_shards == 1:
            return jax.lax.dynamic_slice_in_dim(layer, slot, 1, axis=0)
        # A slice of rows that lie on several devices would bring them all to each.
        here = jnp.arange(layer.shape[0]) == slot
        own = jnp.where(here.reshape(-1, *[1] * (layer.ndim - 1)), layer, 0)
        return own.sum(axis=0, keepdims=True).astype(layer.dtype)

    def copied(layer: Array) -> Array:
        inside = jnp.arange(layer.shape[2]) < tokens
        return jnp.where(inside[:, None], own_row(layer), 0)

    def state(part: Array) -> Array:
        return jnp.where(tokens > 0, own_row(part), 0)

    keys, values = jax.tree.map(copied, (cache.keys, cache.values))
    states = jax.tree.map(state, cache.states)
    found = replace(cache, keys=keys, values=values, states=states, cache_rows=None)
    return jax.lax.with_sharding_constraint(found, found.shardings(row.cache))


@program(static_argnames=("row", "chunk"))
def read_chunk(row: RowShardings, chunk: int, cache: KVCache, offset: Array) -> KVCache:
    """The keys and values of a chunk, ``[1, K, chunk, H]`` a layer; of a ring the last it holds.

    And the states after it.

    Args:
      cache: the cache right after the chunk.
      offset: position of the chunk's first token; traced.
    """

    def cut(layers: tuple[Array | None, ...]) -> tuple[Array | None, ...]:
        return tuple(
            None
            if layer is None
            else layer[:, :, _last_slots(layer, offset, chunk)]
            if index in cache.rings
            else jax.lax.dynamic_slice_in_dim(layer, offset, chunk, axis=2)
            for index, layer in enumerate(layers)
        )

    found = replace(cache, keys=cut(cache.keys), values=cut(cache.values))
    return jax.lax.with_sharding_constraint(found, found.shardings(row.cache))


@program(static_argnames=("row", "tokens"), donate_argnames=("cache",))
def write_chunk(
    row: RowShardings, tokens: int, cache: KVCache, chunk: KVCache, offset: Array
) -> tuple[KVCache, Array]:
    """The cache with what :func:`read_chunk` returned of a chunk.

    Args:
      tokens: of the chunk; static.
      offset: position of the chunk's first token; traced.

    Returns:
      The cache, and an array that is ready when it is.
    """

    def written(
        layers: tuple[Array | None, ...], fresh: tuple[Array | None, ...]
    ) -> tuple[Array | None, ...]:
        return tuple(
            None
            if layer is None or new is None
            else layer.at[:, :, _last_slots(layer, offset, tokens)].set(new)
            if index in cache.rings
            else jax.lax.dynamic_update_slice_in_dim(layer, new, offset, axis=2)
            for index, (layer, new) in enumerate(zip(layers, fresh, strict=True))
        )

    keys, values = written(cache.keys, chunk.keys), written(cache.values, chunk.values)
    found = replace(cache, keys=keys, values=values, states=chunk.states)
    found = jax.lax.with_sharding_constraint(found, found.shardings(row.cache))
    return found, offset + tokens


def _last_slots(ring: Array, offset: Array, tokens: int) -> Array:
    """The slots of the last of some tokens from ``offset`` on that a ring holds."""
    size = ring.shape[2]
    kept = min(tokens, size)
    return (offset + tokens - kept + jnp.arange(kept)) % size
