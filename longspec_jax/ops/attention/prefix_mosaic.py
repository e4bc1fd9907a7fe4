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

Codes of a cache in 8 bits come into rings of their own
(:mod:`longspec_jax.ops.attention.widening`). Further warpgroups widen them into the rings of
16 bits: one for keys and one for values, or one for both beside two that attend. Those do what they
do with a whole cache, in the same order.

**Expected times of a cache in 8 bits** (H200, 4.3 TB/s, a multiprocessor reads 19 bytes a clock at
1.7 GHz): 32k tokens of 32 heads are 268 MB, 62 us a layer; of 8 heads 16 us, and the matrix units'
time for many rows. Widening issues 2.2 instructions a code, of which a multiprocessor has 128 a
clock: a third of one warpgroup's for each of keys and values where memory is the bound.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Queries
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.attention.packing import LOG2_E, Problem, pack, refuse_unsupported
from longspec_jax.ops.attention.path import SEGMENT
from longspec_jax.ops.attention.prefix_items import Bounds, Item, Part, Work
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.attention.widening import BLOCK, Ring
from longspec_jax.ops.hardware import HOPPER, SHARED_BYTES, WARPGROUP_ROWS

_WIDENED = {1: ("k", "v"), 2: ("kv",)}
"""By how many warpgroups attend, what each of those widens that do: keys, values or both."""
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


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
    bounds = Bounds.packed(seen, seen, jnp.full_like(seen, tile.split), prefix.cache_rows)
    work = Work(
        tile=tile,
        batch=q.shape[0],
        kv_heads=kv_heads,
        rows=padded,
        slots=slots,
        splits=pl.cdiv(slots, tile.split),
        scale=problem.scale,
    )
    return launch(work, bounds, None, rows, prefix.keys, prefix.values)


def launch(
    work: Work,
    bounds: Int[Array, "B 4"],
    limit: Int[Array, "B R"] | None,
    q: Float[Array, "B K packed H"] | Float[Array, "B N T H"],
    k: CacheSlots,
    v: CacheSlots,
) -> tuple[Float[Array, "B P K some H"], Float[Array, "B P K R"]]:
    """Run the kernel.

    Args:
      work: what all programs do.
      bounds: the fields of :class:`~longspec_jax.ops.attention.prefix_items.Bounds`.
      limit: how many slots each packed row sees; as the bounds say if absent.
      q: packed queries ``[B, K, R, H]``, or queries by head ``[B, N, T, H]``, whose packed rows are
        ordered by head, then by token, of whole segments of tokens (``path.SEGMENT``).
      k: cached keys.
      v: cached values.

    Returns:
      Partial results of every split that a row sees, each with its natural log-sum-exp. Rows that
      see nothing of a split that another row sees have 0 and -inf. Less than a warpgroup's outputs
      have no more rows than there are.
    """
    width, narrow = k.shape[3], k.dtype == CODES
    _refuse_unsupported(width, k.shape[2], q.dtype, work.tile)
    if narrow:
        work = _narrow(work)
    tile, tokens, rows = work.tile, None, work.rows
    there = q.shape[2]
    if q.shape[1] != work.kv_heads:
        tokens = -(-q.shape[2] // SEGMENT) * SEGMENT
        there = tokens * q.shape[1] // work.kv_heads
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
        num_threads=tile.warpgroups + 1 + (len(_WIDENED[tile.warpgroups]) if narrow else 0),
        thread_name="warpgroup",
        # No sum or maximum crosses warps; three stages of 128 slots leave no room for scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="prefix_splits",
    )
    return call(bounds, *([] if limit is None else [limit]), q, k, v)


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


def _memory(work: Work, width: int, rows: int, dtype: Any, *, segmented: bool) -> dict[str, Any]:
    """Shared memory and barriers of a program: the fields of :class:`_Memory`."""
    tile = work.tile
    # By the types of newer jax these are abstract; they are not.
    tiling = plgpu.TilingTransform((8, 64))  # pyright: ignore[reportAbstractUsage]
    swizzled = (tiling, plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    columns = width // work.parts
    copies = WARPGROUP_ROWS // SEGMENT if segmented else 1
    few = (WARPGROUP_ROWS, columns) if rows < WARPGROUP_ROWS else (1, 1)
    return dict(
        q_smem=shared(tile.warpgroups, WARPGROUP_ROWS, width),
        k_smem=shared(tile.stages, tile.slots, width),
        v_smem=shared(tile.stages, tile.slots, columns),
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
    if tile.warpgroups not in _WIDENED:
        raise NotImplementedError("of a cache in 8 bits, three warpgroups leave none to widen")
    stages = 3 if tile.slots == BLOCK else 2
    return dataclasses.replace(work, tile=dataclasses.replace(tile, stages=stages))


def _rings_of_codes(memory: dict[str, Any]) -> dict[str, Ring]:
    """Of keys and values, with as many places as the other memory leaves room for."""
    arrays = (memory[name] for name in ("q_smem", "k_smem", "v_smem", "lse_smem", "out_smem"))
    held = sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)
    widths = [memory[name].shape[2] for name in ("k_smem", "v_smem")]
    places = min((SHARED_BYTES[HOPPER] - held - 2048) // (BLOCK * sum(widths)), 8)
    rings = (Ring.memory(places, width) for width in widths)
    return dict(zip(("k_codes", "v_codes"), rings, strict=True))


def _kernel(
    bounds: Any, *refs: Any, work: Work, limited: bool, tokens: int | None, **memory: Any
) -> None:
    """A program that stays: a warpgroup that fetches, and some that attend, item after item.

    While the last rows of an item are written the keys of the next are already on their way.
    """
    program = _Program(
        work=work,
        tokens=tokens,
        refs=_Operands(bounds, *(() if limited else (None,)), *refs),
        memory=_Memory(**memory),
        index=jax.lax.axis_index("program"),
        warpgroup=jax.lax.axis_index("warpgroup"),
    )
    attending = work.tile.warpgroups
    narrow = program.memory.k_codes is not None
    registers = {1: None, 2: (232, 40), 3: (160, 32)}[attending]
    if narrow:
        registers = {1: (232, 32, 120), 2: (216, 32, 48)}[attending]

    @pl.when(program.warpgroup < attending)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        program.each_item(program.attend)

    @pl.when(program.warpgroup == attending)
    def _() -> None:
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        bring = program.fetch_codes if narrow else program.fetch_block
        program.each_item(functools.partial(program.each_step, bring))

    for index, kinds in enumerate(_WIDENED[attending] if narrow else ()):

        @pl.when(program.warpgroup == attending + 1 + index)
        def _(kinds: str = kinds) -> None:
            plgpu.set_max_registers(registers[2], action="decrease")
            widen = functools.partial(program.widen_block, kinds)
            program.each_item(functools.partial(program.each_step, widen))


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The kernel's operands and results in device memory."""

    bounds: Any
    limit: Any
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
    A cache in 8 bits comes into rings of codes.
    """

    q_smem: Any
    k_smem: Any
    v_smem: Any
    lse_smem: Any
    out_smem: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    turn: Any
    clean: Any
    k_codes: Any = None
    v_codes: Any = None


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
    tokens: int | None
    """Tokens of a head's packed rows, whole segments, where queries are not packed."""
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
            item = work.item(index, self.refs.bounds, past)
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

    def each_step(self, visit: Callable[[Item, Part, Any, int], None], item: Item) -> None:
        """Call ``visit(item, part, step, lane)`` for all steps in the order of the ring."""

        @pl.loop(0, item.first.steps)
        def _(step: jax.Array) -> None:
            visit(item, item.first, step, 0)
            if item.second is not None:
                second = functools.partial(visit, item, item.second, step, 1)
                pl.when(step < item.second.steps)(second)

    def fetch_block(self, item: Item, part: Part, step: jax.Array, lane: int) -> None:
        """Bring one step's keys and values, as soon as there is room in the ring."""
        refs, memory, tile = self.refs, self.memory, self.tile
        stage = self.ring(item, step, lane)
        used = item.place(step, lane) >= tile.stages
        slot = pl.multiple_of(part.lower + step * tile.slots, tile.slots)
        block = (item.cache_row, item.kv_head, pl.ds(slot, tile.slots))
        pl.when(used)(lambda: plgpu.barrier_wait(memory.k_free.at[stage]))
        plgpu.copy_gmem_to_smem(refs.k.at[block], memory.k_smem.at[stage], memory.k_ready.at[stage])
        pl.when(used)(lambda: plgpu.barrier_wait(memory.v_free.at[stage]))
        values = refs.v.at[(*block, self.columns(item))]
        plgpu.copy_gmem_to_smem(values, memory.v_smem.at[stage], memory.v_ready.at[stage])

    def fetch_codes(self, item: Item, part: Part, step: jax.Array, lane: int) -> None:
        """Bring one step's keys and values in 8 bits, as soon as there is room for them."""
        refs, memory = self.refs, self.memory
        for ring, cached, columns in (
            (memory.k_codes, refs.k, ()),
            (memory.v_codes, refs.v, (self.columns(item),)),
        ):
            for ahead, number in self.blocks(item, step, lane):
                slot = pl.multiple_of(part.lower + step * self.tile.slots + ahead, BLOCK)
                block = (item.cache_row, item.kv_head, pl.ds(slot, BLOCK), *columns)
                ring.bring(number, cached.at[block])

    def widen_block(self, kinds: str, item: Item, part: Part, step: jax.Array, lane: int) -> None:
        """Widen one step's keys, values or both into their places in the ring."""
        memory, stage = self.memory, self.ring(item, step, lane)
        rings = dict(
            k=(memory.k_codes, memory.k_smem, memory.k_ready, memory.k_free),
            v=(memory.v_codes, memory.v_smem, memory.v_ready, memory.v_free),
        )
        for codes, wide, ready, free in (rings[kind] for kind in kinds):
            used = item.place(step, lane) >= self.tile.stages
            pl.when(used)(functools.partial(plgpu.barrier_wait, free.at[stage]))
            for ahead, number in self.blocks(item, step, lane):
                codes.widen(number, wide.at[stage, pl.ds(ahead, BLOCK)])
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[stage])

    def blocks(self, item: Item, step: jax.Array, lane: int) -> list[tuple[int, jax.Array]]:
        """The first slots of a step's blocks of codes, and their numbers."""
        count = self.tile.slots // BLOCK
        return [(at * BLOCK, item.place(step, lane) * count + at) for at in range(count)]

    def columns(self, item: Item) -> Any:
        """The columns of the values that this program multiplies."""
        count = self.refs.v.shape[3] // self.work.parts
        return pl.ds(item.columns * count, count)

    def fetch_queries(self, item: Item, first: jax.Array) -> None:
        """Bring 64 packed rows, from ``first`` on."""
        memory, q, warpgroup = self.memory, self.refs.q, self.warpgroup
        to, ready = memory.q_smem.at[warpgroup], memory.q_ready.at[warpgroup]
        if self.tokens is None:
            rows = pl.ds(first, WARPGROUP_ROWS)
            plgpu.copy_gmem_to_smem(q.at[item.batch, item.kv_head, rows], to, ready)
            return
        groups, of_a_head = q.shape[1] // self.work.kv_heads, self.tokens // SEGMENT
        for place in range(WARPGROUP_ROWS // SEGMENT):
            # Rows that there are not are some that there are; nobody reads their results.
            segment = jnp.minimum(jax.lax.div(first, SEGMENT) + place, groups * of_a_head - 1)
            head = item.kv_head * groups + jax.lax.div(segment, of_a_head)
            some = pl.ds(jax.lax.rem(segment, of_a_head) * SEGMENT, SEGMENT)
            part = to.at[pl.ds(place * SEGMENT, SEGMENT)]
            plgpu.copy_gmem_to_smem(q.at[item.batch, head, some], part, ready)

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
            # From jax 0.11 on, which this kernel needs, load takes no index.
            limit = plgpu.load(  # pyright: ignore[reportCallIssue]
                self.refs.limit.at[item.batch, rows], layout=column, optimized=False
            )
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
        share: _Share,
        limit: jax.Array | None,
        step: jax.Array,
        state: _State,
        edge: bool,
    ) -> _State:
        """Attend to one block of slots; ``edge`` if a row may not see all of them."""
        memory = self.memory
        stage = self.ring(item, step, share.lane)
        scores = self.scores(item, share, step)
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

        def multiply_values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, half, memory.v_smem.at[stage])
            # The other warpgroup has begun to multiply these keys.
            self.give_back_keys(item, share, step + share.lane)
            self.wait_for_keys(item, share, step + 1)

        acc = pl.run_state(multiply_values)(_ACC.init(acc))
        plgpu.barrier_arrive(memory.v_free.at[stage])
        return acc, new_top, total

    def softmax(
        self, scores: jax.Array, state: _State, *, bounded: bool
    ) -> tuple[jax.Array, tuple[Any, Any, Any]]:
        """The weights of one block, and the rescaled output, the sum and the maximum behind it.

        Every visited block holds a slot that some row sees. Unless rows are ``bounded`` apart, all
        of them see it, so that their maxima are finite.
        """
        acc, top, total = state
        new_top = jnp.maximum(top, scores.max(axis=1) * self.work.scale)
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top) if bounded else new_top
        keep = jnp.exp2(top - shift)
        weights = jnp.exp2(
            scores * self.work.scale - jax.lax.broadcast_in_dim(shift, scores.shape, [0])
        )
        acc *= jax.lax.broadcast_in_dim(keep, acc.shape, [0])
        total = total * keep + weights.sum(axis=1)
        half = weights.astype(self.memory.v_smem.dtype)
        acc, total, new_top, half = jax.lax.optimization_barrier((acc, total, new_top, half))
        return half, (acc, total, new_top)

    def attend_ahead(
        self, item: Item, share: _Share, limit: jax.Array | None, state: _State
    ) -> _State:
        """Attend to all blocks with one warpgroup.

        It multiplies the keys of the next block while its softmax works on this one. The arithmetic
        is that of :meth:`attend_to_step`.
        """
        memory, part = self.memory, share.part
        shape = (WARPGROUP_ROWS, self.tile.slots)

        def multiply_keys(ref: Any, step: jax.Array | int) -> None:
            keys = memory.k_smem.at[self.ring(item, step, 0)].transpose((1, 0))
            plgpu.wgmma(ref, memory.q_smem.at[0], keys)

        def release_keys(step: jax.Array | int) -> None:
            plgpu.barrier_arrive(memory.k_free.at[self.ring(item, step, 0)])

        def first(ref: Any) -> jax.Array:
            multiply_keys(ref, 0)
            # The compiler sees no connection between the wait for a result and its registers.
            return jax.lax.optimization_barrier(ref[...])

        def visit(step: jax.Array, carry: Any, *, edge: bool) -> Any:
            scores, state = carry
            stage = self.ring(item, step, 0)

            def with_next(ref: Any) -> Any:
                self.wait_for_keys(item, share, step + 1)
                # Behind the last block this multiplies an old one, and nobody reads the result.
                multiply_keys(ref, step + 1)
                hidden = self.hide(scores, share, limit, step) if edge else scores
                bounded = edge and limit is not None
                half, (acc, total, top) = self.softmax(hidden, state, bounded=bounded)
                plgpu.barrier_wait(memory.v_ready.at[stage])
                if edge:
                    self.silence(item, share, step)

                def multiply_values(acc_ref: Any) -> None:
                    plgpu.wgmma(acc_ref, half, memory.v_smem.at[stage])

                acc = pl.run_state(multiply_values)(_ACC.init(acc))
                plgpu.barrier_arrive(memory.v_free.at[stage])
                pl.when(step + 1 < part.steps)(lambda: release_keys(step + 1))
                return jax.lax.optimization_barrier(ref[...]), (acc, top, total)

            return pl.run_scoped(with_next, _ACC(shape, jnp.float32))

        scores = pl.run_scoped(first, _ACC(shape, jnp.float32))
        pl.when(part.steps > 0)(lambda: release_keys(0))
        carry = scores, state
        carry = jax.lax.fori_loop(0, part.whole, functools.partial(visit, edge=False), carry)
        ragged = functools.partial(visit, edge=True)
        return jax.lax.fori_loop(part.whole, part.steps, ragged, carry)[1]

    def scores(self, item: Item, share: _Share, step: jax.Array) -> jax.Array:
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
        return scores

    def hide(
        self, scores: jax.Array, share: _Share, limit: jax.Array | None, step: jax.Array
    ) -> jax.Array:
        """The scores with -inf where a row does not see the slot."""
        slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        slot += step * self.tile.slots
        if limit is None:
            return jnp.where(slot < share.part.seen, scores, -jnp.inf)
        seen = jax.lax.broadcast_in_dim(limit - share.part.lower, scores.shape, [0])
        return jnp.where(slot < seen, scores, -jnp.inf)

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
            memory.out_smem[...] = acc
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse, refs.lse.at[(*place, rows)])
        if few:
            there = pl.ds(0, refs.out.shape[3])
            to = refs.out.at[(*place, there, columns)]
            plgpu.copy_smem_to_gmem(memory.out_smem.at[there], to)
        else:
            refs.out[(*place, rows, columns)] = acc
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
