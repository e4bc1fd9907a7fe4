"""Attention to the recent tokens of a path, and the merge with the prefix's splits, for Mosaic GPU.

:mod:`longspec_jax.ops.attention.path_kernels` says what it is for. A program has 64 packed rows of
a key/value head and some columns of their output. It holds the keys of all nodes. The value of a
position is added by a matmul in which a row meets no other number than 0.

The kernel has one warpgroup and little to compute, so that its time is that of the instructions of
one warp: whatever can be asked for with one copy is, and whatever does not depend on the row's
length is asked for before that is known.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.packing import LOG2_E
from longspec_jax.ops.attention.path import ALIGNED, FETCHED, RECENT
from longspec_jax.ops.attention.prefix_items import Bounds
from longspec_jax.ops.attention.widening import shared_codes, widen
from longspec_jax.ops.hardware import HOPPER, MULTIPROCESSORS, SHARED_BYTES, WARPGROUP_ROWS

COLUMNS = 16
"""Columns of the values that a program adds up; twice as many of a cache in 8 bits, which are
widened by 32, and where programs would be too many."""
CONTRACTED = 16
"""Keys or nodes of one matrix instruction."""
TO_MULTIPLES = np.float32(2.0**5)
"""Weights, which are at most 1, are rounded to multiples of 2^-18 by adding it: a float32 of this
size has no smaller ones. Its last bits then count them."""
_MOST_AT_ONCE = 16
"""Splits whose results are merged without a loop."""
_LEVELS = 8
"""Levels of a tree whose values are in memory at once, each among zeros; half of them where two
programs share a multiprocessor."""
_WINDOWS = WARPGROUP_ROWS // CONTRACTED
"""Recent values are in memory so many times, 16 at a time."""
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def attend_and_merge(
    where: Int[Array, "B fields"],
    limit: Int[Array, "B R"],
    depth: Int[Array, "B padded"],
    bias: Float[Array, "B R nodes"],
    q: Float[Array, "B K packed H"] | Float[Array, "B K T G H"],
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
      where: of every batch row, behind the bounds of the prefix kernel, the position of the first
        cached recent token, the row's length, the splits that it reaches, and the greatest depth of
        a node.
      limit: the first slot that each packed row sees here; the splits end before it.
      depth: of every node, whole warpgroups of rows; -1 behind them.
      bias: 0 for each node that a packed row sees; minus infinity for the others.
      q: packed queries, of one node or of single heads; or every head's by itself, as
        :func:`prefix_mosaic.launch` takes them.
      k: cached keys.
      v: cached values.
      fresh_k: the tree's keys.
      fresh_v: the tree's values.
      partial: the splits' results.
      partial_lse: their log-sum-exps.
      scale: factor on the scores, in base 2.
    """
    batch, nodes, width = q.shape[0], fresh_k.shape[1], q.shape[-1]
    kv_heads, tokens = k.shape[1], bias.shape[2]
    packed = q.ndim == 4
    groups = q.shape[2] // nodes if packed else q.shape[3]
    splits, rows = partial.shape[1], q.shape[2] if packed else groups * tokens
    programs = batch * kv_heads * pl.cdiv(rows, WARPGROUP_ROWS)
    narrow = k.dtype == CODES
    few = programs * width // COLUMNS <= MULTIPROCESSORS and not narrow
    columns = COLUMNS if few else 2 * COLUMNS

    def shared(*shape: int, bytes: int = 128, dtype: Any = q.dtype) -> Any:
        # By the types of newer jax these are abstract; they are not.
        size = bytes // jnp.dtype(dtype).itemsize
        tiling = plgpu.TilingTransform((8, size))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(bytes)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    crowded = programs * width // columns > MULTIPROCESSORS
    levels = min(nodes, _LEVELS // 2 if crowded else _LEVELS)
    held = 2 * (
        WARPGROUP_ROWS * width
        + (FETCHED + tokens) * width
        + ((2 + _WINDOWS) * WARPGROUP_ROWS + (1 + levels) * depth.shape[1]) * columns
    )
    room = SHARED_BYTES[HOPPER] - held - 4 * WARPGROUP_ROWS * (splits + _MOST_AT_ONCE) - 2048
    codes = {}
    if narrow:
        codes = dict(
            k_codes=shared_codes(FETCHED, width), v_codes=shared_codes(WARPGROUP_ROWS, columns)
        )
        room -= FETCHED * width + WARPGROUP_ROWS * columns
    at_once = min(splits, _MOST_AT_ONCE, room // (4 * WARPGROUP_ROWS * columns))
    segment = math.gcd(tokens, WARPGROUP_ROWS)
    kernel = plgpu.kernel(
        functools.partial(_kernel, scale=scale, segment=segment),
        out_type=jax.ShapeDtypeStruct((batch, nodes, kv_heads * groups, width), q.dtype),
        scratch_types=dict(
            q=shared(WARPGROUP_ROWS, width),
            cached_k=shared(FETCHED, width),
            # A matmul contracts whole swizzles.
            cached_v=shared(WARPGROUP_ROWS, columns, bytes=2 * CONTRACTED),
            cached_alone=shared(_WINDOWS, WARPGROUP_ROWS, columns, bytes=2 * CONTRACTED),
            fresh_k=shared(tokens, width),
            fresh_v=shared(depth.shape[1], columns, bytes=2 * CONTRACTED),
            fresh_alone=shared(levels, depth.shape[1], columns, bytes=2 * CONTRACTED),
            partial=shared(at_once, WARPGROUP_ROWS, columns, bytes=4 * columns, dtype=jnp.float32),
            lse=plgpu.SMEM((pl.cdiv(splits, at_once) * at_once, WARPGROUP_ROWS), jnp.float32),
            out=plgpu.SMEM((WARPGROUP_ROWS, columns), q.dtype),
            ready=plgpu.Barrier(
                num_arrivals=3 + _WINDOWS + (1 if packed else WARPGROUP_ROWS // segment)
            ),
            lse_ready=plgpu.Barrier(),
            partial_ready=plgpu.Barrier(),
            **codes,
        ),
        grid=(width // columns, pl.cdiv(rows, WARPGROUP_ROWS), kv_heads, batch),
        grid_names=("part", "row_tile", "kv_head", "batch"),
        compiler_params=plgpu.CompilerParams(
            # One warpgroup: what it shares is committed by name below.
            approx_math=True,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
        ),
        kernel_name="recent_tokens",
    )
    # The copy engine knows five dimensions, with those of swizzled memory: a program's columns are
    # one index.
    partial = partial.reshape(*partial.shape[:4], width // columns, columns)
    return kernel(where, limit, depth, bias, q, k, v, fresh_k, fresh_v, partial, partial_lse)


def _kernel(*refs: Any, scale: float, segment: int, **memory: Any) -> None:
    """One program: 64 packed rows of a key/value head, some columns of their output."""
    operands = _Operands(*refs)
    batch = jax.lax.axis_index("batch")
    cache_row = operands.where[batch, Bounds._fields.index("cache_row")]
    first, length, reached, deepest = (
        operands.where[batch, len(Bounds._fields) + at] for at in range(4)
    )
    program = _Program(
        refs=operands,
        memory=_Memory(**memory),
        scale=scale,
        segment_tokens=segment,
        batch=batch,
        kv_head=jax.lax.axis_index("kv_head"),
        row_tile=jax.lax.axis_index("row_tile"),
        part=jax.lax.axis_index("part"),
        first=first,
        length=length,
        reached=reached,
        deepest=deepest,
        cache_row=cache_row,
    )
    row = plgpu.Layout.WGMMA.reduce(1)
    limit = _load(operands.limit.at[batch, program.rows], row)
    bias = _load(operands.bias.at[batch, program.rows], plgpu.Layout.WGMMA)
    depth = _load(operands.depth.at[batch], row)
    program.fetch()
    weights, top, total = program.softmax(limit, bias)
    acc = pl.run_scoped(
        functools.partial(program.add_values, weights, depth),
        _ACC((WARPGROUP_ROWS, program.columns), jnp.float32),
    )
    acc, total = program.merge(acc, top, total)
    program.write(acc * jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0]))


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Operands and result in device memory, as :func:`attend_and_merge` names them."""

    where: Any
    limit: Any
    depth: Any
    bias: Any
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

    ``cached_v`` holds the recent values in windows of 16, each two times. Each place of
    ``cached_alone`` and ``fresh_alone`` has the values of one step, among zeros. ``partial`` has
    places for all splits or, where there are many, for some at a time. ``ready`` says that
    everything has come but the splits' results and log-sum-exps. Of a cache in 8 bits there are
    codes, too.
    """

    q: Any
    cached_k: Any
    cached_v: Any
    cached_alone: Any
    fresh_k: Any
    fresh_v: Any
    fresh_alone: Any
    partial: Any
    lse: Any
    out: Any
    ready: Any
    lse_ready: Any
    partial_ready: Any
    k_codes: Any = None
    v_codes: Any = None


_Pair = tuple[Any, Any]
"""Of the cached recent tokens, and of the tree's nodes."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program; ``where`` of its batch row, field by field."""

    refs: _Operands
    memory: _Memory
    scale: float
    segment_tokens: int
    """Tokens of a head whose packed rows lie side by side in this and any other program."""
    batch: jax.Array
    kv_head: jax.Array
    row_tile: jax.Array
    part: jax.Array
    first: jax.Array
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
    def offset(self) -> jax.Array:
        """Fetched cached tokens before the first recent one."""
        return jax.lax.rem(self.first, ALIGNED)

    @property
    def segments(self) -> int:
        """Segments of a key/value head's packed rows."""
        return self.groups * (self.tokens // self.segment_tokens)

    @property
    def tokens(self) -> int:
        """The tree's nodes, whole matrix instructions."""
        return self.refs.bias.shape[2]

    @property
    def groups(self) -> int:
        """Query heads of a key/value head."""
        return self.refs.out.shape[2] // self.refs.k.shape[1]

    def segment(self, place: int) -> tuple[Any, Any]:
        """Tokens and group of a segment's packed rows; of rows there are not, some there are."""
        of_a_head = self.tokens // self.segment_tokens
        number = self.row_tile * (WARPGROUP_ROWS // self.segment_tokens) + place
        number = jnp.minimum(number, self.segments - 1)
        first = jax.lax.rem(number, of_a_head) * self.segment_tokens
        return pl.ds(first, self.segment_tokens), jax.lax.div(number, of_a_head)

    def places(self) -> list[tuple[int, Any]]:
        """Every segment of this program, with its rows."""
        size = self.segment_tokens
        return [(at, pl.ds(at * size, size)) for at in range(WARPGROUP_ROWS // size)]

    def fetch(self) -> None:
        """Ask for everything, and for as many splits as there are places."""
        refs, memory, ready = self.refs, self.memory, self.memory.ready
        if len(refs.q.shape) == 4:
            packed = refs.q.at[self.batch, self.kv_head, self.rows]
            plgpu.copy_gmem_to_smem(packed, memory.q, ready)
        else:
            for place, rows in self.places():
                source = refs.q.at[self.batch, self.kv_head, *self.segment(place)]
                plgpu.copy_gmem_to_smem(source, memory.q.at[rows], ready)
        # The copy engine fills with zeros what is beyond the tree, the cache or the splits. The
        # index is not known beforehand, or Pallas would refuse.
        tokens = pl.ds(pl.multiple_of(0 * self.part, CONTRACTED), self.tokens)
        nodes = self.batch, tokens, self.kv_head
        plgpu.copy_gmem_to_smem(refs.fresh_k.at[nodes], memory.fresh_k, ready)
        values = memory.fresh_v.at[pl.ds(0, self.tokens)]
        plgpu.copy_gmem_to_smem(refs.fresh_v.at[(*nodes, self.its_columns)], values, ready)
        splits = pl.ds(0, memory.lse.shape[0])
        lse = refs.partial_lse.at[self.batch, splits, self.kv_head, self.rows]
        plgpu.copy_gmem_to_smem(lse, memory.lse, memory.lse_ready)
        self.fetch_splits(0 * self.part)
        start = pl.multiple_of(self.first - self.offset, ALIGNED)
        recent = self.cache_row, self.kv_head, pl.ds(start, FETCHED)
        keys, values = memory.cached_k, memory.cached_v
        if memory.k_codes is not None:
            keys, values = memory.k_codes, memory.v_codes
        plgpu.copy_gmem_to_smem(refs.k.at[recent], keys, ready)
        for number in range(_WINDOWS):
            window = pl.ds(start + number // 2 * ALIGNED, CONTRACTED)
            source = refs.v.at[self.cache_row, self.kv_head, window, self.its_columns]
            to = values.at[pl.ds(number * CONTRACTED, CONTRACTED)]
            plgpu.copy_gmem_to_smem(source, to, ready)

    def fetch_splits(self, first: jax.Array) -> None:
        """Ask for the results of some splits, whether they are reached or not."""
        refs, memory = self.refs, self.memory
        rows, splits = self.rows, pl.ds(first, memory.partial.shape[0])
        source = refs.partial.at[self.batch, splits, self.kv_head, rows, self.part]
        plgpu.copy_gmem_to_smem(source, memory.partial, memory.partial_ready)

    def softmax(self, limit: Any, bias: Any) -> tuple[_Pair, Any, Any]:
        """The weights of all keys, their maximum, and their exact sum."""
        memory = self.memory
        plgpu.barrier_wait(memory.ready)
        if memory.k_codes is not None:
            widen(memory.k_codes, memory.cached_k)
            widen(memory.v_codes, memory.cached_v, swizzle=2 * CONTRACTED)
            plgpu.commit_smem()

        def products(cached_ref: Any, fresh_ref: Any) -> _Pair:
            plgpu.wgmma(cached_ref, memory.q, memory.cached_k.transpose((1, 0)))
            plgpu.wgmma(fresh_ref, memory.q, memory.fresh_k.transpose((1, 0)))
            self.set_cached_alone()
            # The compiler sees no connection between the wait for a result and its registers.
            return jax.lax.optimization_barrier((cached_ref[...], fresh_ref[...]))

        keys = FETCHED, self.tokens
        cached, fresh = pl.run_scoped(
            products, *(_ACC((WARPGROUP_ROWS, count), jnp.float32) for count in keys)
        )
        slot = plgpu.broadcasted_iota(jnp.int32, cached.shape, 1, layout=plgpu.Layout.WGMMA)
        slot += self.first - self.offset
        seen = slot >= jax.lax.broadcast_in_dim(limit, cached.shape, [0])
        seen = jnp.logical_and(seen, slot < self.length)
        scores = jnp.where(seen, cached, -jnp.inf), fresh + bias
        top = jnp.maximum(*(each.max(axis=1) for each in scores)) * self.scale
        cached, fresh = (
            jnp.exp2(each * self.scale - jax.lax.broadcast_in_dim(top, each.shape, [0]))
            for each in scores
        )
        counts = (
            jax.lax.bitcast_convert_type(each + TO_MULTIPLES, jnp.int32).sum(axis=1)
            for each in (cached, fresh)
        )
        # Integers wrap around.
        none = sum(keys) * int(TO_MULTIPLES.view(np.int32)) % 2**32
        count = jnp.add(*counts) - np.uint32(none).view(np.int32)
        total = count.astype(jnp.float32) * np.spacing(TO_MULTIPLES)
        return (cached, fresh), top, total

    def set_cached_alone(self) -> None:
        """Write every recent value among zeros.

        Recent token ``step`` is row ``offset + step`` of what was fetched: one of 16 rows from the
        first on for the first 8 steps, and from the eighth on for the others. Of its window's two
        copies the first one is for the first 4 steps. Memory beyond the length may be NaN, and 0
        NaN is NaN.
        """
        memory = self.memory
        block = _load(memory.cached_v, plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
        window, row = jax.lax.div(row, CONTRACTED), jax.lax.rem(row, CONTRACTED)
        there = row + jax.lax.div(window, 2) * ALIGNED < self.length - (self.first - self.offset)
        block = jnp.where(there, block, jnp.zeros_like(block))
        step = row - self.offset - jax.lax.rem(window, 2) * _WINDOWS
        for number in range(_WINDOWS):
            memory.cached_alone.at[number][...] = _kept(block, step == number)
        plgpu.commit_smem()

    def add_values(self, weights: _Pair, depth: Any, acc_ref: Any) -> jax.Array:
        """The weighted values, added in the order of their positions.

        The weights stay in registers, and each step has its values among zeros in memory.
        """
        memory = self.memory
        cached, fresh = (each.astype(self.refs.q.dtype) for each in weights)
        near = [cached[:, first : first + CONTRACTED] for first in (0, ALIGNED)]
        for step in range(RECENT):
            window, number = divmod(step, _WINDOWS)
            rows = pl.ds(window * CONTRACTED, CONTRACTED)
            plgpu.wgmma(acc_ref, near[window // 2], memory.cached_alone.at[number, rows])
        if self.refs.out.shape[1] == 1:
            plgpu.wgmma(acc_ref, fresh, memory.fresh_v.at[pl.ds(0, self.tokens)])
        plgpu.wgmma_wait(0)
        jax.lax.optimization_barrier((near, fresh))
        if self.refs.out.shape[1] > 1:
            self.add_levels(fresh, depth, acc_ref)
        return jax.lax.optimization_barrier(acc_ref[...])

    def add_levels(self, fresh: jax.Array, depth: Any, acc_ref: Any) -> None:
        """Add the nodes' values, level by level. A level behind the last one adds zeros."""
        memory = self.memory
        block = _load(memory.fresh_v, plgpu.Layout.WGMMA)
        levels = memory.fresh_alone.shape[0]

        @pl.loop(0, jax.lax.div(self.deepest, levels) + 1)
        def _(turn: jax.Array) -> None:
            for number in range(levels):
                its = jax.lax.broadcast_in_dim(depth == turn * levels + number, block.shape, [0])
                memory.fresh_alone.at[number][...] = _kept(block, its)
            plgpu.commit_smem()
            for number in range(levels):
                values = memory.fresh_alone.at[number, pl.ds(0, self.tokens)]
                plgpu.wgmma(acc_ref, fresh, values)
            plgpu.wgmma_wait(0)
            jax.lax.optimization_barrier(fresh)
            plgpu.commit_smem()  # All have read the places before they are filled again.

    def merge(self, acc: Any, top: Any, total: Any) -> tuple[Any, Any]:
        """The values with those of all splits, and the sum of all weights.

        One maximum serves all, so that no split has to wait for the one before.
        """
        memory, row = self.memory, plgpu.Layout.WGMMA.reduce(1)
        splits, at_once = memory.lse.shape[0], memory.partial.shape[0]
        plgpu.barrier_wait(memory.lse_ready)
        self.clear(memory.lse, self.reached, -jnp.inf, row)

        def log_sum(split: jax.Array | int) -> Any:
            """In base 2."""
            return _load(memory.lse.at[split], row) * LOG2_E

        log_sums = [log_sum(split) for split in range(splits)]
        of_recent = top
        for each in log_sums:
            top = jnp.maximum(top, each)
        keep = jnp.exp2(of_recent - top)
        # Whatever is fused with what follows, this product is rounded by itself.
        acc = jax.lax.optimization_barrier(acc * jax.lax.broadcast_in_dim(keep, acc.shape, [0]))

        def some(log_sums: list[Any], first: jax.Array | int, state: _Pair) -> _Pair:
            acc, total = state
            plgpu.barrier_wait(memory.partial_ready)
            self.clear(memory.partial, self.reached - first, 0.0, plgpu.Layout.WGMMA)
            for at, each in enumerate(log_sums):
                weight = jnp.exp2(each - top)
                values = _load(memory.partial.at[at], plgpu.Layout.WGMMA)
                acc += values * jax.lax.broadcast_in_dim(weight, acc.shape, [0])
                total += weight
            return acc, total

        state = some(log_sums[:at_once], 0, (acc, total * keep))
        if at_once == splits:
            return state

        def following(turn: jax.Array, state: _Pair) -> _Pair:
            state, first = jax.lax.optimization_barrier(state), turn * at_once
            plgpu.commit_smem()  # All have read the places before they are filled again.
            self.fetch_splits(first)
            return some([log_sum(first + at) for at in range(at_once)], first, state)

        turns = jax.lax.div(self.reached + at_once - 1, at_once)
        return jax.lax.fori_loop(1, turns, following, state)

    def clear(self, memory: Any, first: jax.Array, value: float, layout: Any) -> None:
        """Fill the places from ``first`` on, of splits that are not reached, where may be NaN."""

        @pl.loop(first, memory.shape[0])
        def _(place: jax.Array) -> None:
            filled = jnp.full(memory.shape[1:], value, jnp.float32)
            memory.at[place][...] = plgpu.layout_cast(filled, layout)
            plgpu.commit_smem()

    def write(self, out: jax.Array) -> None:
        """Write the rows that there are."""
        self.memory.out[...] = out.astype(self.memory.out.dtype)
        plgpu.commit_smem()
        if self.refs.out.shape[1] == 1:
            heads = pl.ds(self.kv_head * self.groups, self.groups)
            source = self.memory.out.at[pl.ds(0, self.groups)]
            to = self.refs.out.at[self.batch, 0, heads, self.its_columns]
            plgpu.copy_smem_to_gmem(source, to)
        else:
            for place, rows in self.places():
                self.write_segment(place, rows)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write_segment(self, place: int, rows: Any) -> None:
        """Write the rows of a segment, if there is one."""
        per_tile = WARPGROUP_ROWS // self.segment_tokens

        @pl.when(self.row_tile * per_tile + place < self.segments)
        def _() -> None:
            tokens, group = self.segment(place)
            head = self.kv_head * self.groups + group
            to = self.refs.out.at[self.batch, tokens, head, self.its_columns]
            plgpu.copy_smem_to_gmem(self.memory.out.at[rows], to)


def _kept(block: jax.Array, rows: jax.Array) -> jax.Array:
    """These rows of some numbers, and zeros. A product takes one instruction for two numbers."""
    return block * rows.astype(block.dtype)


def _load(ref: Any, layout: Any, optimized: bool = False) -> Any:
    """An array in registers. From jax 0.11 on, which these kernels need, load takes no index."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]
