"""A program of the prefix's Hopper kernel: what its warpgroups share, fetch and hand over.

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
16 bits: one for keys and one for values, or one for both with two that attend to 128 slots. Those
do what they do with a whole cache, in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Ref
from longspec_jax.ops.attention.path import SEGMENT
from longspec_jax.ops.attention.prefix_items import Item, Part, Work
from longspec_jax.ops.attention.tiles import MosaicTile
from longspec_jax.ops.attention.widening import BLOCK
from longspec_jax.ops.hardware import WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class PrefixOperands:
    """The kernel's operands and results in device memory."""

    bounds: Ref
    limit: Ref
    q: Ref
    k: Ref
    v: Ref
    out: Ref
    lse: Ref


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the warpgroups of a program share.

    Queries and log-sum-exps have a place for each warpgroup, keys and values one for each stage of
    the ring. ``ready`` says that a place was filled, ``free`` that all have read it. ``turn`` hands
    the tensor cores to the other warpgroup; ``clean`` says that the values beyond the length are 0.
    A cache in 8 bits comes into rings of codes.
    """

    q_smem: Ref
    k_smem: Ref
    v_smem: Ref
    lse_smem: Ref
    out_smem: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    turn: Ref
    clean: Ref
    k_codes: Ref = None
    v_codes: Ref = None


@dataclasses.dataclass(frozen=True)
class Share:
    """What a warpgroup does of an item.

    ``part`` is its split and ``lane`` its place among the two of a light item; ``beside`` are the
    steps that the other warpgroup takes on blocks of its own, and None where no item is light.
    """

    part: Part
    lane: jax.Array | int
    beside: jax.Array | None


@dataclasses.dataclass(frozen=True)
class PrefixProgram:
    """One warpgroup of one program."""

    work: Work
    tokens: int | None
    """Tokens of a head's packed rows, whole segments, where queries are not packed."""
    refs: PrefixOperands
    memory: Memory
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

    def share(self, item: Item) -> Share:
        """This warpgroup's share of an item."""
        first, second = item.first, item.second
        if second is None:
            return Share(first, 0, None)
        lane = jnp.where(item.light, self.warpgroup, 0)
        part = Part(*(jnp.where(lane == 1, *of) for of in zip(second, first, strict=True)))
        return Share(part, lane, jnp.where(item.light, item.steps - part.steps, 0))

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
        slot = self.slot(part.lower + step * tile.slots, tile.slots)
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
                slot = self.slot(part.lower + step * self.tile.slots + ahead, BLOCK)
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

    def slot(self, position: jax.Array, size: int) -> jax.Array:
        """Where a block of this size lies that begins at a position: a ring holds whole blocks."""
        if self.work.span is not None:
            position = jax.lax.rem(position, self.refs.k.shape[2])
        return pl.multiple_of(position, size)

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
        groups, of_a_head = q.shape[3], self.tokens // SEGMENT
        for place in range(WARPGROUP_ROWS // SEGMENT):
            # Rows that do not exist stand for some that do; their results are not read.
            segment = jnp.minimum(jax.lax.div(first, SEGMENT) + place, groups * of_a_head - 1)
            group = jax.lax.div(segment, of_a_head)
            some = pl.ds(jax.lax.rem(segment, of_a_head) * SEGMENT, SEGMENT)
            part = to.at[pl.ds(place * SEGMENT, SEGMENT)]
            plgpu.copy_gmem_to_smem(q.at[item.batch, item.kv_head, some, group], part, ready)

    def begin_second(self, item: Item, share: Share) -> None:
        """Let the first warpgroup multiply its first keys."""
        self.take_turn()
        self.give_back_keys(item, share, 0)

    def stand_by(self, item: Item, share: Share, step: jax.Array) -> None:
        """Take the second warpgroup's turns of a step that only the first one has."""
        self.take_turn()
        self.give_back_values(item, share, step)
        self.take_turn()
        self.give_back_keys(item, share, step + 1)

    def end_first(self, item: Item, share: Share) -> None:
        """Let the second warpgroup multiply its last values."""
        self.take_turn()
        self.give_back_values(item, share, item.first.steps - 1)

    def give_back_keys(self, item: Item, share: Share, step: jax.Array | int) -> None:
        """Give back, unread, the keys of a step of the other warpgroup, if it has that step."""
        self.give_back(item, share, step, self.memory.k_ready, self.memory.k_free)

    def give_back_values(self, item: Item, share: Share, step: jax.Array | int) -> None:
        """Give back, unread, the values of a step of the other warpgroup, if it has that step."""
        self.give_back(item, share, step, self.memory.v_ready, self.memory.v_free)

    def give_back(
        self, item: Item, share: Share, step: jax.Array | int, ready: Ref, free: Ref
    ) -> None:
        """Wait for a block that is the other warpgroup's and let go of it."""
        if share.beside is None:
            return
        stage = self.ring(item, step, 1 - share.lane)

        @pl.when(jnp.logical_and(step >= 0, step < share.beside))
        def _() -> None:
            plgpu.barrier_wait(ready.at[stage])
            plgpu.barrier_arrive(free.at[stage])

    def wait_for_keys(self, item: Item, share: Share, step: jax.Array | int) -> None:
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
