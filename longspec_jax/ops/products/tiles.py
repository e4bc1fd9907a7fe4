"""Tile choice of the skinny products' kernels, from the shape alone.

Nothing is timed at run time. The sweeps behind the numbers are kept in ``docs/results``.
"""

import dataclasses

from longspec_jax.ops.hardware import HOPPER, MULTIPROCESSORS, SHARED_BYTES, WARPGROUP_ROWS

MATRIX_ROWS = 16
"""Rows that the kernel for 8-bit weights multiplies together: the height of Ampere's matrix
instruction."""


@dataclasses.dataclass(frozen=True)
class ProductTile:
    """How one program of the skinny matrix product works.

    Attributes:
      columns: columns of the product a program owns, of each of two where they are gated.
      depth: contracted rows of the weights per step.
      splits: programs that share a strip of columns, each with a part of the contraction.
      stages: depth of the ring of blocks in shared memory.
    """

    columns: int
    depth: int
    splits: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Int8Tile:
    """How one program of the product with 8-bit weights works.

    Attributes:
      outputs: outputs of a program, of each of two products where they are gated.
      depth: elements of the contracted axis per step.
      splits: programs that share outputs, each with a part of the contraction.
      warps: warps per program.
      stages: depth of the software pipeline.
    """

    outputs: int
    depth: int
    splits: int
    warps: int
    stages: int


def product_tile(
    rows: int, contracted: int, columns: int, gated: bool = False, split: bool = False
) -> ProductTile | None:
    """Choose the tile of the skinny product kernel; None where XLA's product is as good.

    As many programs as there are multiprocessors, or a little fewer: 86 of them read nearly as fast
    as 132, and a second wave starts anew. Narrow strips are the slower ones, 64 columns a row of
    them (128 bytes) at the least.

    Args:
      rows: rows of the product, whole groups of 8 up to one instruction's 64.
      contracted: size of the contracted axis.
      columns: columns of the product, of each of two where they are gated.
      gated: whether there are two products of which one gates the other.
      split: whether the contraction may be split and leave summands.
    """
    if rows % 8 or not 0 < rows <= WARPGROUP_ROWS:
        return None
    fitting: list[tuple[int, int, int]] = []
    for width in (128,) if gated else (64, 128):
        for splits in (1, 2, 4) if split else (1,):
            programs = columns // width * splits
            if columns % width == 0 and contracted % (64 * splits) == 0 and programs >= 64:
                over = programs > MULTIPROCESSORS
                fitting.append((over * programs or -programs, splits, width))
    if not fitting:
        return None
    _, splits, width = min(fitting)
    depth = 128 if width == 64 and contracted % (128 * splits) == 0 else 64
    room = SHARED_BYTES[HOPPER] - WARPGROUP_ROWS * width * 4 - 1024
    stage = 2 * depth * (WARPGROUP_ROWS + width * (2 if gated else 1))
    return ProductTile(width, depth, splits, min(room // stage, contracted // splits // depth))


def int8_tile(
    rows: int, contracted: int, outputs: int, gated: bool = False, split: bool = False
) -> Int8Tile | None:
    """Choose the tile of the product with 8-bit weights; None where XLA's product is as good.

    Args:
      rows: rows of the product.
      contracted: size of the contracted axis.
      outputs: outputs of the product, of each of two where they are gated.
      gated: whether there are two products of which one gates the other.
      split: whether the contraction may be split and leave summands.
    """
    if rows > MATRIX_ROWS:
        return None
    if split and outputs <= 32 * MULTIPROCESSORS and contracted <= 12288:
        return Int8Tile(32, 256, 4, 4, 4)
    if split and outputs <= 64 * MULTIPROCESSORS:
        return Int8Tile(64, 256, 4, 4, 3)
    if split and outputs <= 128 * MULTIPROCESSORS:
        return Int8Tile(64, 256, 2, 4, 3)
    if gated:
        return Int8Tile(32, 256, 1, 4, 3)
    if outputs < 128 * MULTIPROCESSORS:
        return Int8Tile(32, 256, 1, 4, 4)
    return Int8Tile(64, 256, 1, 4, 3)
