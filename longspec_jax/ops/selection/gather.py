"""Laying blocks of a cache end to end: a compact cache that attention reads like any other."""

import jax
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots
from longspec_jax.ops.hardware import has_kernels
from longspec_jax.ops.placement import on_host, to_device, to_host
from longspec_jax.ops.selection.blocks import BlockTable


def gather_blocks(slots: CacheSlots, table: BlockTable, block: int) -> Float[Array, "B K c H"]:
    """The slots of the table's blocks, one behind the other, on the device.

    Args:
      slots: keys or values of one layer, on the device or in the host's memory. Of the latter
        nothing else is moved.
      table: the blocks of every row ``[B, k]``, or of every row and key/value head ``[B, K, k]``.
      block: slots of a block; the cache must be whole blocks.
    """
    batch, heads, count, width = slots.shape
    blocks = table.blocks
    if blocks.ndim == 2:
        blocks = blocks[:, None].repeat(heads, axis=1)
    whole = slots.reshape(batch, heads, count // block, block, width)
    if not on_host(slots):
        found = composed(whole, blocks)
    elif has_kernels(slots.dtype):
        from longspec_jax.ops.selection import gather_pallas  # Its backend may be absent.

        found = gather_pallas.gather(whole, blocks)
    else:
        found = to_device(composed(whole, to_host(blocks)))
    return found.reshape(batch, heads, -1, width)


def composed(
    whole: Float[Array, "B K n b H"], blocks: Int[Array, "B K k"]
) -> Float[Array, "B K k b H"]:
    """In plain JAX; the result lies where both operands do."""

    def take(blocks_of_head: Array, at: Array) -> Array:
        return blocks_of_head.at[at].get(mode="promise_in_bounds")

    return jax.vmap(jax.vmap(take))(whole, blocks)
