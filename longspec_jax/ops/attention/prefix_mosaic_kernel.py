"""The kernel of :mod:`longspec_jax.ops.attention.prefix_mosaic`.

With grouped heads a tree of some 70 nodes makes the prefix compute-bound: 276 packed rows read each
key and value. This kernel keeps the tensor cores busy as FlashAttention-3 does: one warpgroup
fetches keys and values with the copy engine while the others, 64 packed rows each, take turns, one
in its softmax while the other multiplies.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.ops.attention.online_softmax import LOG2_E
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.hardware import WARPGROUP_ROWS

_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@dataclasses.dataclass(frozen=True)
class Work:
    """What all programs do together, known when they are compiled.

    Attributes:
      tile: how one program works.
      items: pieces of work, each one row tile of one key/value head against one split.
      row_tiles: row tiles of a key/value head.
      rows: packed query rows of a key/value head, whole warpgroups.
      splits: splits of the cache.
      kv_heads: key/value heads.
      slots: capacity of the cache.
      scale: factor on the scores, in base 2.
    """

    tile: MosaicTile
    items: int
    row_tiles: int
    rows: int
    splits: int
    kv_heads: int
    slots: int
    scale: float

    @property
    def programs(self) -> int:
        """Programs that share the work."""
        return min(self.tile.programs, self.items)


def memory(tile: MosaicTile, width: int, dtype: Any) -> dict[str, Any]:
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


def kernel(*refs: Any, work: Work, **memory: Any) -> None:
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
        program.each_item(program.attend_or_stand_by)

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
class _Item:
    """A piece of work: one row tile of one key/value head against one split.

    ``seen`` slots from ``lower`` on take ``whole`` unmasked and ``steps`` steps in all, after the
    ``past`` steps of the program's earlier items.
    """

    batch: jax.Array
    kv_head: jax.Array
    split: jax.Array
    row: jax.Array
    lower: jax.Array
    seen: jax.Array
    whole: jax.Array
    steps: jax.Array
    past: jax.Array


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

    def each_item(self, visit: Callable[[_Item], None]) -> None:
        """Call ``visit(item)`` for every item of this program that holds a slot its row sees.

        Items that share a split are neighbours, so that its keys and values come from memory once;
        the rotation by one per round gives every program its share of the last, lighter row tile.
        """
        work, tile, programs = self.work, self.tile, self.work.programs

        def step(turn_number: jax.Array, past: jax.Array) -> jax.Array:
            index = turn_number * programs + jax.lax.rem(self.index + turn_number, programs)
            rest = jax.lax.div(index, work.row_tiles)
            head = jax.lax.div(rest, work.splits)
            batch = jnp.minimum(jax.lax.div(head, work.kv_heads), self.refs.length.shape[0] - 1)
            split = jax.lax.rem(rest, work.splits)
            lower = split * tile.split
            length = jnp.minimum(self.refs.length[batch], work.slots)
            upper = jnp.minimum(length, lower + tile.split)
            seen = jnp.where(index < work.items, jnp.maximum(upper - lower, 0), 0)
            item = _Item(
                batch=batch,
                kv_head=jax.lax.rem(head, work.kv_heads),
                split=split,
                row=jax.lax.rem(index, work.row_tiles) * (tile.warpgroups * WARPGROUP_ROWS),
                lower=lower,
                seen=seen,
                whole=jax.lax.div(seen, tile.slots),
                steps=jax.lax.div(seen + (tile.slots - 1), tile.slots),
                past=past,
            )
            pl.when(seen > 0)(lambda: visit(item))
            return past + item.steps

        jax.lax.fori_loop(0, pl.cdiv(work.items, programs), step, jnp.int32(0))

    def attend_or_stand_by(self, item: _Item) -> None:
        """Attend with this warpgroup's rows, if the row tile has that many."""
        busy = item.row + self.warpgroup * WARPGROUP_ROWS < self.work.rows
        pl.when(busy)(lambda: self.attend(item))
        pl.when(jnp.logical_not(busy))(lambda: self.stand_by(item))

    def fetch(self, item: _Item) -> None:
        """Bring the item's keys and values, as soon as there is room in the ring."""
        refs, memory, tile = self.refs, self.memory, self.tile

        @pl.loop(0, item.steps)
        def _(step: jax.Array) -> None:
            stage = self.ring(item, step)
            used = item.past + step >= tile.stages
            block = (item.batch, item.kv_head, pl.ds(item.lower + step * tile.slots, tile.slots))
            pl.when(used)(lambda: plgpu.barrier_wait(memory.k_free.at[stage]))
            plgpu.copy_gmem_to_smem(
                refs.k.at[block], memory.k_smem.at[stage], memory.k_ready.at[stage]
            )
            pl.when(used)(lambda: plgpu.barrier_wait(memory.v_free.at[stage]))
            plgpu.copy_gmem_to_smem(
                refs.v.at[block], memory.v_smem.at[stage], memory.v_ready.at[stage]
            )

    def attend(self, item: _Item) -> None:
        """Attend with 64 rows to the item's split and write what they find."""
        memory, warpgroup, width = self.memory, self.warpgroup, self.refs.k.shape[3]
        first_row = item.row + warpgroup * WARPGROUP_ROWS
        plgpu.copy_gmem_to_smem(
            self.refs.q.at[item.batch, item.kv_head, pl.ds(first_row, WARPGROUP_ROWS)],
            memory.q_smem.at[warpgroup],
            memory.q_ready.at[warpgroup],
        )
        plgpu.barrier_wait(memory.q_ready.at[warpgroup])
        column = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), column)
        total = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), column)
        acc = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(memory.k_ready.at[self.ring(item, 0)])
        if self.alternate:
            pl.when(warpgroup == 1)(self.take_turn)
        state = (acc, top, total)
        whole = functools.partial(self.attend_to_step, item, edge=False)
        state = jax.lax.fori_loop(0, item.whole, whole, state)
        ragged = functools.partial(self.attend_to_step, item, edge=True)
        acc, top, total = jax.lax.fori_loop(item.whole, item.steps, ragged, state)
        if self.alternate:
            pl.when(warpgroup == 0)(self.take_turn)
        acc *= jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        memory.lse_smem[warpgroup] = top / LOG2_E + jnp.log(total)
        plgpu.commit_smem()
        place = (item.batch, item.split, item.kv_head, pl.ds(first_row, WARPGROUP_ROWS))
        plgpu.copy_smem_to_gmem(memory.lse_smem.at[warpgroup], self.refs.lse.at[place])
        self.refs.out[place] = acc
        plgpu.wait_smem_to_gmem(0)

    def attend_to_step(self, item: _Item, step: jax.Array, state: _State, edge: bool) -> _State:
        """Attend to one block of slots; ``edge`` if the row may not see all of them."""
        memory, tile = self.memory, self.tile
        acc, top, total = state
        stage = self.ring(item, step)
        scores = self.scores(item, step, stage, edge)
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
            _silence(memory.v_smem.at[stage], item.seen - step * tile.slots, self.warpgroup)
            plgpu.barrier_arrive(memory.clean)
            plgpu.barrier_wait(memory.clean)
        if self.alternate:
            plgpu.barrier_wait(memory.turn)  # The tensor cores are free.

        def multiply_values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, half, memory.v_smem.at[stage])

            @pl.when(step + 1 < item.steps)
            def _() -> None:
                plgpu.barrier_wait(memory.k_ready.at[self.ring(item, step + 1)])

        acc = pl.run_state(multiply_values)(_ACC.init(acc))
        plgpu.barrier_arrive(memory.v_free.at[stage])
        return acc, new_top, total

    def scores(self, item: _Item, step: jax.Array, stage: jax.Array, edge: bool) -> jax.Array:
        """Products of the queries with one block of keys, which is given back."""
        memory, tile = self.memory, self.tile

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
            scores = jnp.where(slot + step * tile.slots < item.seen, scores, -jnp.inf)
        return scores

    def stand_by(self, item: _Item) -> None:
        """Keep the barriers turning where the last row tile has fewer rows than warpgroups."""
        memory = self.memory
        if self.alternate:
            pl.when(self.warpgroup == 1)(self.take_turn)

        def visit(step: jax.Array, _: None, edge: bool) -> None:
            stage = self.ring(item, step)
            # Without these waits it would run ahead and release blocks that others still read.
            plgpu.barrier_wait(memory.k_ready.at[stage])
            self.take_turn()
            plgpu.barrier_arrive(memory.k_free.at[stage])
            plgpu.barrier_wait(memory.v_ready.at[stage])
            if edge:
                plgpu.barrier_arrive(memory.clean)
                plgpu.barrier_wait(memory.clean)
            self.take_turn()
            plgpu.barrier_arrive(memory.v_free.at[stage])

        jax.lax.fori_loop(0, item.whole, functools.partial(visit, edge=False), None)
        jax.lax.fori_loop(item.whole, item.steps, functools.partial(visit, edge=True), None)
        if self.alternate:
            pl.when(self.warpgroup == 0)(self.take_turn)

    def ring(self, item: _Item, step: jax.Array | int) -> jax.Array:
        """The stage of an item's step: the ring goes on from item to item."""
        return jax.lax.rem(item.past + step, self.tile.stages)

    def take_turn(self) -> None:
        """Wait until the other warpgroup is done, and let it wait for this one."""
        if self.alternate:
            plgpu.barrier_arrive(self.memory.turn)
            plgpu.barrier_wait(self.memory.turn)


def _silence(values: Any, count: jax.Array, warpgroup: jax.Array) -> None:
    """Zero the rows from ``count`` on: memory beyond the length may be NaN, and 0 NaN is NaN."""

    @pl.when(warpgroup == 0)
    def _() -> None:
        block = plgpu.load(values, layout=plgpu.Layout.WGMMA)  # pyright: ignore
        row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(row < count, block, jnp.zeros_like(block))
        plgpu.commit_smem()
