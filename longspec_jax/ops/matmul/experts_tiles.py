"""How the MLPs of chosen experts are cut into the programs of a Hopper GPU.

As in :mod:`longspec_jax.ops.matmul.quantised_tiles`, with outputs as rows of the matrix instruction
and tokens as its columns. A *row tile* holds up to ``height`` of the rows that chose one expert. An
expert that no row chose has no tile. How many tiles there are is known only on the device, so the
programs share them out there.

A sum runs over the contraction from its start to its end, whatever the tile: a row has the same
bits alongside any others.
"""

import dataclasses

from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile, Work

GROUP = 8
"""Rows of the least tile: what the copy engine takes whole."""
HIGHEST = 128
"""Rows of the largest tile: the accumulators of a gate's two matmuls fill a thread's registers."""
_SPARE = 1.5
"""Height of a tile over the mean number of rows of an expert. An expert with more rows than a tile
has several, whose programs read the same weights at the same time."""
FLOAT_GROUP = 32
"""Inputs that share a scale of 4-bit floats."""
_BARRIER_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class ExpertWork(Work):
    """The units of a matmul of all row tiles; ``rows`` are those of a tile.

    Attributes:
      tiles: the most row tiles.
      packed: whether weights are 4-bit floats, with a scale of 16 bits for every group of inputs.
    """

    tiles: int = 1
    packed: bool = False

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply, one for each 64 outputs of a strip."""
        return self.tile.columns // WARPGROUP_ROWS

    @property
    def row_tiles(self) -> int:
        """The most row tiles."""
        return self.tiles

    @property
    def programs(self) -> int:
        """Programs, some of which may find nothing to do."""
        return min(self.units, MULTIPROCESSORS)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one step's rows and weights."""
        depth, outputs = self.tile.depth, self.tile.columns * self.parts
        of_output = depth // 2 + 2 * self.groups if self.packed else 2 * depth
        return 2 * depth * self.rows + outputs * of_output

    @property
    def copies(self) -> int:
        """Copies that bring a step's weights, of each of two matmuls where they are gated."""
        return 2 if self.packed else 1

    @property
    def groups(self) -> int:
        """Groups of inputs of a step's packed weights."""
        return self.tile.depth // FLOAT_GROUP

    @property
    def other_bytes(self) -> int:
        """Shared memory of the result and of barriers."""
        return self.rows * self.tile.columns * self.out_bytes + _BARRIER_BYTES


def expert_work(
    height: int,
    tiles: int,
    contracted: int,
    outputs: int,
    *,
    gated: bool = False,
    packed: bool = False,
) -> ExpertWork:
    """The work of one of the two matmuls.

    Args:
      height: rows of a tile.
      tiles: the most row tiles.
      contracted: inputs of an expert.
      outputs: outputs of an expert, of each of two matmuls where they are gated.
      gated: whether there are two matmuls, one of which gates the other.
      packed: whether weights are 4-bit floats. Two warpgroups widen them.

    Raises:
      NotImplementedError: if a size is not a multiple of 64.
    """
    for size in (contracted, outputs):
        if size % WARPGROUP_ROWS:
            raise NotImplementedError(
                f"the kernel for experts takes widths in multiples of {WARPGROUP_ROWS}, not {size}"
            )
    parts = 2 if gated else 1
    columns = 128 if packed or (outputs % 128 == 0 and not gated) else 64
    depth = 128 if packed or columns * parts == 64 else 64
    tile = MatmulTile(columns, 1, depth)
    return ExpertWork(height, contracted, outputs, tile, parts, tiles=tiles, packed=packed)


def tile_height(rows: int, chosen: int, experts: int) -> int:
    """Rows of a tile: a power of two from 8 to 128."""
    height = GROUP
    while height < min(HIGHEST, rows, _SPARE * rows * chosen / experts):
        height *= 2
    return height


def most_tiles(pairs: int, experts: int, height: int) -> int:
    """Row tiles that some pairs of a row and an expert may need at the most."""
    reached = min(pairs, experts)
    return reached + (pairs - reached) // height
