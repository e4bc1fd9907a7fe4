"""Gathering blocks as a Pallas kernel for Triton, which reads the host's memory where it lies.

To the compiler a gather from the host's memory is work for the host: it would leave the blocks
there, and move them in a second step.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int, Num

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.triton_launch import triton_call


def gather(
    whole: Num[Array, "B K n b H"], blocks: Int[Array, "B K k"], interpret: bool = False
) -> Num[Array, "B K k b H"]:
    """See :func:`longspec_jax.ops.selection.blocks.gather`; the result is on the device."""
    shape = (*blocks.shape, *whole.shape[3:])
    return triton_call(
        _kernel,
        grid=blocks.shape,
        out_shape=jax.ShapeDtypeStruct(shape, whole.dtype),
        warps=4,
        stages=1,
        interpret=interpret,
        name="gather_blocks",
    )(blocks.astype(jnp.int32), whole)


def _kernel(blocks_ref: Ref, whole_ref: Ref, found_ref: Ref) -> None:
    """Copy one block of one head."""
    row, head, place = (pl.program_id(axis) for axis in range(3))
    block, width = whole_ref.shape[3:]
    slot = jnp.arange(pl.next_power_of_2(block))[:, None]
    h = jnp.arange(pl.next_power_of_2(width))[None, :]
    mask = (slot < block) & (h < width)
    chosen = pltriton.load(blocks_ref.at[row, head, place])
    copied = pltriton.load(whole_ref.at[row, head, chosen, slot, h], mask=mask, other=0)
    pltriton.store(found_ref.at[row, head, place, slot, h], copied, mask=mask)
