"""How a matmul of few rows is cut into the programs of a Hopper GPU.

A *strip* is a block of columns of the result. A *unit* is what a program computes at a time: the
rows of one row tile, one strip, and one split of the contraction. A program takes its units in
turns, and all programs take as many turns as each other, or one less.

A result's order of summation follows from where the contraction is split. So the tile is a function
of only the weights' shape: with it, a row of the result has the same bits however many rows there
are. Only what changes no sum depends on the rows: the height of a row tile, the depth of the ring,
and the number of programs.
"""

import dataclasses
import functools

from longspec_jax.ops.hardware import HOPPER, MULTIPROCESSORS, SHARED_BYTES, WARPGROUP_ROWS

WHOLE, HALF = 64, 32
"""Weights whose size is not a multiple of the first cannot be fetched in swizzled blocks of 64
columns; if it is not a multiple of the second, not in blocks of 32 columns either."""
FULL_RATE_PROGRAMS = 72
"""As many programs read the weights at nearly the full rate: what fits the times of 21 shapes best
(``docs/archive/kernels.md``)."""
SLOWDOWN = {32: 1.15, 64: 1.03, 128: 1.0, 192: 1.0}
"""Time of reading narrow strips over that of wide ones, by their columns."""
_PARTIAL_ROWS = 16
"""Rows for which the cost of split-K partials is weighed against that of reading the weights."""
_BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class MatmulTile:
    """What of the weights a unit reads.

    Attributes:
      columns: columns of a strip; of each of two matmuls where one gates the other.
      splits: parts of the contraction, whose results are added up by who reads them.
      depth: contracted rows that are fetched at a time.
    """

    columns: int
    splits: int
    depth: int


@dataclasses.dataclass(frozen=True)
class Work:
    """The units of a matmul of ``[rows, contracted]`` by weights of ``[contracted, columns]``.

    Attributes:
      rows: rows of the result.
      contracted: size of the contracted axis.
      columns: columns of the result, of each of two matmuls where they are gated.
      tile: what of the weights a unit reads.
      parts: matmuls of a unit: two if one gates the other, otherwise one.
      head: whether the weights are an LM head, ``[columns, contracted]``.
    """

    rows: int
    contracted: int
    columns: int
    tile: MatmulTile
    parts: int = 1
    head: bool = False

    @property
    def full_rate_programs(self) -> int:
        """The fewest programs that read the weights at nearly the full rate."""
        return FULL_RATE_PROGRAMS

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply, one for each 64 rows of a row tile."""
        return 1 if self.rows <= WARPGROUP_ROWS else 2

    @property
    def row_tiles(self) -> int:
        """Row tiles, each of which reads all weights: the first from memory, others from L2."""
        return _ceil(self.rows, self.warpgroups * WARPGROUP_ROWS)

    @property
    def strips(self) -> int:
        """Strips of columns, the last of which may be narrower."""
        return _ceil(self.columns, self.tile.columns)

    @property
    def units(self) -> int:
        """Row tiles x strips x splits."""
        return self.row_tiles * self.strips * self.tile.splits

    @property
    def turns(self) -> int:
        """The most units of a program."""
        return _ceil(self.units, MULTIPROCESSORS)

    @property
    def programs(self) -> int:
        """Programs, all of which run at once."""
        return _ceil(self.units, self.turns)

    @property
    def steps(self) -> int:
        """Blocks of ``depth`` in the whole contraction, the last of which may be shallower."""
        return _ceil(self.contracted, self.tile.depth)

    @property
    def split_steps(self) -> int:
        """The most blocks of a split."""
        return _ceil(self.steps, self.tile.splits)

    @property
    def out_bytes(self) -> int:
        """Bytes of an element of the result: partials and logits are float32."""
        return 4 if self.head or self.tile.splits > 1 else 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one step's rows and weights."""
        columns = self.tile.columns * self.parts
        return 2 * self.tile.depth * (self.warpgroups * WARPGROUP_ROWS + columns)

    @property
    def other_bytes(self) -> int:
        """Shared memory of the result and of barriers."""
        out = self.warpgroups * WARPGROUP_ROWS * self.tile.columns * self.out_bytes
        return out + _BARRIER_BYTES

    @property
    def stages(self) -> int:
        """Places of the ring of blocks, which takes all other shared memory."""
        room = SHARED_BYTES[HOPPER] - self.other_bytes
        return max(2, min(room // self.stage_bytes, self.turns * self.split_steps))

    @property
    def program_bytes(self) -> int:
        """Weights that a program with all turns reads."""
        block = self.tile.depth * self.tile.columns * self.parts * 2
        return self.turns * self.split_steps * block

    def read(self) -> float:
        """Bytes that the machine could read in the time that the programs take to read theirs."""
        programs = max(self.programs, self.full_rate_programs)
        idle = 1 - self.programs / MULTIPROCESSORS
        return self.program_bytes * programs * (1 + 0.1 * idle) * SLOWDOWN[self.tile.columns]

    def cost(self) -> float:
        """As :meth:`read`, with the partials that are written and read again."""
        splits = self.tile.splits
        partials = 2 * 4 * _PARTIAL_ROWS * self.columns * splits if splits > 1 else 0
        return self.read() + partials


@functools.cache
def matmul_tile(
    contracted: int, columns: int, *, gated: bool = False, split: bool = False
) -> MatmulTile:
    """Choose the tile of weights ``[contracted, columns]`` only from their shape.

    Args:
      contracted: size of the contracted axis.
      columns: columns of the result, of each of two matmuls where they are gated.
      gated: whether there are two matmuls, one of which gates the other.
      split: whether the contraction may be split and leave partials.

    Raises:
      NotImplementedError: if a size is not a multiple of 32.
    """
    refuse_uneven(contracted, columns, whole=HALF)
    even = contracted % WHOLE == columns % WHOLE == 0
    parts = 2 if gated else 1
    most = min(8, _ceil(contracted, 256)) if split else 1
    tiles = [
        MatmulTile(width, splits, depth=128 if width * parts <= 64 else 64)
        for width in SLOWDOWN
        if even or width == HALF
        for splits in range(1, most + 1)
    ]
    # The rows are those of one instruction, whatever the call's: the choice must not see them.
    return min(
        tiles, key=lambda tile: Work(WARPGROUP_ROWS, contracted, columns, tile, parts).cost()
    )


@functools.cache
def head_tile(contracted: int, columns: int) -> MatmulTile:
    """Choose the tile of an LM head ``[columns, contracted]`` only from its shape.

    Raises:
      NotImplementedError: if ``contracted`` is not a multiple of 64 or ``columns`` of 8.
    """
    refuse_uneven_head(contracted, columns)
    tiles = [MatmulTile(width, 1, depth=64) for width in (64, 128)]
    return min(
        tiles, key=lambda tile: Work(WARPGROUP_ROWS, contracted, columns, tile, head=True).cost()
    )


def refuse_uneven(*sizes: int, whole: int = WHOLE) -> None:
    """Raise for axes that the copy engine cannot fetch in swizzled blocks."""
    for size in sizes:
        if size % whole:
            raise NotImplementedError(
                f"the Mosaic matmul takes weights in multiples of {whole}, not {size}"
            )


def refuse_uneven_head(contracted: int, columns: int) -> None:
    """Raise for an LM head that the copy engine cannot fetch in swizzled blocks."""
    refuse_uneven(contracted)
    if columns % 8:
        raise NotImplementedError(
            f"the Mosaic matmul takes vocabularies in multiples of 8, not {columns}"
        )


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
