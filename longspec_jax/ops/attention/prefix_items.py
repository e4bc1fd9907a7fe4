"""What the Hopper prefix kernel does, item by item, and in which order.

An item is what a program does at a time: one row tile of one key/value head against one split of
the cache. Where the last row tile has rows for one of two warpgroups only, its items are two
neighbouring splits each, and both warpgroups attend to the same 64 rows, each to a split of its
own: many rows then take half of the time, and every split has the results it always had.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longspec_jax.ops.attention.tiles import MosaicTile, RowTiles
from longspec_jax.ops.hardware import WARPGROUP_ROWS


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
      kv_head: the key/value head.
      row: the first of the packed rows.
      light: whether both warpgroups attend to the same rows, each to a split of its own.
      first: the split, of a light item the first warpgroup's.
      second: of a light item the second warpgroup's split, otherwise one without a slot; None where
        no item is light.
      past: steps in the ring that the program's earlier items took.
    """

    batch: jax.Array
    kv_head: jax.Array
    row: jax.Array
    light: jax.Array | bool
    first: Part
    second: Part | None
    past: jax.Array

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
      scale: factor on the scores, in base 2.
    """

    tile: MosaicTile
    batch: int
    kv_heads: int
    rows: int
    slots: int
    scale: float

    @property
    def row_tiles(self) -> RowTiles:
        """How the rows of a key/value head are shared out."""
        return RowTiles(self.rows, self.tile.warpgroups)

    @property
    def splits(self) -> int:
        """Splits of the cache."""
        return math.ceil(self.slots / self.tile.split)

    @property
    def items(self) -> int:
        """Items of all key/value heads."""
        return self.batch * self.kv_heads * self.row_tiles.items(self.splits)

    @property
    def programs(self) -> int:
        """Programs that share the work."""
        return min(self.tile.programs, self.items)

    def item(self, index: jax.Array, lengths: Any, past: jax.Array) -> Item:
        """The item of this number, without a slot where there are fewer; ``lengths`` in memory.

        Items that share splits are neighbours, so that keys and values come from memory once: all
        row tiles of a split, those of the next one, and between them the light item of both.
        """
        tiles, lighter = self.row_tiles.count, self.row_tiles.lighter
        head, index_of_head = _divided(index, self.row_tiles.items(self.splits))
        pair, index_of_pair = _divided(index_of_head, 2 * tiles - lighter)
        beside, row_tile = _divided(index_of_pair, tiles)
        split = 2 * pair + beside
        batch, kv_head = _divided(head, self.kv_heads)
        batch = jnp.minimum(batch, self.batch - 1)
        length = jnp.where(index < self.items, jnp.minimum(lengths[batch], self.slots), 0)
        light, second = False, None
        if lighter:
            light = row_tile == tiles - 1
            second = self._part(split + 1, jnp.where(light, length, 0))
        return Item(
            batch=batch,
            kv_head=kv_head,
            row=row_tile * (self.tile.warpgroups * WARPGROUP_ROWS),
            light=light,
            first=self._part(split, length),
            second=second,
            past=past,
        )

    def _part(self, split: jax.Array, length: jax.Array) -> Part:
        """What ``length`` lets a row see of a split."""
        lower = split * self.tile.split
        seen = jnp.clip(length - lower, 0, self.tile.split)
        steps = jax.lax.div(seen + (self.tile.slots - 1), self.tile.slots)
        return Part(split, lower, seen, jax.lax.div(seen, self.tile.slots), steps)


def _divided(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of numbers that are not negative."""
    return jax.lax.div(number, by), jax.lax.rem(number, by)
