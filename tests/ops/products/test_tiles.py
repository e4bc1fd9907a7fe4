"""Tiles of the skinny products: what is chosen fits the machine and is not slower."""

import pytest

from longspec_jax.ops import hardware
from longspec_jax.ops.products.tiles import MATRIX_ROWS, int8_tile, product_tile


def test_product_tile_fills_the_machine_once() -> None:
    for contracted, columns, gated, split in (
        (4096, 12288, False, False),
        (4096, 6144, False, False),
        (5120, 7168, False, False),
        (4096, 4096, False, True),
        (5120, 5120, False, True),
        (27648, 5120, False, True),
        (14336, 4096, False, True),
        (4096, 14336, True, False),
    ):
        tile = product_tile(64, contracted, columns, gated=gated, split=split)
        assert tile is not None
        assert 80 <= columns // tile.columns * tile.splits <= hardware.MULTIPROCESSORS
        assert contracted % (tile.splits * tile.depth) == 0
        stage = 2 * tile.depth * (64 + tile.columns * (1 + gated))
        assert 2 <= tile.stages and tile.stages * stage <= hardware.SHARED_BYTES[(9, 0)]


@pytest.mark.parametrize(
    ("rows", "contracted", "columns"),
    [(1, 4096, 4096), (69, 4096, 4096), (72, 4096, 4096), (64, 256, 256), (64, 4096, 4100)],
)
def test_other_products_are_left_to_xla(rows: int, contracted: int, columns: int) -> None:
    for gated in (False, True):
        assert product_tile(rows, contracted, columns, gated=gated) is None


@pytest.mark.parametrize(("gated", "split"), [(False, False), (True, False), (False, True)])
def test_int8_tiles_fill_any_machine_that_they_run_on(gated: bool, split: bool) -> None:
    """Programs enough, and shared memory where there is least of it."""
    for contracted, outputs in ((4096, 4096), (4096, 8192), (5120, 10240), (27648, 5120)):
        tile = int8_tile(MATRIX_ROWS, contracted, outputs, gated=gated, split=split)
        assert tile is not None and (tile.splits > 1) == split
        assert -(-outputs // tile.outputs) * tile.splits >= 80
        stage = tile.depth * (2 * MATRIX_ROWS + tile.outputs * (1 + gated))
        assert tile.stages * stage <= min(hardware.SHARED_BYTES.values())
    assert int8_tile(MATRIX_ROWS + 1, 4096, 4096) is None


@pytest.mark.parametrize(
    ("contracted", "outputs", "programs"),
    [
        (4096, 4096, (32, 4)),
        (11008, 4096, (32, 4)),
        (14336, 4096, (64, 4)),
        (27648, 5120, (64, 4)),
        (4096, 8192, (64, 4)),
        (5120, 10240, (64, 2)),
    ],
)
def test_int8_summands_take_the_fastest_tile_of_the_sweep(
    contracted: int, outputs: int, programs: tuple[int, int]
) -> None:
    """docs/results/draft_tiles_h200.json, the last run."""
    tile = int8_tile(MATRIX_ROWS, contracted, outputs, split=True)
    assert tile is not None and (tile.outputs, tile.splits) == programs
