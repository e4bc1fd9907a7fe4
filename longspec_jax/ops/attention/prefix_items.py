"""What the Hopper prefix kernel does, item by item, and in which order.

An item is what a program does at a time: one row tile of one key/value head against one split of
the cache. Where the last row tile has rows for one of two warpgroups only, its items are two
neighbouring splits each, and both warpgroups attend to the same 64 rows, each to a split of its
own: many rows then take half of the time, and every split has the results it always had.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.attention.tiles import MosaicTile, RowTiles
from longspec_jax.ops.hardware import WARPGROUP_ROWS


class Bounds(NamedTuple):
    """What the packed rows of a batch row see, and its splits."""

    least: jax.Array
    """Slots that every packed row sees; in a layer with a window where the least limit is."""
    most: jax.Array
    """Slots that some packed row sees; in a layer with a window where the greatest limit is."""
    split: jax.Array
    """Slots of a split; whole steps."""
    cache_row: jax.Array
    """The row of the cache that it reads."""

    @classmethod
    def packed(
        cls, least: Array, most: Array, split: Array, cache_rows: Array | None
    ) -> Int[Array, "B 4"]:
        """The items of all batch rows, as the kernel reads them; by default each its own."""
        if cache_rows is None:
            cache_rows = jnp.arange(len(least))
        return jnp.stack([least, most, split, cache_rows.astype(jnp.int32)], axis=1)


class Part(NamedTuple):
    """One split of an item.

    ``seen`` slots from ``lower`` on take ``whole`` unmasked and ``steps`` steps in all.
    """

    split: jax.Array
    lower: jax.Array
    seen: jax.Array
    whole: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Item:
    """A piece of work: a row tile of a key/value head against one split, or against two.

    Attributes:
      batch: the row of the batch.
      cache_row: the row of keys and values.
      kv_head: the key/value head.
      columns: which part of the values' columns.
      row: the first of the packed rows.
      light: whether both warpgroups attend to the same rows, each to a split of its own.
      first: the split, of a light item the first warpgroup's.
      second: of a light item the second warpgroup's split, otherwise one without a slot; None where
        no item is light.
      past: steps in the ring that the program's earlier items took.
      oldest: the first position that a packed row sees, in a layer with a window; otherwise None.
    """

    batch: jax.Array
    cache_row: jax.Array
    kv_head: jax.Array
    columns: jax.Array
    row: jax.Array
    light: jax.Array | bool
    first: Part
    second: Part | None
    past: jax.Array
    oldest: jax.Array | None = None

    @property
    def steps(self) -> jax.Array:
        """Steps in the ring."""
        return self.first.steps if self.second is None else self.first.steps + self.second.steps

    def place(self, step: jax.Array | int, lane: jax.Array | int) -> jax.Array:
        """Where in the ring a step of the first split is (lane 0), or one of the second (lane 1).

        The two splits alternate, and the first, which is never the shorter one, ends alone.
        """
        if self.second is None:
            return self.past + step
        return self.past + step + jnp.minimum(step, self.second.steps) + lane


@dataclasses.dataclass(frozen=True)
class Work:
    """What all programs do together, known when they are compiled.

    Attributes:
      tile: how one program works.
      batch: rows of the batch.
      kv_heads: key/value heads.
      rows: packed query rows of a key/value head, whole warpgroups.
      slots: capacity of the cache.
      splits: most splits of a row.
      scale: factor on the scores, in base 2.
      turns: groups of splits that follow one another, each of all key/value heads. Where only the
        first ones are reached, programs have equal shares of these.
      parts: programs that share an item, each with a part of the values' columns. Few rows leave
        multiprocessors idle otherwise, and a column's result does not depend on the others.
      span: slots before its limit that a row sees, in a layer with a window, whose slots are a
        ring: position ``p`` lies in slot ``p % slots``. None where a row sees all of them.
      cap: bounds the scores softly, if there is one; natural.
    """

    tile: MosaicTile
    batch: int
    kv_heads: int
    rows: int
    slots: int
    splits: int
    scale: float
    turns: int = 1
    parts: int = 1
    span: int | None = None
    cap: float | None = None

    @property
    def row_tiles(self) -> RowTiles:
        """How the rows of a key/value head are shared out."""
        return RowTiles(self.rows, self.tile.warpgroups)

    @property
    def items(self) -> int:
        """Items of all key/value heads."""
        return self.turns * self._items_of_a_turn * self.parts

    @property
    def _items_of_a_turn(self) -> int:
        """Items of all key/value heads in a turn's splits, each with all columns."""
        splits = self.splits // self.turns
        return self.batch * self.kv_heads * self.row_tiles.items(splits)

    @property
    def programs(self) -> int:
        """Programs that share the work."""
        return min(self.tile.programs, self.items)

    def item(self, index: jax.Array, bounds: Ref, past: jax.Array) -> Item:
        """The item of this number, without a slot where there are fewer.

        ``bounds`` are the fields of :class:`Bounds`, ``[B, 4]`` in memory.

        Items that share splits are neighbours, so that keys and values come from memory once: all
        row tiles of a split, those of the next one, and between them the light item of both.
        """
        tiles, lighter = self.row_tiles.count, self.row_tiles.lighter
        exists = index < self.items
        index, columns = _divided(index, self.parts)
        turn, index = _divided(index, self._items_of_a_turn)
        splits = self.splits // self.turns
        head, index_of_head = _divided(index, self.row_tiles.items(splits))
        pair, index_of_pair = _divided(index_of_head, 2 * tiles - lighter)
        beside, row_tile = _divided(index_of_pair, tiles)
        split = turn * splits + 2 * pair + beside
        batch, kv_head = _divided(head, self.kv_heads)
        batch = jnp.minimum(batch, self.batch - 1)
        own = Bounds(*(bounds[batch, field] for field in range(4)))
        oldest, most = None, own.most
        if self.span is None:
            most = jnp.minimum(most, self.slots)
        else:
            oldest = jnp.maximum(own.least - self.span, 0)
        seen = own._replace(most=jnp.where(exists, most, 0))
        light, second = False, None
        if lighter:
            light = row_tile == tiles - 1
            both = jnp.logical_and(light, 2 * pair + 1 < splits)
            beyond = seen._replace(most=jnp.where(both, seen.most, 0))
            second = self._part(split + 1, beyond)
        return Item(
            batch=batch,
            cache_row=own.cache_row,
            kv_head=kv_head,
            columns=columns,
            row=row_tile * (self.tile.warpgroups * WARPGROUP_ROWS),
            light=light,
            first=self._part(split, seen),
            second=second,
            past=past,
            oldest=oldest,
        )

    def _part(self, split: jax.Array, bounds: Bounds) -> Part:
        """What the bounds let rows see of a split."""
        if self.span is not None:
            return self._part_of_window(split, bounds, self.span)
        slots, lower = self.tile.slots, split * bounds.split
        seen = jnp.clip(bounds.most - lower, 0, bounds.split)
        sure = jnp.clip(jnp.minimum(bounds.least, bounds.most) - lower, 0, bounds.split)
        steps = jax.lax.div(seen + (slots - 1), slots)
        return Part(split, lower, seen, jax.lax.div(sure, slots), steps)

    def _part_of_window(self, split: jax.Array, bounds: Bounds, span: int) -> Part:
        """Likewise in a layer with a window, whose first split is that of the first visible slot.

        Rows see different slots of any step, so that all steps are masked.
        """
        slots, oldest = self.tile.slots, jnp.maximum(bounds.least - span, 0)
        first = oldest - jax.lax.rem(oldest, slots)
        lower = begin = (jax.lax.div(first, bounds.split) + split) * bounds.split
        if not self.row_tiles.lighter:  # Of a light item the first split is never the shorter one.
            lower = jnp.maximum(begin, first)
        seen = jnp.clip(bounds.most - lower, 0, begin + bounds.split - lower)
        steps = jax.lax.div(seen + (slots - 1), slots)
        return Part(split, lower, seen, jnp.zeros_like(steps), steps)


def _divided(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of numbers that are not negative."""
    return jax.lax.div(number, by), jax.lax.rem(number, by)
