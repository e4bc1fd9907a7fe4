"""A program of the recent tokens' kernel, :mod:`longspec_jax.ops.attention.path_kernels`.

One warpgroup has little to compute, so that its time is that of the instructions of one warp:
whatever can be asked for with one copy is, and whatever does not depend on the row's length is
asked for before that is known.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Ref
from longspec_jax.ops.attention.packing import LOG2_E
from longspec_jax.ops.attention.path import ALIGNED, FETCHED, RECENT
from longspec_jax.ops.attention.widening import widen
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.mosaic import ACC, capped, load, product, row_product

CONTRACTED = 16
"""Keys or nodes of one matrix instruction."""
WINDOWS = WARPGROUP_ROWS // CONTRACTED
"""Windows of 16 recent values in shared memory: two, each of them twice."""
TO_MULTIPLES = np.float32(2.0**5)
"""Weights, which are at most 1, are rounded to multiples of 2^-18 by adding it: a float32 of this
size has no smaller ones. Its last bits then count them."""


@dataclasses.dataclass(frozen=True)
class RecentOperands:
    """Result and operands in device memory, as :mod:`path_kernels` names them."""

    out: Ref
    where: Ref
    limit: Ref
    depth: Ref
    bias: Ref
    q: Ref
    k: Ref
    v: Ref
    fresh_k: Ref
    fresh_v: Ref
    partial: Ref
    partial_lse: Ref
    sinks: Ref = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Shared memory of a program.

    ``cached_v`` holds the recent values in windows of 16, each two times. Each place of
    ``cached_alone`` and ``fresh_alone`` has the values of one step, among zeros. ``partial`` has
    places for all splits or, where there are many, for some at a time. ``ready`` says that
    everything has come but the splits' results and log-sum-exps. Of a cache in 8 bits there are
    codes, too.
    """

    q: Ref
    cached_k: Ref
    cached_v: Ref
    cached_alone: Ref
    fresh_k: Ref
    fresh_v: Ref
    fresh_alone: Ref
    partial: Ref
    lse: Ref
    out: Ref
    ready: Ref
    lse_ready: Ref
    partial_ready: Ref
    k_codes: Ref = None
    v_codes: Ref = None


_Pair = tuple[Any, Any]
"""Of the cached recent tokens, and of the tree's nodes."""


@dataclasses.dataclass(frozen=True)
class RecentProgram:
    """A program; ``where`` of its batch row, field by field."""

    refs: RecentOperands
    memory: Memory
    scale: float
    cap: float | None
    ring: bool
    """Whether the cached slots are a ring, of whole groups of 8."""
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
        splits = pl.ds(0 * self.part, memory.lse.shape[0])
        lse = refs.partial_lse.at[self.batch, splits, self.kv_head, self.rows]
        plgpu.copy_gmem_to_smem(lse, memory.lse, memory.lse_ready)
        self.fetch_splits(0 * self.part)
        if self.ring:
            self.fetch_recent_of_ring()
            return
        start = pl.multiple_of(self.first - self.offset, ALIGNED)
        recent = self.cache_row, self.kv_head, pl.ds(start, FETCHED)
        keys, values = memory.cached_k, memory.cached_v
        if memory.k_codes is not None:
            keys, values = memory.k_codes, memory.v_codes
        plgpu.copy_gmem_to_smem(refs.k.at[recent], keys, ready)
        for number in range(WINDOWS):
            window = pl.ds(start + number // 2 * ALIGNED, CONTRACTED)
            source = refs.v.at[self.cache_row, self.kv_head, window, self.its_columns]
            to = values.at[pl.ds(number * CONTRACTED, CONTRACTED)]
            plgpu.copy_gmem_to_smem(source, to, ready)

    def fetch_recent_of_ring(self) -> None:
        """Ask for the recent cached tokens by groups of 8, none of which lies across the seam."""
        refs, memory = self.refs, self.memory
        keys, values = memory.cached_k, memory.cached_v
        if memory.k_codes is not None:
            keys, values = memory.k_codes, memory.v_codes

        def copy(
            source: Ref, group: int, to: Ref, place: int, columns: tuple[Any, ...] = ()
        ) -> None:
            position = self.first - self.offset + group * ALIGNED
            slot = pl.multiple_of(jax.lax.rem(position, source.shape[2]), ALIGNED)
            at = self.cache_row, self.kv_head, pl.ds(slot, ALIGNED), *columns
            part = to.at[pl.ds(place * ALIGNED, ALIGNED)]
            plgpu.copy_gmem_to_smem(source.at[at], part, memory.ready)

        for group in range(FETCHED // ALIGNED):
            copy(refs.k, group, keys, group)
        for number in range(WINDOWS):
            for half in range(CONTRACTED // ALIGNED):
                place = number * CONTRACTED // ALIGNED + half
                copy(refs.v, number // 2 + half, values, place, (self.its_columns,))

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

        def products(cached_ref: Ref, fresh_ref: Ref) -> _Pair:
            plgpu.wgmma(cached_ref, memory.q, memory.cached_k.transpose((1, 0)))
            plgpu.wgmma(fresh_ref, memory.q, memory.fresh_k.transpose((1, 0)))
            self.set_cached_alone()
            # The compiler sees no connection between the wait for a result and its registers.
            return jax.lax.optimization_barrier((cached_ref[...], fresh_ref[...]))

        keys = FETCHED, self.tokens
        cached, fresh = pl.run_scoped(
            products, *(ACC((WARPGROUP_ROWS, count), jnp.float32) for count in keys)
        )
        slot = plgpu.broadcasted_iota(jnp.int32, cached.shape, 1, layout=plgpu.Layout.WGMMA)
        slot += self.first - self.offset
        seen = slot >= jax.lax.broadcast_in_dim(limit, cached.shape, [0])
        seen = jnp.logical_and(seen, slot < self.length)
        scale = self.scale
        if self.cap is not None:
            layout = plgpu.Layout.WGMMA
            cached, fresh = (capped(each, scale, self.cap, layout) for each in (cached, fresh))
            scale = 1.0
        scores = jnp.where(seen, cached, -jnp.inf), fresh + bias
        top = jnp.maximum(*(each.max(axis=1) for each in scores))
        top = row_product(top, _per_row(scale))
        cached, fresh = (
            jnp.exp2(each * scale - jax.lax.broadcast_in_dim(top, each.shape, [0]))
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
        block = load(memory.cached_v, plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
        window, row = jax.lax.div(row, CONTRACTED), jax.lax.rem(row, CONTRACTED)
        there = row + jax.lax.div(window, 2) * ALIGNED < self.length - (self.first - self.offset)
        block = jnp.where(there, block, jnp.zeros_like(block))
        step = row - self.offset - jax.lax.rem(window, 2) * WINDOWS
        for number in range(WINDOWS):
            memory.cached_alone.at[number][...] = _kept(block, step == number)
        plgpu.commit_smem()

    def add_values(self, weights: _Pair, depth: jax.Array, acc_ref: Ref) -> jax.Array:
        """The weighted values, added in the order of their positions.

        The weights stay in registers, and each step has its values among zeros in memory.
        """
        memory = self.memory
        cached, fresh = (each.astype(self.refs.q.dtype) for each in weights)
        near = [cached[:, first : first + CONTRACTED] for first in (0, ALIGNED)]
        for step in range(RECENT):
            window, number = divmod(step, WINDOWS)
            rows = pl.ds(window * CONTRACTED, CONTRACTED)
            plgpu.wgmma(acc_ref, near[window // 2], memory.cached_alone.at[number, rows])
        if self.refs.out.shape[1] == 1:
            plgpu.wgmma(acc_ref, fresh, memory.fresh_v.at[pl.ds(0, self.tokens)])
        plgpu.wgmma_wait(0)
        jax.lax.optimization_barrier((near, fresh))
        if self.refs.out.shape[1] > 1:
            self.add_levels(fresh, depth, acc_ref)
        return jax.lax.optimization_barrier(acc_ref[...])

    def add_levels(self, fresh: jax.Array, depth: jax.Array, acc_ref: Ref) -> None:
        """Add the nodes' values, level by level. A level after the last one adds zeros."""
        memory = self.memory
        block = load(memory.fresh_v, plgpu.Layout.WGMMA)
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
            """In base 2, rounded alike whether it has one use or two."""
            return row_product(load(memory.lse.at[split], row), _per_row(LOG2_E))

        log_sums = [log_sum(split) for split in range(splits)]
        of_recent = top
        for each in log_sums:
            top = jnp.maximum(top, each)
        sink = None
        if self.refs.sinks is not None:
            sink = load(self.refs.sinks.at[self.kv_head, self.rows], row)
            top = jnp.maximum(top, sink)
        keep = jnp.exp2(of_recent - top)
        # The first split may be one that a window has left, and in another program one of values.
        whole = plgpu.Layout.WGMMA
        acc = product(acc, jax.lax.broadcast_in_dim(keep, acc.shape, [0]), whole)
        total = row_product(total, keep)
        if sink is not None:
            total += jnp.exp2(sink - top)

        def some(log_sums: list[Any], first: jax.Array | int, state: _Pair) -> _Pair:
            acc, total = state
            plgpu.barrier_wait(memory.partial_ready)
            self.clear(memory.partial, self.reached - first, 0.0, plgpu.Layout.WGMMA)
            for at, each in enumerate(log_sums):
                weight = jnp.exp2(each - top)
                values = load(memory.partial.at[at], plgpu.Layout.WGMMA)
                acc += values * jax.lax.broadcast_in_dim(weight, acc.shape, [0])
                total += weight
            return acc, total

        state = some(log_sums[:at_once], 0, (acc, total))
        if at_once == splits:
            return state

        def following(turn: jax.Array, state: _Pair) -> _Pair:
            state, first = jax.lax.optimization_barrier(state), turn * at_once
            plgpu.commit_smem()  # All have read the places before they are filled again.
            self.fetch_splits(first)
            return some([log_sum(first + at) for at in range(at_once)], first, state)

        turns = jax.lax.div(self.reached + at_once - 1, at_once)
        return jax.lax.fori_loop(1, turns, following, state)

    def clear(self, memory: Ref, first: jax.Array, value: float, layout: Any) -> None:
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


def _per_row(number: float) -> jax.Array:
    """The same number for each of a warpgroup's rows."""
    numbers = jnp.full((WARPGROUP_ROWS,), number, jnp.float32)
    return plgpu.layout_cast(numbers, plgpu.Layout.WGMMA.reduce(1))


def _kept(block: jax.Array, rows: jax.Array) -> jax.Array:
    """These rows of some numbers, and zeros. A product takes one instruction for two numbers."""
    return block * rows.astype(block.dtype)
