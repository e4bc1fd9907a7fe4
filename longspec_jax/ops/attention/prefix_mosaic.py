"""Prefix attention on Hopper GPUs: FlashDecoding as a Pallas kernel for Mosaic GPU.

Partial results have the layout of the Triton kernel's, with the rows padded to whole warpgroups.

With grouped heads a tree of some 70 nodes makes the prefix compute-bound: 276 packed rows read each
key and value. This kernel keeps the tensor cores busy as FlashAttention-3 does: one warpgroup
fetches keys and values with the copy engine while the others, 64 packed rows each, take turns, one
in its softmax while the other multiplies.

In a light item (:mod:`longspec_jax.ops.attention.prefix_items`) each warpgroup has a split,
and the blocks of the ring are the first one's and the second one's alternately. A warpgroup waits
for the other's blocks, too, and gives them back unread: a place is filled again only when both have
seen what was in it, so that nobody misses a phase of a barrier. Nobody waits in a circle, either.
Let A(s) be the first warpgroup's matmuls, with the values of its step s - 1 and the keys of its
step s, and B(s) the second one's. The turns enforce the order A(0), B(0), A(1), B(1), ... A block
is given back by its reader when the matmul is done, and by the other warpgroup at a turn of its
own, when its next matmuls begin at the latest. The block two places later, which has to wait for
that in a ring of two places, is for the matmuls after those. A warpgroup whose split is the
shorter one goes on taking its turns and giving back, so that both take as many turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries
from longspec_jax.ops.attention.packing import LOG2_E, Problem, pack, refuse_unsupported
from longspec_jax.ops.attention.prefix_items import Item, Part, Work
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.hardware import WARPGROUP_ROWS

_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def split_attention(
    q: Queries, k: CacheSlots, v: CacheSlots, length: Lengths, tile: MosaicTile, problem: Problem
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
        tile=tile, batch=batch, kv_heads=kv_heads, rows=padded, slots=slots, scale=problem.scale
    )
    call = plgpu.kernel(
        functools.partial(_kernel, work=work),
        out_type=(
            jax.ShapeDtypeStruct((batch, work.splits, kv_heads, padded, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, work.splits, kv_heads, padded), jnp.float32),
        ),
        scratch_types=_memory(tile, width, q.dtype),
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
    if width not in (64, 128):
        raise NotImplementedError(f"head width {width} is neither 64 nor 128")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} is neither bfloat16 nor float16")
    if slots < tile.slots or slots % 8:
        raise NotImplementedError(
            f"capacity {slots} is not a multiple of 8 of at least one step of {tile.slots} slots"
        )


def _memory(tile: MosaicTile, width: int, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a program: the fields of :class:`_Memory`."""
    # By the types of newer jax these are abstract; they are not.
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    swizzled = (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    return dict(
        q_smem=shared(tile.warpgroups, WARPGROUP_ROWS, width),
        k_smem=shared(tile.stages, tile.slots, width),
        v_smem=shared(tile.stages, tile.slots, width),
        lse_smem=plgpu.SMEM((tile.warpgroups, WARPGROUP_ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_barriers=tile.warpgroups),
        k_ready=plgpu.Barrier(num_barriers=tile.stages),
        v_ready=plgpu.Barrier(num_barriers=tile.stages),
        k_free=plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
        v_free=plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
        turn=plgpu.Barrier(num_arrivals=tile.warpgroups),
        clean=plgpu.Barrier(num_arrivals=tile.warpgroups),
    )


def _kernel(*refs: Any, work: Work, **memory: Any) -> None:
    """A program that stays: a warpgroup that fetches, and some that attend, item after item.

    While the last rows of an item are written the keys of the next are already on their way.
    """
    program = _Program(
        work=work,
        refs=_Operands(*refs),
        memory=_Memory(**memory),
        index=jax.lax.axis_index("program"),
        warpgroup=jax.lax.axis_index("warpgroup"),
    )
    attending = work.tile.warpgroups
    registers = {1: None, 2: (232, 40), 3: (160, 32)}[attending]

    @pl.when(program.warpgroup < attending)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        program.each_item(program.attend)

    @pl.when(program.warpgroup == attending)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        program.each_item(program.fetch)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The kernel's operands and results in device memory."""

    length: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What the warpgroups of a program share.

    Queries and log-sum-exps have a place for each warpgroup, keys and values one for each stage of
    the ring. ``ready`` says that a place was filled, ``free`` that all have read it. ``turn`` hands
    the tensor cores to the other warpgroup; ``clean`` says that the values beyond the length are 0.
    """

    q_smem: Any
    k_smem: Any
    v_smem: Any
    lse_smem: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    clean: Any


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a warpgroup does of an item.

    ``part`` is its split and ``lane`` its place among the two of a light item; ``beside`` are the
    steps that the other warpgroup takes on blocks of its own, and None where no item is light.
    """

    part: Part
    lane: jax.Array | int
    beside: jax.Array | None


_State = tuple[Any, Any, Any]
"""Unnormalised output, running maximum and running sum of a warpgroup's rows."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """One warpgroup of one program."""

    work: Work
    refs: _Operands
    memory: _Memory
    index: jax.Array
    warpgroup: jax.Array

    @property
    def tile(self) -> MosaicTile:
        """How the program works."""
        return self.work.tile

    @property
    def alternate(self) -> bool:
        """Whether two warpgroups take turns."""
        return self.tile.warpgroups == 2

    def each_item(self, visit: Callable[[Item], None]) -> None:
        """Call ``visit(item)`` for every item of this program that holds a slot its row sees.

        The rotation by one per round gives every program its share of the light items, which need
        two blocks of keys and values where others need one.
        """
        work, programs = self.work, self.work.programs

        def step(turn_number: jax.Array, past: jax.Array) -> jax.Array:
            index = turn_number * programs + jax.lax.rem(self.index + turn_number, programs)
            item = work.item(index, self.refs.length, past)
            pl.when(item.first.steps > 0)(lambda: visit(item))
            return past + item.steps

        jax.lax.fori_loop(0, pl.cdiv(work.items, programs), step, jnp.int32(0))

    def share(self, item: Item) -> _Share:
        """This warpgroup's share of an item."""
        first, second = item.first, item.second
        if second is None:
            return _Share(first, 0, None)
        lane = jnp.where(item.light, self.warpgroup, 0)
        part = Part(*(jnp.where(lane == 1, *of) for of in zip(second, first, strict=True)))
        return _Share(part, lane, jnp.where(item.light, item.steps - part.steps, 0))

    def fetch(self, item: Item) -> None:
        """Bring the item's keys and values, as soon as there is room in the ring."""

        @pl.loop(0, item.first.steps)
        def _(step: jax.Array) -> None:
            self.fetch_block(item, item.first, step, lane=0)
            if item.second is not None:
                second = functools.partial(self.fetch_block, item, item.second, step, lane=1)
                pl.when(step < item.second.steps)(second)

    def fetch_block(self, item: Item, part: Part, step: jax.Array, lane: int) -> None:
        """Bring one step's keys and values."""
        refs, memory, tile = self.refs, self.memory, self.tile
        stage = self.ring(item, step, lane)
        used = item.place(step, lane) >= tile.stages
        block = (item.batch, item.kv_head, pl.ds(part.lower + step * tile.slots, tile.slots))
        pl.when(used)(lambda: plgpu.barrier_wait(memory.k_free.at[stage]))
        plgpu.copy_gmem_to_smem(refs.k.at[block], memory.k_smem.at[stage], memory.k_ready.at[stage])
        pl.when(used)(lambda: plgpu.barrier_wait(memory.v_free.at[stage]))
        plgpu.copy_gmem_to_smem(refs.v.at[block], memory.v_smem.at[stage], memory.v_ready.at[stage])

    def attend(self, item: Item) -> None:
        """Attend with 64 rows to this warpgroup's split and write what they find."""
        memory, warpgroup, width = self.memory, self.warpgroup, self.refs.k.shape[3]
        share = self.share(item)
        # Of the last rows there may be fewer than warpgroups, which then do, or share, the same.
        first_row = item.row + warpgroup * WARPGROUP_ROWS
        rows = pl.ds(jnp.minimum(first_row, self.work.rows - WARPGROUP_ROWS), WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(
            self.refs.q.at[item.batch, item.kv_head, rows],
            memory.q_smem.at[warpgroup],
            memory.q_ready.at[warpgroup],
        )
        plgpu.barrier_wait(memory.q_ready.at[warpgroup])
        column = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), column)
        total = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), column)
        acc = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        if self.alternate:
            pl.when(warpgroup == 1)(lambda: self.begin_second(item, share))
        state = (acc, top, total)
        self.wait_for_keys(item, share, 0)
        whole = functools.partial(self.attend_to_step, item, share, edge=False)
        state = jax.lax.fori_loop(0, share.part.whole, whole, state)
        ragged = functools.partial(self.attend_to_step, item, share, edge=True)
        state = jax.lax.fori_loop(share.part.whole, share.part.steps, ragged, state)
        if item.second is not None:
            stand_by = functools.partial(self.stand_by, item, share)
            pl.loop(share.part.steps, item.first.steps)(stand_by)
        if self.alternate:
            pl.when(warpgroup == 0)(lambda: self.end_first(item, share))
        pl.when(share.part.steps > 0)(lambda: self.write(item, share, rows, state))

    def attend_to_step(
        self, item: Item, share: _Share, step: jax.Array, state: _State, edge: bool
    ) -> _State:
        """Attend to one block of slots; ``edge`` if the row may not see all of them."""
        memory = self.memory
        acc, top, total = state
        stage = self.ring(item, step, share.lane)
        scores = self.scores(item, share, step, edge)
        # The other warpgroup is about to multiply these values.
        self.give_back_values(item, share, step - 1 + share.lane)
        # Every visited block holds a slot the row sees, so this maximum is finite.
        new_top = jnp.maximum(top, scores.max(axis=1) * self.work.scale)
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(
            scores * self.work.scale - jax.lax.broadcast_in_dim(new_top, scores.shape, [0])
        )
        acc *= jax.lax.broadcast_in_dim(keep, acc.shape, [0])
        total = total * keep + weights.sum(axis=1)
        half = weights.astype(memory.v_smem.dtype)
        acc, total, new_top, half = jax.lax.optimization_barrier((acc, total, new_top, half))
        if self.alternate:
            plgpu.barrier_arrive(memory.turn)  # This warpgroup's softmax is done.
        plgpu.barrier_wait(memory.v_ready.at[stage])
        if edge:
            self.silence(item, share, step)
        if self.alternate:
            plgpu.barrier_wait(memory.turn)  # The tensor cores are free.

        def multiply_values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, half, memory.v_smem.at[stage])
            # The other warpgroup has begun to multiply these keys.
            self.give_back_keys(item, share, step + share.lane)
            self.wait_for_keys(item, share, step + 1)

        acc = pl.run_state(multiply_values)(_ACC.init(acc))
        plgpu.barrier_arrive(memory.v_free.at[stage])
        return acc, new_top, total

    def scores(self, item: Item, share: _Share, step: jax.Array, edge: bool) -> jax.Array:
        """Products of the queries with one block of keys, which is given back."""
        memory, tile = self.memory, self.tile
        stage = self.ring(item, step, share.lane)

        def multiply_keys(scores_ref: Any) -> jax.Array:
            keys = memory.k_smem.at[stage].transpose((1, 0))
            plgpu.wgmma(scores_ref, memory.q_smem.at[self.warpgroup], keys)
            self.take_turn()
            return scores_ref[...]

        scores = pl.run_scoped(multiply_keys, _ACC((WARPGROUP_ROWS, tile.slots), jnp.float32))
        plgpu.barrier_arrive(memory.k_free.at[stage])
        if edge:
            slot = plgpu.broadcasted_iota(
                jnp.int32, (WARPGROUP_ROWS, tile.slots), 1, layout=plgpu.Layout.WGMMA
            )
            scores = jnp.where(slot + step * tile.slots < share.part.seen, scores, -jnp.inf)
        return scores

    def silence(self, item: Item, share: _Share, step: jax.Array) -> None:
        """Zero the values beyond the length: memory there may be NaN, and 0 NaN is NaN.

        Whose block it is does it; the first warpgroup, where that is everyone's.
        """
        memory = self.memory
        values = memory.v_smem.at[self.ring(item, step, share.lane)]

        @pl.when(jnp.logical_or(self.warpgroup == 0, item.light))
        def _() -> None:
            block = plgpu.load(values, layout=plgpu.Layout.WGMMA)  # pyright: ignore
            row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
            seen = row + step * self.tile.slots < share.part.seen
            values[...] = jnp.where(seen, block, jnp.zeros_like(block))
            plgpu.commit_smem()

        @pl.when(jnp.logical_not(item.light))
        def _() -> None:
            plgpu.barrier_arrive(memory.clean)
            plgpu.barrier_wait(memory.clean)

    def write(self, item: Item, share: _Share, rows: Any, state: _State) -> None:
        """Write the results of some rows and the split they attended to."""
        acc, top, total = state
        lse = self.memory.lse_smem.at[self.warpgroup]
        acc *= jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        lse[...] = top / LOG2_E + jnp.log(total)
        plgpu.commit_smem()
        place = (item.batch, share.part.split, item.kv_head, rows)
        plgpu.copy_smem_to_gmem(lse, self.refs.lse.at[place])
        self.refs.out[place] = acc
        plgpu.wait_smem_to_gmem(0)

    def begin_second(self, item: Item, share: _Share) -> None:
        """Let the first warpgroup multiply its first keys."""
        self.take_turn()
        self.give_back_keys(item, share, 0)

    def stand_by(self, item: Item, share: _Share, step: jax.Array) -> None:
        """Take the second warpgroup's turns of a step that only the first one has."""
        self.take_turn()
        self.give_back_values(item, share, step)
        self.take_turn()
        self.give_back_keys(item, share, step + 1)

    def end_first(self, item: Item, share: _Share) -> None:
        """Let the second warpgroup multiply its last values."""
        self.take_turn()
        self.give_back_values(item, share, item.first.steps - 1)

    def give_back_keys(self, item: Item, share: _Share, step: jax.Array | int) -> None:
        """Give back, unread, the keys of a step of the other warpgroup, if it has that step."""
        self.give_back(item, share, step, self.memory.k_ready, self.memory.k_free)

    def give_back_values(self, item: Item, share: _Share, step: jax.Array | int) -> None:
        """Give back, unread, the values of a step of the other warpgroup, if it has that step."""
        self.give_back(item, share, step, self.memory.v_ready, self.memory.v_free)

    def give_back(
        self, item: Item, share: _Share, step: jax.Array | int, ready: Any, free: Any
    ) -> None:
        """Wait for a block that is the other warpgroup's and let go of it."""
        if share.beside is None:
            return
        stage = self.ring(item, step, 1 - share.lane)

        @pl.when(jnp.logical_and(step >= 0, step < share.beside))
        def _() -> None:
            plgpu.barrier_wait(ready.at[stage])
            plgpu.barrier_arrive(free.at[stage])

    def wait_for_keys(self, item: Item, share: _Share, step: jax.Array | int) -> None:
        """Wait for the keys of a step of this warpgroup, if it has that step."""

        @pl.when(step < share.part.steps)
        def _() -> None:
            plgpu.barrier_wait(self.memory.k_ready.at[self.ring(item, step, share.lane)])

    def ring(self, item: Item, step: jax.Array | int, lane: jax.Array | int) -> jax.Array:
        """The stage of a step, as :meth:`Item.place`: the ring goes on from item to item."""
        return jax.lax.rem(item.place(step, lane), self.tile.stages)

    def take_turn(self) -> None:
        """Wait until the other warpgroup is done, and let it wait for this one."""
        if self.alternate:
            plgpu.barrier_arrive(self.memory.turn)
            plgpu.barrier_wait(self.memory.turn)
