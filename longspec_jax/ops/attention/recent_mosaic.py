"""Attention to the recent tokens of a path, and the merge with the prefix's splits, for Mosaic GPU.

:mod:`longspec_jax.ops.attention.path_kernels` says what it is for. A program has 64 packed rows of
a key/value head and some columns of their output. It holds the keys of all nodes. The value of a
position is added by a matmul in which every row has one weight that is not zero.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.packing import LOG2_E
from longspec_jax.ops.attention.path import ALIGNED, FETCHED, RECENT, SEGMENT
from longspec_jax.ops.attention.widening import shared_codes, widen
from longspec_jax.ops.hardware import HOPPER, SHARED_BYTES, WARPGROUP_ROWS

COLUMNS = 64
"""Columns of the values that one program of the recent tokens' kernel adds up."""
WEIGHT_STEPS = 2.0**18
"""Weights of recent tokens are rounded to multiples of its inverse for their sum."""
_SEGMENTS = WARPGROUP_ROWS // SEGMENT
"""Segments of a program's rows."""
_AT_ONCE = 8
"""Steps whose weights are in registers at once."""
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def attend_and_merge(
    where: Int[Array, "B 5"],
    cached_step: Int[Array, "B R cached"],
    fresh_step: Int[Array, "B R segments"],
    q: Float[Array, "B N T H"],
    k: CacheSlots,
    v: CacheSlots,
    fresh_k: Float[Array, "B T K H"],
    fresh_v: Float[Array, "B T K H"],
    partial: Float[Array, "B P K some H"],
    partial_lse: Float[Array, "B P K R"],
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attend to the recent tokens and merge with the splits, in ascending order.

    Args:
      where: of every batch row the first cached recent slot, its length, the splits that it
        reaches, the greatest depth of a node, and its row of the cache.
      cached_step: in which step the value of a cached recent token is added; -1 if it is not seen.
      fresh_step: the same of the tree's nodes, which come after the cached ones: their depth.
      q: queries by head.
      k: cached keys.
      v: cached values.
      fresh_k: the tree's keys.
      fresh_v: the tree's values.
      partial: the splits' results.
      partial_lse: their log-sum-exps.
      scale: factor on the scores, in base 2.
    """
    batch, heads, nodes, width = q.shape
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
    codes = {}
    if k.dtype == CODES:
        codes = dict(k_codes=shared_codes(FETCHED, width), v_codes=shared_codes(FETCHED, columns))
        room -= FETCHED * (width + columns)
    stages = min(splits, room // (4 * WARPGROUP_ROWS * (columns + 1)))
    kernel = plgpu.kernel(
        functools.partial(_kernel, scale=scale, stages=stages),
        out_type=jax.ShapeDtypeStruct((batch, nodes, heads, width), q.dtype),
        scratch_types=dict(
            q=shared(WARPGROUP_ROWS, width),
            cached_k=shared(FETCHED, width),
            # As high as an instruction, which is how it is read to silence slots. A matmul
            # contracts whole swizzles: 32 cached tokens, and 16 of the tree.
            cached_v=shared(WARPGROUP_ROWS, columns, bytes=64),
            fresh_k=shared(tokens, width),
            fresh_v=shared(tokens, columns, bytes=32),
            partial=plgpu.SMEM((stages, WARPGROUP_ROWS, columns), jnp.float32),
            lse=plgpu.SMEM((stages, WARPGROUP_ROWS), jnp.float32),
            out=plgpu.SMEM((WARPGROUP_ROWS, columns), q.dtype),
            ready=plgpu.Barrier(num_arrivals=_SEGMENTS + 4),
            partial_ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            **codes,
        ),
        grid=(width // columns, row_tiles, kv_heads, batch),
        grid_names=("part", "row_tile", "kv_head", "batch"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="recent_tokens",
    )
    return kernel(where, cached_step, fresh_step, q, k, v, fresh_k, fresh_v, partial, partial_lse)


def _kernel(*refs: Any, scale: float, stages: int, **memory: Any) -> None:
    """One program: 64 packed rows of a key/value head, some columns of their output."""
    operands = _Operands(*refs)
    batch = jax.lax.axis_index("batch")
    program = _Program(
        refs=operands,
        memory=_Memory(**memory),
        scale=scale,
        stages=stages,
        batch=batch,
        kv_head=jax.lax.axis_index("kv_head"),
        row_tile=jax.lax.axis_index("row_tile"),
        part=jax.lax.axis_index("part"),
        start=operands.where[batch, 0],
        length=operands.where[batch, 1],
        reached=operands.where[batch, 2],
        deepest=operands.where[batch, 3],
        cache_row=operands.where[batch, 4],
    )
    program.fetch()
    steps = program.steps()
    weights, top, total = program.softmax(steps)
    acc = pl.run_scoped(
        functools.partial(program.add_values, steps, weights),
        _ACC((WARPGROUP_ROWS, program.columns), jnp.float32),
    )
    acc, _, total = jax.lax.fori_loop(0, program.reached, program.merge, (acc, top, total))
    program.write(acc * jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0]))


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Operands and result in device memory, as :func:`attend_and_merge` names them."""

    where: Any
    cached_step: Any
    fresh_step: Any
    q: Any
    k: Any
    v: Any
    fresh_k: Any
    fresh_v: Any
    partial: Any
    partial_lse: Any
    out: Any


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory of a program.

    Splits' results go through a ring of places. ``ready`` says that all but them has come. Of a
    cache in 8 bits there are codes, too.
    """

    q: Any
    cached_k: Any
    cached_v: Any
    fresh_k: Any
    fresh_v: Any
    partial: Any
    lse: Any
    out: Any
    ready: Any
    partial_ready: Any
    k_codes: Any = None
    v_codes: Any = None


_State = tuple[Any, Any, Any]
"""Unnormalised output, maximum and sum of the weights of a program's rows, in base 2."""
_Pair = tuple[Any, Any]
"""Of the cached recent tokens, and of the tree's nodes."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program; ``where`` of its batch row, field by field."""

    refs: _Operands
    memory: _Memory
    scale: float
    stages: int
    batch: jax.Array
    kv_head: jax.Array
    row_tile: jax.Array
    part: jax.Array
    start: jax.Array
    length: jax.Array
    reached: jax.Array
    deepest: jax.Array
    cache_row: jax.Array

    @property
    def columns(self) -> int:
        """Columns of the output that this program adds up."""
        return self.memory.out.shape[1]

    @property
    def its_columns(self) -> Any:
        """Which ones."""
        return pl.ds(self.part * self.columns, self.columns)

    @property
    def rows(self) -> Any:
        """This program's packed rows."""
        return pl.ds(self.row_tile * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @property
    def segments(self) -> int:
        """Segments of a key/value head's packed rows."""
        tokens, kv_heads = self.refs.fresh_step.shape[2], self.refs.k.shape[1]
        return self.refs.q.shape[1] // kv_heads * (tokens // SEGMENT)

    def segment(self, place: int) -> tuple[Any, Any]:
        """Head and tokens of 16 packed rows; of rows there are not, some there are."""
        of_a_head = self.refs.fresh_step.shape[2] // SEGMENT
        groups = self.segments // of_a_head
        number = jnp.minimum(self.row_tile * _SEGMENTS + place, self.segments - 1)
        head = self.kv_head * groups + jax.lax.div(number, of_a_head)
        return head, pl.ds(jax.lax.rem(number, of_a_head) * SEGMENT, SEGMENT)

    def fetch(self) -> None:
        """Ask for everything, and for as many splits as there are places."""
        refs, memory, ready = self.refs, self.memory, self.memory.ready
        for place in range(_SEGMENTS):
            to = memory.q.at[pl.ds(place * SEGMENT, SEGMENT)]
            plgpu.copy_gmem_to_smem(refs.q.at[self.batch, *self.segment(place)], to, ready)
        recent = self.cache_row, self.kv_head, pl.ds(pl.multiple_of(self.start, ALIGNED), FETCHED)
        keys, values = memory.cached_k, memory.cached_v.at[pl.ds(0, FETCHED)]
        if memory.k_codes is not None:
            keys, values = memory.k_codes, memory.v_codes
        plgpu.copy_gmem_to_smem(refs.k.at[recent], keys, ready)
        plgpu.copy_gmem_to_smem(refs.v.at[(*recent, self.its_columns)], values, ready)
        # The copy engine fills with zeros what is beyond the tree. The index is not known
        # beforehand, or Pallas would refuse.
        tokens = pl.ds(pl.multiple_of(0 * self.start, SEGMENT), refs.fresh_step.shape[2])
        nodes = self.batch, tokens, self.kv_head
        plgpu.copy_gmem_to_smem(refs.fresh_k.at[nodes], memory.fresh_k, ready)
        plgpu.copy_gmem_to_smem(refs.fresh_v.at[(*nodes, self.its_columns)], memory.fresh_v, ready)
        for split in range(self.stages):
            pl.when(split < self.reached)(functools.partial(self.fetch_split, split))

    def fetch_split(self, split: jax.Array | int) -> None:
        """Ask for the results of a split."""
        refs, stage = self.refs, self.stage(split)
        ready = self.memory.partial_ready.at[stage]
        count = min(refs.partial.shape[3], WARPGROUP_ROWS)
        there = pl.ds(self.row_tile * WARPGROUP_ROWS, count)
        source = refs.partial.at[self.batch, split, self.kv_head, there, self.its_columns]
        to = self.memory.partial.at[stage, pl.ds(0, count)]
        plgpu.copy_gmem_to_smem(source, to, ready)
        lse = refs.partial_lse.at[self.batch, split, self.kv_head, self.rows]
        plgpu.copy_gmem_to_smem(lse, self.memory.lse.at[stage], ready)

    def stage(self, split: jax.Array | int) -> jax.Array | int:
        """The place of a split in the ring."""
        return jax.lax.rem(split, self.stages) if self.stages > 1 else 0

    def steps(self) -> _Pair:
        """In which step the value of each key is added to each row."""
        refs = self.refs.cached_step, self.refs.fresh_step
        cached, fresh = (_load(ref.at[self.batch, self.rows], plgpu.Layout.WGMMA) for ref in refs)
        return cached, fresh

    def softmax(self, steps: _Pair) -> tuple[_Pair, Any, Any]:
        """The weights of all keys, their maximum, and their exact sum."""
        memory = self.memory
        plgpu.barrier_wait(memory.ready)
        if memory.k_codes is not None:
            widen(memory.k_codes, memory.cached_k)
            widen(memory.v_codes, memory.cached_v.at[pl.ds(0, FETCHED)], swizzle=64)
        # Slots beyond the length may hold NaN, and 0 NaN is NaN.
        block = _load(memory.cached_v, plgpu.Layout.WGMMA, optimized=True)
        slot = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
        seen = self.start + slot < self.length
        memory.cached_v[...] = jnp.where(seen, block, jnp.zeros_like(block))
        plgpu.commit_smem()
        scores = [
            jnp.where(step >= 0, _products(memory.q, keys) * self.scale, -jnp.inf)
            for step, keys in zip(steps, (memory.cached_k, memory.fresh_k), strict=True)
        ]
        top = jnp.maximum(*(each.max(axis=1) for each in scores))
        cached, fresh = (
            jnp.exp2(each - jax.lax.broadcast_in_dim(top, each.shape, [0])) for each in scores
        )
        exact = (
            (each * WEIGHT_STEPS).astype(jnp.int32).astype(jnp.float32).sum(axis=1)
            for each in (cached, fresh)
        )
        return (cached, fresh), top, jnp.add(*exact) * (1.0 / WEIGHT_STEPS)

    def add_values(self, steps: _Pair, weights: _Pair, acc_ref: Any) -> jax.Array:
        """The weighted values, added in the order of their positions."""
        memory = self.memory

        def alone(index: int, step: jax.Array | int) -> jax.Array:
            """Of every row the weight that this step adds, among zeros."""
            chosen = jnp.where(steps[index] == step, weights[index], 0.0)
            return chosen.astype(self.refs.q.dtype)

        for first in range(0, RECENT, _AT_ONCE):
            some = [alone(0, first + step) for step in range(_AT_ONCE)]
            for each in some:
                plgpu.wgmma(acc_ref, each, memory.cached_v.at[pl.ds(0, FETCHED)])
            # The instructions read the weights from registers, which must not be filled anew.
            plgpu.wgmma_wait(0)
            jax.lax.optimization_barrier(some)

        @pl.loop(0, self.deepest + 1)
        def _(step: jax.Array) -> None:
            plgpu.wgmma(acc_ref, alone(1, step), memory.fresh_v)
            plgpu.wgmma_wait(0)

        return jax.lax.optimization_barrier(acc_ref[...])

    def merge(self, split: jax.Array, state: _State) -> _State:
        """The state with one more split."""
        (acc, top, total), stage = state, self.stage(split)
        plgpu.barrier_wait(self.memory.partial_ready.at[stage])
        lse = _load(self.memory.lse.at[stage], plgpu.Layout.WGMMA.reduce(1)) * LOG2_E
        of_split = _load(self.memory.partial.at[stage], plgpu.Layout.WGMMA)
        new_top = jnp.maximum(top, lse)
        keep, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
        acc = acc * jax.lax.broadcast_in_dim(keep, acc.shape, [0])
        acc += of_split * jax.lax.broadcast_in_dim(weight, acc.shape, [0])
        total = total * keep + weight
        if self.stages < self.refs.partial.shape[1]:
            acc, total, new_top = jax.lax.optimization_barrier((acc, total, new_top))
            plgpu.commit_smem()  # All have read this place before it is filled again.
            following = split + self.stages
            pl.when(following < self.reached)(functools.partial(self.fetch_split, following))
        return acc, new_top, total

    def write(self, out: jax.Array) -> None:
        """Write the rows that there are."""
        self.memory.out[...] = out.astype(self.memory.out.dtype)
        plgpu.commit_smem()
        for place in range(_SEGMENTS):

            @pl.when(self.row_tile * _SEGMENTS + place < self.segments)
            def _(place: int = place) -> None:
                source = self.memory.out.at[pl.ds(place * SEGMENT, SEGMENT)]
                head, tokens = self.segment(place)
                to = self.refs.out.at[self.batch, tokens, head, self.its_columns]
                plgpu.copy_smem_to_gmem(source, to)

        plgpu.wait_smem_to_gmem(0)


def _products(q: Any, keys: Any) -> jax.Array:
    """Products of 64 queries with some keys."""

    def multiply(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, q, keys.transpose((1, 0)))
        # The compiler sees no connection between the wait for a result and its registers.
        return jax.lax.optimization_barrier(ref[...])

    shape = (WARPGROUP_ROWS, keys.shape[0])
    return pl.run_scoped(multiply, _ACC(shape, jnp.float32))


def _load(ref: Any, layout: Any, optimized: bool = False) -> Any:
    """An array in registers. From jax 0.11 on, which these kernels need, load takes no index."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]
