"""What the attending warpgroups of the prefix's Hopper kernel compute.

A warpgroup has 64 packed rows. One is in its softmax while the other multiplies, as in
FlashAttention-3.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Ref
from longspec_jax.ops.attention.packing import LOG2_E
from longspec_jax.ops.attention.prefix_items import Item
from longspec_jax.ops.attention.prefix_programs import PrefixProgram, Share
from longspec_jax.ops.hardware import WARPGROUP_ROWS
from longspec_jax.ops.mosaic import ACC, capped, first_of_pairs, load

PAIR = 8
"""Rows between the two of a thread: of so few, or of so few tokens, the second is padding."""
_State = tuple[Any, Any, Any]
"""Unnormalised output, running maximum and running sum of a warpgroup's rows."""


@dataclasses.dataclass(frozen=True)
class Attention(PrefixProgram):
    """A warpgroup that attends."""

    def attend(self, item: Item) -> None:
        """Attend with 64 rows to this warpgroup's split and write what they find."""
        memory, warpgroup = self.memory, self.warpgroup
        width = self.refs.v.shape[3] // self.work.parts
        share = self.share(item)
        # Of the last rows there may be fewer than warpgroups, which then do, or share, the same.
        first_row = item.row + warpgroup * WARPGROUP_ROWS
        first_row = jnp.minimum(first_row, self.work.rows - WARPGROUP_ROWS)
        rows = pl.ds(first_row, WARPGROUP_ROWS)
        self.fetch_queries(item, first_row)
        column = plgpu.Layout.WGMMA.reduce(1)
        limit = None
        if self.refs.limit is not None:
            limit = load(self.refs.limit.at[item.batch, rows], column)
        plgpu.barrier_wait(memory.q_ready.at[warpgroup])
        top = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), column)
        total = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), column)
        acc = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        if self.alternate:
            pl.when(warpgroup == 1)(lambda: self.begin_second(item, share))
        state = (acc, top, total)
        self.wait_for_keys(item, share, 0)
        if self.tile.warpgroups == 1:
            state = self.attend_ahead(item, share, limit, state)
            pl.when(share.part.steps > 0)(lambda: self.write(item, share, rows, state))
            return
        whole = functools.partial(self.attend_to_step, item, share, None, edge=False)
        state = jax.lax.fori_loop(0, share.part.whole, whole, state)
        ragged = functools.partial(self.attend_to_step, item, share, limit, edge=True)
        state = jax.lax.fori_loop(share.part.whole, share.part.steps, ragged, state)
        if item.second is not None:
            stand_by = functools.partial(self.stand_by, item, share)
            pl.loop(share.part.steps, item.first.steps)(stand_by)
        if self.alternate:
            pl.when(warpgroup == 0)(lambda: self.end_first(item, share))
        pl.when(share.part.steps > 0)(lambda: self.write(item, share, rows, state))

    def attend_to_step(
        self,
        item: Item,
        share: Share,
        limit: jax.Array | None,
        step: jax.Array,
        state: _State,
        edge: bool,
    ) -> _State:
        """Attend to one block of slots; ``edge`` if a row may not see all of them."""
        memory = self.memory
        stage = self.ring(item, step, share.lane)
        scores = self.scores(item, share, step)
        scores = self.bounded(scores)
        if edge:
            scores = self.hide(scores, share, limit, step)
        # The other warpgroup is about to multiply these values.
        self.give_back_values(item, share, step - 1 + share.lane)
        half, (acc, total, new_top) = self.softmax(scores, state, bounded=limit is not None)
        if self.alternate:
            plgpu.barrier_arrive(memory.turn)  # This warpgroup's softmax is done.
        plgpu.barrier_wait(memory.v_ready.at[stage])
        if edge:
            self.silence(item, share, step)
        if self.alternate:
            plgpu.barrier_wait(memory.turn)  # The tensor cores are free.

        def multiply_values(acc_ref: Ref) -> None:
            plgpu.wgmma(acc_ref, half, memory.v_smem.at[stage])
            # The other warpgroup has begun to multiply these keys.
            self.give_back_keys(item, share, step + share.lane)
            self.wait_for_keys(item, share, step + 1)

        acc = pl.run_state(multiply_values)(ACC.init(acc))
        plgpu.barrier_arrive(memory.v_free.at[stage])
        return acc, new_top, total

    def softmax(
        self, scores: jax.Array, state: _State, *, bounded: bool
    ) -> tuple[jax.Array, tuple[Any, Any, Any]]:
        """The weights of one block, and the rescaled output, the sum and the maximum after it.

        The time of a step of few queries is that of these instructions. Half of them are left out
        (:func:`~longspec_jax.ops.mosaic.first_of_pairs`), which changes no bit.
        Every visited block holds a slot that some row sees. Unless rows are ``bounded`` apart, all
        of them see it, so that their maxima are finite.
        """
        acc, top, total = state
        few = self.refs.out.shape[3] if self.tokens is None else self.refs.q.shape[2]
        if few <= PAIR:
            scores, top, total = map(first_of_pairs, (scores, top, total))
        scale = self.work.scale if self.work.cap is None else 1.0
        new_top = jnp.maximum(top, scores.max(axis=1) * scale)
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if bounded else new_top
        if few <= PAIR:  # Of a choice the compiler does not see that it is the same twice.
            shift = first_of_pairs(shift)
        keep = jnp.exp2(top - shift)
        weights = jnp.exp2(scores * scale - jax.lax.broadcast_in_dim(shift, scores.shape, [0]))
        acc *= jax.lax.broadcast_in_dim(keep, acc.shape, [0])
        total = total * keep + weights.sum(axis=1)
        half = weights.astype(self.memory.v_smem.dtype)
        acc, total, new_top, half = jax.lax.optimization_barrier((acc, total, new_top, half))
        return half, (acc, total, new_top)

    def attend_ahead(
        self, item: Item, share: Share, limit: jax.Array | None, state: _State
    ) -> _State:
        """Attend to all blocks with one warpgroup.

        It multiplies the keys of the next block while its softmax works on this one. The arithmetic
        is that of :meth:`attend_to_step`.
        """
        memory, part = self.memory, share.part
        shape = (WARPGROUP_ROWS, self.tile.slots)

        def multiply_keys(ref: Ref, step: jax.Array | int) -> None:
            keys = memory.k_smem.at[self.ring(item, step, 0)].transpose((1, 0))
            plgpu.wgmma(ref, memory.q_smem.at[0], keys)

        def release_keys(step: jax.Array | int) -> None:
            plgpu.barrier_arrive(memory.k_free.at[self.ring(item, step, 0)])

        def first(ref: Ref) -> jax.Array:
            multiply_keys(ref, 0)
            # The compiler sees no connection between the wait for a result and its registers.
            return jax.lax.optimization_barrier(ref[...])

        def visit(step: jax.Array, carry: Any, *, edge: bool) -> Any:
            scores, state = carry
            stage = self.ring(item, step, 0)

            def with_next(ref: Ref) -> Any:
                self.wait_for_keys(item, share, step + 1)
                # After the last block this multiplies an old one, and the result is not read.
                multiply_keys(ref, step + 1)
                hidden = self.bounded(scores)
                if edge:
                    hidden = self.hide(hidden, share, limit, step)
                bounded = edge and limit is not None
                half, (acc, total, top) = self.softmax(hidden, state, bounded=bounded)
                plgpu.barrier_wait(memory.v_ready.at[stage])
                if edge:
                    self.silence(item, share, step)

                def multiply_values(acc_ref: Ref) -> None:
                    plgpu.wgmma(acc_ref, half, memory.v_smem.at[stage])

                acc = pl.run_state(multiply_values)(ACC.init(acc))
                plgpu.barrier_arrive(memory.v_free.at[stage])
                pl.when(step + 1 < part.steps)(lambda: release_keys(step + 1))
                return jax.lax.optimization_barrier(ref[...]), (acc, top, total)

            return pl.run_scoped(with_next, ACC(shape, jnp.float32))

        scores = pl.run_scoped(first, ACC(shape, jnp.float32))
        pl.when(part.steps > 0)(lambda: release_keys(0))
        carry = scores, state
        carry = jax.lax.fori_loop(0, part.whole, functools.partial(visit, edge=False), carry)
        ragged = functools.partial(visit, edge=True)
        return jax.lax.fori_loop(part.whole, part.steps, ragged, carry)[1]

    def scores(self, item: Item, share: Share, step: jax.Array) -> jax.Array:
        """Products of the queries with one block of keys, which is given back."""
        memory, tile = self.memory, self.tile
        stage = self.ring(item, step, share.lane)

        def multiply_keys(scores_ref: Ref) -> jax.Array:
            keys = memory.k_smem.at[stage].transpose((1, 0))
            plgpu.wgmma(scores_ref, memory.q_smem.at[self.warpgroup], keys)
            self.take_turn()
            return scores_ref[...]

        scores = pl.run_scoped(multiply_keys, ACC((WARPGROUP_ROWS, tile.slots), jnp.float32))
        plgpu.barrier_arrive(memory.k_free.at[stage])
        return scores

    def bounded(self, scores: jax.Array) -> jax.Array:
        """The scores as they are or, with a soft cap, bounded and in base 2."""
        if self.work.cap is None:
            return scores
        return capped(scores, self.work.scale, self.work.cap, plgpu.Layout.WGMMA)

    def hide(
        self, scores: jax.Array, share: Share, limit: jax.Array | None, step: jax.Array
    ) -> jax.Array:
        """The scores with -inf where a row does not see the slot."""
        slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        slot += step * self.tile.slots
        if limit is None:
            return jnp.where(slot < share.part.seen, scores, -jnp.inf)
        seen = jax.lax.broadcast_in_dim(limit - share.part.lower, scores.shape, [0])
        there = slot < seen
        if self.work.span is not None:
            there = jnp.logical_and(there, slot >= seen - self.work.span)
        return jnp.where(there, scores, -jnp.inf)

    def silence(self, item: Item, share: Share, step: jax.Array) -> None:
        """Zero the values that no row sees: memory there may be NaN, and 0 NaN is NaN.

        They are beyond the length, or before a window. Whose block it is does it; the first
        warpgroup, where that is everyone's.
        """
        if item.oldest is None:
            self.silence_some(item, share, step)
            return
        # Every step of a window is masked; only the first and the last ones have such values.
        first, seen = step * self.tile.slots, share.part.seen
        hidden = first < item.oldest - share.part.lower
        ragged = jnp.logical_or(first + self.tile.slots > seen, hidden)
        pl.when(ragged)(lambda: self.silence_some(item, share, step))

    def silence_some(self, item: Item, share: Share, step: jax.Array) -> None:
        """Zero such values of a step that has some."""
        memory = self.memory
        values = memory.v_smem.at[self.ring(item, step, share.lane)]

        @pl.when(jnp.logical_or(self.warpgroup == 0, item.light))
        def _() -> None:
            block = load(values, plgpu.Layout.WGMMA, optimized=True)
            row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
            slot = row + step * self.tile.slots
            seen = slot < share.part.seen
            if item.oldest is not None:
                seen = jnp.logical_and(seen, slot >= item.oldest - share.part.lower)
            values[...] = jnp.where(seen, block, jnp.zeros_like(block))
            plgpu.commit_smem()

        @pl.when(jnp.logical_not(item.light))
        def _() -> None:
            plgpu.barrier_arrive(memory.clean)
            plgpu.barrier_wait(memory.clean)

    def write(self, item: Item, share: Share, rows: Any, state: _State) -> None:
        """Write the results of some rows and the split they attended to."""
        acc, top, total = state
        memory, refs, columns = self.memory, self.refs, self.columns(item)
        lse = memory.lse_smem.at[self.warpgroup]
        if refs.limit is None:
            log_sum = top / LOG2_E + jnp.log(total)
        else:
            empty = total == 0.0
            total = jnp.where(empty, 1.0, total)
            log_sum = jnp.where(empty, -jnp.inf, top / LOG2_E + jnp.log(total))
        acc *= jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        lse[...] = log_sum
        place = (item.batch, share.part.split, item.kv_head)
        few = refs.out.shape[3] < WARPGROUP_ROWS
        if few:
            memory.out_smem.at[self.warpgroup][...] = acc
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse, refs.lse.at[(*place, rows)])
        if few:
            there = pl.ds(0, refs.out.shape[3])
            to = refs.out.at[(*place, there, columns)]
            plgpu.copy_smem_to_gmem(memory.out_smem.at[self.warpgroup, there], to)
        else:
            refs.out[(*place, rows, columns)] = acc
        plgpu.wait_smem_to_gmem(0)
