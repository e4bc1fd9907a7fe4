"""Attention to the recent tokens of a path, and the merge with the prefix's splits, for Mosaic GPU.

:mod:`longspec_jax.ops.attention.path_kernels` says what it is for. A program has 64 packed rows of
a key/value head and some columns of their output. It holds the keys of all nodes. The value of a
position is added by a matmul in which every row has one weight that is not zero.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Queries
from longspec_jax.ops.attention.packing import LOG2_E
from longspec_jax.ops.attention.path import ALIGNED, FETCHED, RECENT, SEGMENT
from longspec_jax.ops.hardware import HOPPER, SHARED_BYTES, WARPGROUP_ROWS

COLUMNS = 64
"""Columns of the values that one program of the recent tokens' kernel adds up."""
WEIGHT_STEPS = 2.0**18
"""Weights of recent tokens are rounded to multiples of its inverse for their sum."""
_AT_ONCE = 8
"""Steps whose weights are in registers at once."""
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def attend_and_merge(
    where: Int[Array, "B 4"],
    cached_step: Int[Array, "B R c"],
    fresh_step: Int[Array, "B R T"],
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    fresh_k: Float[Array, "B T K H"],
    fresh_v: Float[Array, "B T K H"],
    partial: Float[Array, "B P K R H"],
    partial_lse: Float[Array, "B P K R"],
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attend to the recent tokens and merge with the splits, in ascending order.

    Args:
      where: of every batch row the first cached recent slot, its length, the splits that it
        reaches, and the greatest depth of a node.
      cached_step: in which step the value of a cached recent token is added; -1 if it is not seen.
      fresh_step: the same of the tree's nodes, which come after the cached ones: their depth.
      q: queries.
      k: cached keys.
      v: cached values.
      fresh_k: the tree's keys.
      fresh_v: the tree's values.
      partial: the splits' results.
      partial_lse: their log-sum-exps.
      scale: factor on the scores, in base 2.
    """
    batch, _, heads, width = q.shape
    kv_heads, tokens = k.shape[1], fresh_step.shape[2]
    splits, rows = partial.shape[1], heads // kv_heads * tokens
    columns = min(COLUMNS, width)
    row_tiles = pl.cdiv(rows, WARPGROUP_ROWS)

    def shared(*shape: int, bytes: int = 128) -> Any:
        # By the types of newer jax these are abstract; they are not.
        tiling = plgpu.TilingTransform((8, bytes // 2))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(bytes)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, q.dtype, transforms=(tiling, swizzle))

    held = 2 * (
        WARPGROUP_ROWS * width
        + (FETCHED + tokens) * width
        + (WARPGROUP_ROWS + tokens + WARPGROUP_ROWS) * columns
    )
    room = SHARED_BYTES[HOPPER] - held - 2048
    stages = min(splits, room // (4 * WARPGROUP_ROWS * (columns + 1)))
    kernel = plgpu.kernel(
        functools.partial(_finish_kernel, scale=scale, stages=stages),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=dict(
            q_smem=shared(WARPGROUP_ROWS, width),
            cached_k=shared(FETCHED, width),
            # As high as an instruction, which is how it is read to silence slots. A matmul
            # contracts whole swizzles: 32 cached tokens, and 16 of the tree.
            cached_v=shared(WARPGROUP_ROWS, columns, bytes=64),
            fresh_k_smem=shared(tokens, width),
            fresh_v_smem=shared(tokens, columns, bytes=32),
            partial_smem=plgpu.SMEM((stages, WARPGROUP_ROWS, columns), jnp.float32),
            lse_smem=plgpu.SMEM((stages, WARPGROUP_ROWS), jnp.float32),
            out_smem=plgpu.SMEM((WARPGROUP_ROWS, columns), q.dtype),
            ready=plgpu.Barrier(num_arrivals=WARPGROUP_ROWS // SEGMENT + 4),
            partial_ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
        grid=(width // columns, row_tiles, kv_heads, batch),
        grid_names=("part", "row_tile", "kv_head", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="recent_tokens",
    )
    return kernel(where, cached_step, fresh_step, q, k, v, fresh_k, fresh_v, partial, partial_lse)


def _finish_kernel(
    where_ref: Any,
    cached_step_ref: Any,
    fresh_step_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    fresh_k_ref: Any,
    fresh_v_ref: Any,
    partial_ref: Any,
    partial_lse_ref: Any,
    out_ref: Any,
    *,
    q_smem: Any,
    cached_k: Any,
    cached_v: Any,
    fresh_k_smem: Any,
    fresh_v_smem: Any,
    partial_smem: Any,
    lse_smem: Any,
    out_smem: Any,
    ready: Any,
    partial_ready: Any,
    scale: float,
    stages: int,
) -> None:
    """One program: 64 packed rows of a key/value head, some columns of their output."""
    batch, kv_head = jax.lax.axis_index("batch"), jax.lax.axis_index("kv_head")
    row_tile = jax.lax.axis_index("row_tile")
    tokens = fresh_step_ref.shape[2]
    columns, groups = out_smem.shape[1], q_ref.shape[2] // k_ref.shape[1]
    start, length, reached, deepest = (where_ref[batch, field] for field in range(4))
    part = pl.ds(jax.lax.axis_index("part") * columns, columns)
    rows_there = min(partial_ref.shape[3], WARPGROUP_ROWS)
    rows = pl.ds(row_tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
    of_a_head = tokens // SEGMENT

    def segment(place: int) -> tuple[Any, Any, Any]:
        """Batch row, tokens and head of 16 packed rows, of some that there are at the most."""
        number = row_tile * (WARPGROUP_ROWS // SEGMENT) + place
        number = jnp.minimum(number, groups * of_a_head - 1)
        head = kv_head * groups + jax.lax.div(number, of_a_head)
        return batch, pl.ds(jax.lax.rem(number, of_a_head) * SEGMENT, SEGMENT), head

    for place in range(WARPGROUP_ROWS // SEGMENT):
        to = q_smem.at[pl.ds(place * SEGMENT, SEGMENT)]
        plgpu.copy_gmem_to_smem(q_ref.at[segment(place)], to, ready)
    recent = batch, kv_head, pl.ds(pl.multiple_of(start, ALIGNED), FETCHED)
    plgpu.copy_gmem_to_smem(k_ref.at[recent], cached_k, ready)
    plgpu.copy_gmem_to_smem(v_ref.at[(*recent, part)], cached_v.at[pl.ds(0, FETCHED)], ready)
    # The copy engine fills with zeros what is beyond the tree. The index is not known beforehand,
    # or Pallas would refuse.
    nodes = batch, pl.ds(pl.multiple_of(0 * start, SEGMENT), tokens), kv_head
    plgpu.copy_gmem_to_smem(fresh_k_ref.at[nodes], fresh_k_smem, ready)
    plgpu.copy_gmem_to_smem(fresh_v_ref.at[(*nodes, part)], fresh_v_smem, ready)

    def fetch_split(split: jax.Array | int) -> None:
        stage = jax.lax.rem(split, stages) if stages > 1 else 0
        there = pl.ds(row_tile * WARPGROUP_ROWS, rows_there)
        source = partial_ref.at[batch, split, kv_head, there, part]
        to, ready = partial_smem.at[stage, pl.ds(0, rows_there)], partial_ready.at[stage]
        plgpu.copy_gmem_to_smem(source, to, ready)
        lse = partial_lse_ref.at[batch, split, kv_head, rows]
        plgpu.copy_gmem_to_smem(lse, lse_smem.at[stage], ready)

    for split in range(stages):
        pl.when(split < reached)(functools.partial(fetch_split, split))
    cached_step = _load(cached_step_ref.at[batch, rows], plgpu.Layout.WGMMA)
    fresh_step = _load(fresh_step_ref.at[batch, rows], plgpu.Layout.WGMMA)
    plgpu.barrier_wait(ready)

    # Slots beyond the length may hold NaN, and 0 NaN is NaN.
    block = _load(cached_v, plgpu.Layout.WGMMA, optimized=True)
    slot = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
    cached_v[...] = jnp.where(start + slot < length, block, jnp.zeros_like(block))
    plgpu.commit_smem()
    scores = [_products(q_smem, keys) * scale for keys in (cached_k, fresh_k_smem)]
    steps = [cached_step, fresh_step]
    scores = [jnp.where(s >= 0, x, -jnp.inf) for s, x in zip(steps, scores, strict=True)]
    top = jnp.maximum(*(each.max(axis=1) for each in scores))
    weights = [jnp.exp2(x - jax.lax.broadcast_in_dim(top, x.shape, [0])) for x in scores]
    total = functools.reduce(
        jnp.add,
        [(x * WEIGHT_STEPS).astype(jnp.int32).astype(jnp.float32).sum(axis=1) for x in weights],
    )
    total *= 1.0 / WEIGHT_STEPS

    def alone(index: int, step: jax.Array | int) -> jax.Array:
        return jnp.where(steps[index] == step, weights[index], 0.0).astype(q_ref.dtype)

    def add_values(acc_ref: Any) -> jax.Array:
        for first in range(0, RECENT, _AT_ONCE):
            some = [alone(0, first + step) for step in range(_AT_ONCE)]
            for each in some:
                plgpu.wgmma(acc_ref, each, cached_v.at[pl.ds(0, FETCHED)])
            # The instructions read the weights from registers, which must not be filled anew.
            plgpu.wgmma_wait(0)
            jax.lax.optimization_barrier(some)

        @pl.loop(0, deepest + 1)
        def _(step: jax.Array) -> None:
            plgpu.wgmma(acc_ref, alone(1, step), fresh_v_smem)
            plgpu.wgmma_wait(0)

        return jax.lax.optimization_barrier(acc_ref[...])

    acc = pl.run_scoped(add_values, _ACC((WARPGROUP_ROWS, columns), jnp.float32))

    def merge(split: jax.Array, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        acc, top, total = state
        stage = jax.lax.rem(split, stages) if stages > 1 else 0
        plgpu.barrier_wait(partial_ready.at[stage])
        lse = _load(lse_smem.at[stage], plgpu.Layout.WGMMA.reduce(1)) * LOG2_E
        of_split = _load(partial_smem.at[stage], plgpu.Layout.WGMMA)
        new_top = jnp.maximum(top, lse)
        keep, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
        acc = acc * jax.lax.broadcast_in_dim(keep, acc.shape, [0])
        acc += of_split * jax.lax.broadcast_in_dim(weight, acc.shape, [0])
        total = total * keep + weight
        if stages < partial_ref.shape[1]:
            acc, total, new_top = jax.lax.optimization_barrier((acc, total, new_top))
            plgpu.commit_smem()  # All have read this place before it is filled again.
            following = functools.partial(fetch_split, split + stages)
            pl.when(split + stages < reached)(following)
        return acc, new_top, total

    acc, _, total = jax.lax.fori_loop(0, reached, merge, (acc, top, total))
    acc *= jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
    out_smem[...] = acc.astype(out_smem.dtype)
    plgpu.commit_smem()
    for place in range(WARPGROUP_ROWS // SEGMENT):

        @pl.when(row_tile * (WARPGROUP_ROWS // SEGMENT) + place < groups * of_a_head)
        def _(place: int = place) -> None:
            source = out_smem.at[pl.ds(place * SEGMENT, SEGMENT)]
            plgpu.copy_smem_to_gmem(source, out_ref.at[(*segment(place), part)])

    plgpu.wait_smem_to_gmem(0)


def _products(q_smem: Any, keys: Any) -> jax.Array:
    """Products of 64 queries with some keys."""

    def multiply(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, q_smem, keys.transpose((1, 0)))
        # The compiler sees no connection between the wait for a result and its registers.
        return jax.lax.optimization_barrier(ref[...])

    shape = (WARPGROUP_ROWS, keys.shape[0])
    return pl.run_scoped(multiply, _ACC(shape, jnp.float32))


def _load(ref: Any, layout: Any, optimized: bool = False) -> Any:
    """An array in registers. From jax 0.11 on, which these kernels need, load takes no index."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]
