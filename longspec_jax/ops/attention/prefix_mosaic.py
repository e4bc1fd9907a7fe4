"""Prefix attention on Hopper GPUs: FlashDecoding as a Pallas kernel for Mosaic GPU.

Partial results have the layout of the Triton kernel's, with the rows padded to whole warpgroups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries
from longspec_jax.ops import hardware
from longspec_jax.ops.attention.online_softmax import LOG2_E
from longspec_jax.ops.attention.packing import pack, refuse_unsupported
from longspec_jax.ops.attention.prefix_mosaic_items import Work
from longspec_jax.ops.attention.prefix_mosaic_kernel import kernel, memory
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.hardware import WARPGROUP_ROWS


def split_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    *,
    scale: float | None = None,
    tile: MosaicTile,
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split, unmerged, each with its natural log-sum-exp."""
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    refuse_unsupported(q, kv_heads)
    _refuse_unsupported(width, slots, q.dtype, tile)
    packed = tokens * heads // kv_heads
    padded = pl.cdiv(packed, WARPGROUP_ROWS) * WARPGROUP_ROWS
    rows = jnp.pad(pack(q, kv_heads), ((0, 0), (0, 0), (0, padded - packed), (0, 0)))
    work = Work(
        tile=tile,
        batch=batch,
        kv_heads=kv_heads,
        rows=padded,
        slots=slots,
        scale=(width**-0.5 if scale is None else scale) * LOG2_E,
    )
    call = plgpu.kernel(
        functools.partial(kernel, work=work),
        out_type=(
            jax.ShapeDtypeStruct((batch, work.splits, kv_heads, padded, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, work.splits, kv_heads, padded), jnp.float32),
        ),
        scratch_types=memory(tile, width, q.dtype),
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        # No sum or maximum crosses warps; three stages of 128 slots leave no room for scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return call(length.astype(jnp.int32), rows, k, v)


def _refuse_unsupported(width: int, slots: int, dtype: Any, tile: MosaicTile) -> None:
    """Raise for what this kernel cannot do; the sentence names the value and the rule."""
    if not hardware.mosaic_is_supported():
        raise NotImplementedError(
            f"the Mosaic GPU kernel needs jax 0.11 or newer and this is {jax.__version__}"
        )
    if width not in (64, 128):
        raise NotImplementedError(f"head width {width} is neither 64 nor 128")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} is neither bfloat16 nor float16")
    if slots < tile.slots or slots % 8:
        raise NotImplementedError(
            f"capacity {slots} is not a multiple of 8 of at least one step of {tile.slots} slots"
        )
