"""Laying blocks of a cache end to end: a compact cache that attention reads like any other."""

import jax
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots
from longspec_jax.ops.selection.blocks import BlockTable


def gather_blocks(slots: CacheSlots, table: BlockTable, block: int) -> Float[Array, "B K c H"]:
    """The slots of the table's blocks, one behind the other.

    Args:
      slots: keys or values of one layer.
      table: the blocks of every row ``[B, k]``, or of every row and key/value head ``[B, K, k]``.
      block: slots of a block; the cache must be whole blocks.
    """
    batch, heads, count, width = slots.shape
    blocks = table.blocks
    if blocks.ndim == 2:
        blocks = blocks[:, None].repeat(heads, axis=1)
    whole = slots.reshape(batch, heads, count // block, block, width)

    def take(blocks_of_head: Array, at: Array) -> Array:
        return blocks_of_head.at[at].get(mode="promise_in_bounds")

    found = jax.vmap(jax.vmap(take))(whole, blocks)
    return found.reshape(batch, heads, -1, width)
