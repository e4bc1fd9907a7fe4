"""Prefix attention on Hopper GPUs: FlashDecoding as a Pallas kernel for Mosaic GPU.

Partial results have the layout of the Triton kernel's, with the rows padded to whole warpgroups.

With grouped heads a tree of some 70 nodes makes the prefix compute-bound: 276 packed rows read each
key and value. This kernel keeps the tensor cores busy as FlashAttention-3 does: one warpgroup
fetches keys and values with the copy engine while the others, 64 packed rows each, take turns, one
in its softmax while the other multiplies.

**Expected times of a cache in 8 bits** (H200, 4.3 TB/s, a multiprocessor reads 19 bytes a clock at
1.7 GHz): 32k tokens of 32 heads are 268 MB, 62 us a layer; of 8 heads 16 us, and the matrix units'
time for many rows. Widening issues 2.2 instructions a code, of which a multiprocessor has 128 a
clock: a third of one warpgroup's for each of keys and values where memory is the bound.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Queries, Ref
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.attention.packing import Problem, pack, refuse_unsupported
from longspec_jax.ops.attention.path import SEGMENT
from longspec_jax.ops.attention.prefix_attending import Attention
from longspec_jax.ops.attention.prefix_items import Bounds, Work
from longspec_jax.ops.attention.prefix_programs import Memory, PrefixOperands
from longspec_jax.ops.attention.tiles import MosaicTile, refuse_width
from longspec_jax.ops.attention.widening import BLOCK, Ring
from longspec_jax.ops.hardware import HOPPER, SHARED_BYTES, WARPGROUP_ROWS
from longspec_jax.ops.mosaic import swizzled

_APART, _TOGETHER = ("k", "v"), ("kv",)
"""What each of the warpgroups widens that do: keys, values or both."""


def widening_warpgroups(tile: MosaicTile) -> tuple[str, ...]:
    """What each warpgroup widens that does; larger scores of two that attend leave room for one."""
    return _TOGETHER if tile.warpgroups == 2 and tile.slots > BLOCK else _APART


def registers(tile: MosaicTile, *, narrow: bool) -> tuple[int, ...]:
    """Registers of a thread that attends, one that fetches, and one that widens if any does.

    They are as at the launch if none are named. All of a program's are at most those of the
    launch, 65,536 shared out evenly in eights: a warpgroup that asks for more waits forever.
    """
    if narrow:
        if tile.warpgroups == 1:
            return 232, 32, 120
        return (160, 24, 64) if widening_warpgroups(tile) == _APART else (216, 32, 48)
    return () if tile.warpgroups == 1 else (232, 40)


def split_attention(
    q: Queries, prefix: Prefix, tile: MosaicTile, problem: Problem
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split, unmerged, each with its natural log-sum-exp."""
    kv_heads, slots = prefix.keys.shape[1:3]
    refuse_unsupported(q, kv_heads)
    packed = q.shape[1] * q.shape[2] // kv_heads
    padded = pl.cdiv(packed, WARPGROUP_ROWS) * WARPGROUP_ROWS
    rows = jnp.pad(pack(q, kv_heads), ((0, 0), (0, 0), (0, padded - packed), (0, 0)))
    seen = jnp.minimum(prefix.length.astype(jnp.int32), slots)
    bounds = Bounds.packed(seen, seen, problem.split_of(seen), prefix.cache_rows)
    work = Work(
        tile=tile,
        batch=q.shape[0],
        kv_heads=kv_heads,
        rows=padded,
        slots=slots,
        splits=problem.splits,
        scale=problem.scale,
    )
    return launch(work, bounds, None, rows, prefix.keys, prefix.values)


def launch(
    work: Work,
    bounds: Int[Array, "B fields"],
    limit: Int[Array, "B R"] | None,
    q: Float[Array, "B K packed H"] | Float[Array, "B K T G H"],
    k: CacheSlots,
    v: CacheSlots,
) -> tuple[Float[Array, "B P K some H"], Float[Array, "B P K R"]]:
    """Run the kernel.

    Args:
      work: what all programs do.
      bounds: the fields of :class:`~longspec_jax.ops.attention.prefix_items.Bounds`, and others.
      limit: how many slots each packed row sees; as the bounds say if absent.
      q: packed queries; or every head's by itself: their rows are ordered by head, then by token,
        of whole segments of tokens (``path.SEGMENT``).
      k: cached keys.
      v: cached values.

    Returns:
      Partial results of every split that a row sees, each with its natural log-sum-exp. Rows that
      see nothing of a split that another row sees have 0 and -inf. Less than a warpgroup's outputs
      have no more rows than there are.
    """
    width, narrow = k.shape[3], k.dtype == CODES
    refuse_width(width, narrow=narrow)
    _refuse_unsupported(k.shape[2], q.dtype, work.tile)
    if narrow:
        work = _narrow(work)
    tile, tokens, rows = work.tile, None, work.rows
    there = q.shape[2]
    if q.ndim == 5:
        tokens = -(-q.shape[2] // SEGMENT) * SEGMENT
        there = tokens * q.shape[3]
    rows = there if there < WARPGROUP_ROWS else rows
    shape = (work.batch, work.splits, work.kv_heads)
    memory = _memory(work, width, rows, q.dtype, segmented=tokens is not None)
    if narrow:
        memory |= _rings_of_codes(memory)
    call = plgpu.kernel(
        functools.partial(_kernel, work=work, limited=limit is not None, tokens=tokens),
        out_type=(
            jax.ShapeDtypeStruct((*shape, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((*shape, work.rows), jnp.float32),
        ),
        scratch_types=memory,
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=tile.warpgroups + 1 + (len(widening_warpgroups(tile)) if narrow else 0),
        thread_name="warpgroup",
        # No sum or maximum crosses warps; three stages of 128 slots leave no room for scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="prefix_splits",
    )
    return call(bounds, *([] if limit is None else [limit]), q, k, v)


def _refuse_unsupported(slots: int, dtype: DTypeLike, tile: MosaicTile) -> None:
    """Raise for what this kernel cannot do; the sentence names the value and the rule."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} is neither bfloat16 nor float16")
    if slots < tile.slots or slots % 8:
        raise NotImplementedError(
            f"capacity {slots} is not a multiple of 8 of at least one step of {tile.slots} slots"
        )


def _memory(
    work: Work, width: int, rows: int, dtype: DTypeLike, *, segmented: bool
) -> dict[str, Any]:
    """Shared memory and barriers of a program: the fields of :class:`Memory`."""
    tile = work.tile
    columns = width // work.parts
    copies = WARPGROUP_ROWS // SEGMENT if segmented else 1
    few = (tile.warpgroups, WARPGROUP_ROWS, columns) if rows < WARPGROUP_ROWS else (1, 1, 1)
    return dict(
        q_smem=swizzled((tile.warpgroups, WARPGROUP_ROWS, width), dtype),
        k_smem=swizzled((tile.stages, tile.slots, width), dtype),
        v_smem=swizzled((tile.stages, tile.slots, columns), dtype),
        lse_smem=plgpu.SMEM((tile.warpgroups, WARPGROUP_ROWS), jnp.float32),
        out_smem=plgpu.SMEM(few, jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=tile.warpgroups),
        k_ready=plgpu.Barrier(num_barriers=tile.stages),
        v_ready=plgpu.Barrier(num_barriers=tile.stages),
        k_free=plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
        v_free=plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
        turn=plgpu.Barrier(num_arrivals=tile.warpgroups),
        clean=plgpu.Barrier(num_arrivals=tile.warpgroups),
    )


def _narrow(work: Work) -> Work:
    """The work on a cache in 8 bits, with few places in 16 bits: what fills them is near."""
    tile = work.tile
    stages = 3 if tile.slots == BLOCK and tile.warpgroups == 1 else 2
    return dataclasses.replace(work, tile=dataclasses.replace(tile, stages=stages))


def _rings_of_codes(memory: dict[str, Any]) -> dict[str, Ring]:
    """Rings of keys and values, with as many places as fit next to the other memory."""
    arrays = (memory[name] for name in ("q_smem", "k_smem", "v_smem", "lse_smem", "out_smem"))
    held = sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)
    widths = [memory[name].shape[2] for name in ("k_smem", "v_smem")]
    places = min((SHARED_BYTES[HOPPER] - held - 2048) // (BLOCK * sum(widths)), 8)
    rings = (Ring.memory(places, width) for width in widths)
    return dict(zip(("k_codes", "v_codes"), rings, strict=True))


def _kernel(
    bounds: Ref, *refs: Ref, work: Work, limited: bool, tokens: int | None, **memory: Ref
) -> None:
    """A program that stays: a warpgroup that fetches, and some that attend, item after item.

    While the last rows of an item are written the keys of the next are already on their way.
    """
    program = Attention(
        work=work,
        tokens=tokens,
        refs=PrefixOperands(bounds, *(() if limited else (None,)), *refs),
        memory=Memory(**memory),
        index=jax.lax.axis_index("program"),
        warpgroup=jax.lax.axis_index("warpgroup"),
    )
    attending = work.tile.warpgroups
    narrow = program.memory.k_codes is not None
    held = registers(work.tile, narrow=narrow)

    @pl.when(program.warpgroup < attending)
    def _() -> None:
        if held:
            plgpu.set_max_registers(held[0], action="increase")
        program.each_item(program.attend)

    @pl.when(program.warpgroup == attending)
    def _() -> None:
        if held:
            plgpu.set_max_registers(held[1], action="decrease")
        bring = program.fetch_codes if narrow else program.fetch_block
        program.each_item(functools.partial(program.each_step, bring))

    for index, kinds in enumerate(widening_warpgroups(work.tile) if narrow else ()):

        @pl.when(program.warpgroup == attending + 1 + index)
        def _(kinds: str = kinds) -> None:
            plgpu.set_max_registers(held[2], action="decrease")
            widen = functools.partial(program.widen_block, kinds)
            program.each_item(functools.partial(program.each_step, widen))
