"""Keys and values that move: a slot's row to a prompt that shares it, chunks to the host and back.

Each program serves all slots and positions of an engine.
"""

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.rows import RowShardings


@program(static_argnames=("slots", "row"))
def copy_prefix(
    slots: RowShardings, row: RowShardings, cache: KVCache, slot: Array, tokens: Array
) -> KVCache:
    """The cache of a batch of one row, with the first tokens of a slot and zeros behind them.

    Zeros, because what lies behind may be NaN, which survives a masked product.

    Args:
      slot: whose tokens are copied; traced.
      tokens: how many of them; traced.
    """

    def copied(layer: Array) -> Array:
        if slots.row_shards == 1:
            own = jax.lax.dynamic_slice_in_dim(layer, slot, 1, axis=0)
        else:
            # A slice of rows that lie on several devices would bring them all to each.
            here = jnp.arange(layer.shape[0]) == slot
            own = jnp.where(here[:, None, None, None], layer, 0).sum(axis=0, keepdims=True)
        inside = jnp.arange(layer.shape[2]) < tokens
        return jnp.where(inside[:, None], own, 0).astype(layer.dtype)

    found = _replaced(cache, jax.tree.map(copied, (cache.keys, cache.values)))
    return jax.lax.with_sharding_constraint(found, found.shardings(row.cache))


@program(static_argnames=("row", "chunk"))
def read_chunk(row: RowShardings, chunk: int, cache: KVCache, offset: Array) -> KVCache:
    """The keys and values of a chunk, ``[1, K, chunk, H]`` a layer.

    Args:
      offset: position of the chunk's first token; traced.
    """

    def cut(layer: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(layer, offset, chunk, axis=2)

    found = _replaced(cache, jax.tree.map(cut, (cache.keys, cache.values)))
    return jax.lax.with_sharding_constraint(found, found.shardings(row.cache))


@program(static_argnames=("row",), donate_argnames=("cache",))
def write_chunk(
    row: RowShardings, cache: KVCache, chunk: KVCache, offset: Array
) -> tuple[KVCache, Array]:
    """The cache with the keys and values of a chunk, as :func:`read_chunk` returned them.

    Args:
      offset: position of the chunk's first token; traced.

    Returns:
      The cache, and an array that is ready when it is.
    """

    def written(layer: Array, fresh: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(layer, fresh, offset, axis=2)

    layers = jax.tree.map(written, (cache.keys, cache.values), (chunk.keys, chunk.values))
    found = _replaced(cache, layers)
    found = jax.lax.with_sharding_constraint(found, found.shardings(row.cache))
    return found, offset + chunk.capacity


def _replaced(cache: KVCache, layers: tuple[tuple[Array, ...], tuple[Array, ...]]) -> KVCache:
    """A cache on the device with other keys and values."""
    return KVCache(*layers, read_layer=cache.read_layer)
