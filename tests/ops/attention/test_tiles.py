"""Tiles of the attention kernels, and how the Hopper prefix kernel divides its work."""

import collections

import jax.numpy as jnp

from longspec_jax.ops.attention import tiles
from longspec_jax.ops.attention.prefix_items import Item, Work
from longspec_jax.ops.attention.tiles import MosaicTile
from tests.kit import each_row
from tests.ops.attention.oracle import HEADS, TOKENS

SPLIT = 256


def test_prefix_tile_is_pure_and_bounded_by_the_capacity() -> None:
    for capacity in (64, 128, 192, 4096, 33024, 131072):
        for tokens in TOKENS:
            for heads, kv_heads in HEADS:
                call = (tokens, heads, kv_heads, 128, capacity, 2, (9, 0))
                tile = tiles.prefix_tile(*call)
                assert tile == tiles.prefix_tile(*call)
                assert tile.split % tile.slots == 0
                # Partial results stay small compared with the cache they summarise.
                assert -(-capacity // tile.split) <= 64


def test_the_programs_of_the_hopper_kernel_have_one_item_each() -> None:
    """As many splits as that allows: half an item each for the rows of one of two warpgroups."""
    for tokens, heads, kv_heads, splits, items in (
        (64, 32, 8, 8, 16),
        (69, 32, 8, 6, 2 * 6 + 3),
        (64, 40, 8, 6, 2 * 6 + 3),
        (48, 32, 8, 10, 10 + 5),
        (64, 28, 4, 9, 3 * 9 + 5),
        (69, 32, 32, 4, 4),
    ):
        tile = tiles.mosaic_prefix_tile(tokens, heads, kv_heads, 128, 32768)
        row_tiles = tiles.RowTiles(tokens * heads // kv_heads, tile.warpgroups)
        assert -(-32768 // tile.split) == splits
        assert row_tiles.items(splits) == items <= tile.programs // kv_heads
        assert row_tiles.items(splits + 1) > tile.programs // kv_heads


def items(
    warpgroups: int, groups: int, slots: int, lengths: list[int], turns: int = 1
) -> tuple[Work, list[Item]]:
    """All items of three key/value heads, and one number more than there are."""
    tile, batch = MosaicTile(warpgroups, 128, SPLIT, 2), len(lengths)
    sizes = {"rows": 64 * groups, "slots": slots, "splits": turns * -(-slots // SPLIT // turns)}
    work = Work(tile, batch=batch, kv_heads=3, scale=1.0, turns=turns, **sizes)
    bounds = jnp.asarray([[length, length, SPLIT, 5 - row] for row, length in enumerate(lengths)])
    past, found = jnp.int32(0), []
    for index in range(work.items + 1):
        found.append(work.item(jnp.int32(index), bounds, past))
        past += found[-1].steps
    return work, found


@each_row("turns", [1, 2])
@each_row("slots", [256, 1000, 1280])
@each_row(("warpgroups", "groups"), [(1, 1), (2, 1), (2, 2), (2, 3), (2, 5)])
def test_every_row_attends_to_every_split_once(
    warpgroups: int, groups: int, slots: int, turns: int
) -> None:
    """In turns: of all heads the first half of the splits before the second."""
    work, found = items(warpgroups, groups, slots, [slots, slots + 7], turns)
    assert int(found.pop().steps) == 0
    turn_of = [2 * int(item.first.split) // work.splits for item in found]
    assert turns == 1 or turn_of == sorted(turn_of)
    seen = collections.Counter()
    for item in found:
        for lane, part in enumerate((item.first, item.second)):
            if part is None or part.steps == 0:
                continue
            assert lane == 0 or item.light
            assert int(item.cache_row) == 5 - int(item.batch)
            rows = [int(item.row) // 64 + i for i in range(1 if item.light else warpgroups)]
            for group in rows:
                if group < groups:
                    seen[int(item.batch), int(item.kv_head), group, int(part.split)] += 1
            assert int(part.lower) == int(part.split) * SPLIT
            assert int(part.seen) == min(SPLIT, slots - int(part.lower))
            assert int(part.whole) == int(part.seen) // 128
            assert int(part.steps) == -(-int(part.seen) // 128)
    assert len(seen) == 2 * 3 * groups * -(-slots // SPLIT) and set(seen.values()) == {1}


def test_rows_of_their_own_bounds_and_splits() -> None:
    """All see the slots up to the least, some up to the most; halves of columns are neighbours."""
    tile = MosaicTile(1, 64, 64, 2)
    work = Work(tile, batch=2, kv_heads=1, rows=64, slots=640, splits=3, scale=1.0, parts=2)
    bounds = jnp.asarray([[70, 140, 128, 0], [0, 0, 64, 1]])
    found = [work.item(jnp.int32(index), bounds, jnp.int32(0)) for index in range(work.items)]
    assert [int(item.columns) for item in found] == [0, 1] * 6
    parts = [
        tuple(map(int, (item.first.lower, item.first.seen, item.first.whole, item.first.steps)))
        for item in found[::2]
    ]
    assert parts[:3] == [(0, 128, 1, 2), (128, 12, 0, 1), (256, 0, 0, 0)]
    assert all(part[3] == 0 for part in parts[3:])


@each_row("length", [0, 1, 128, 129, 256, 257, 384, 500, 512])
def test_the_ring_has_a_place_for_every_step_in_the_order_of_fetching(length: int) -> None:
    _, found = items(2, 3, 2 * SPLIT, [length])
    for item in found:
        assert item.second is not None and int(item.first.steps) >= int(item.second.steps)
        places = []
        for step in range(int(item.first.steps)):
            places.append(int(item.place(step, 0)))
            if step < int(item.second.steps):
                places.append(int(item.place(step, 1)))
        past = int(item.past)
        assert places == list(range(past, past + int(item.steps)))
