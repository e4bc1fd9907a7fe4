"""Tiles of the attention kernels: pure functions of the shape that the hardware can take."""

import pytest

from longspec_jax.ops.attention import tiles
from tests.ops.attention.oracle import HEADS, TOKENS


def test_prefix_tile_is_pure_and_bounded_by_the_capacity() -> None:
    for capacity in (64, 128, 192, 4096, 33024, 131072):
        for tokens in TOKENS:
            for heads, kv_heads in HEADS:
                call = (tokens, heads, kv_heads, 128, capacity, 2, (9, 0))
                tile = tiles.prefix_tile(*call)
                assert tile == tiles.prefix_tile(*call)
                assert tile.split % tile.slots == 0
                # Partial results stay small beside the cache they summarise.
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
        tile = tiles.mosaic_prefix_tile(tokens, heads, kv_heads, 32768)
        row_tiles = tiles.RowTiles(tokens * heads // kv_heads, tile.warpgroups)
        assert -(-32768 // tile.split) == splits
        assert row_tiles.items(splits) == items <= tile.programs // kv_heads
        assert row_tiles.items(splits + 1) > tile.programs // kv_heads


def test_tiles_refuse_what_the_hardware_cannot_take() -> None:
    with pytest.raises(ValueError, match="row parts"):
        tiles.PrefixTile((48,), 64, 128, 4, 3)
    with pytest.raises(ValueError, match="divide the split"):
        tiles.PrefixTile((64,), 64, 96, 4, 3)
    with pytest.raises(ValueError, match="warpgroups"):
        tiles.MosaicTile(4, 64, 128, 3)
    with pytest.raises(ValueError, match="power of two"):
        tiles.TreeTile(16, 64, 3, 4, 2)
