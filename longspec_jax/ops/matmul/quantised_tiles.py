"""How a matmul of quantised weights is cut into the programs of a Hopper GPU.

As in :mod:`longspec_jax.ops.matmul.ordered_tiles`, with outputs as rows of the matrix instruction
and tokens as its columns, in groups of 8 up to 128. The tile, and with it the order of summation,
follows only from the weights' shape.

With 8 or 4 bits the tokens are no small part of what a program reads: 64 of them are as many bytes
as a strip of 128 outputs has in 8 bits. They come from the second-level cache, once for every
strip. So the cost of a tile counts them (:meth:`QuantisedWork.cost`).
"""

import dataclasses
import functools

from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS
from longspec_jax.ops.matmul.ordered_tiles import MatmulTile, Work
from longspec_jax.ops.matmul.packed import BLOCK_BYTES, DEPTH, OPERAND
from longspec_jax.ops.matmul.quantised_weights import UNIT

MOST_TOKENS = 128
"""Tokens of one pass over the weights: the accumulators of a gate's two matmuls fill the rest of a
thread's registers."""
_WEIGHED_TOKENS = 32
"""Tokens for which a tile is chosen, whatever the call's: the choice must not see them."""
_CACHED = 0.6
"""Time of a byte from the second-level cache over that of one from memory: 64 tokens and the
weights of qkv, 119 MB in all, take 16.5 us in 16 bits (``docs/results/products_h200.json``)."""
_BARRIER_BYTES = 2048
_ACCUMULATORS = 4
"""Sums of 64 outputs that a program has at a time: of two halves of a strip, of two matmuls where
one gates the other, and of parts of the contraction."""
_DEEP_TOKENS = 16
"""Rows up to which steps of a draft in 8 bits are twice as deep where the ring holds three of them:
their matmuls take 1 to 22 % less time (``docs/results/draft_depth_h200.json``)."""
_FEW_TOKENS = 64
"""Tokens whose sums leave the registers of a thread room for five warpgroups."""


@dataclasses.dataclass(frozen=True)
class QuantisedWork(Work):
    """The units of a matmul of ``[rows, contracted]`` by packed weights of ``columns`` outputs.

    Attributes:
      bits: of a code.
      group: contracted elements that share a scale, all if 0.
      zeros: whether groups have zero points, or float32 offsets if they are fine.
      fine: whether an operand has several groups, with float32 scales.
      counted: whether fine groups' scales are integers, with a unit for every :data:`UNIT` inputs.
      wide: whether the result is float32.
      groups: of rows that are fetched apart (:func:`row_groups`).
    """

    bits: int = 8
    group: int = 0
    zeros: bool = False
    fine: bool = False
    counted: bool = False
    wide: bool = False
    groups: int = 1

    @property
    def full_rate_programs(self) -> int:
        """The fewest programs that read and widen the weights at nearly the full rate.

        Codes of 4 bits take longer to widen than to read: as long as the program that has most.
        """
        return MULTIPROCESSORS if self.bits == 4 else 86

    @property
    def halves(self) -> int:
        """Groups of 64 outputs of a strip."""
        return self.tile.columns // WARPGROUP_ROWS

    @property
    def ways(self) -> int:
        """Parts of a step's inputs that are summed apart, each by a warpgroup of its own."""
        wanted = _ACCUMULATORS // (self.halves * self.parts)
        return min(wanted, self.tile.depth * self.bits // 8 // BLOCK_BYTES)

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply. Each has one sum of 64 outputs, two if tokens are many."""
        sums = self.halves * self.parts * self.ways
        return sums if self.height <= _FEW_TOKENS else min(sums, 2)

    @property
    def held(self) -> int:
        """Sums of a warpgroup."""
        return self.halves * self.parts * self.ways // self.warpgroups

    @property
    def team(self) -> int:
        """Warpgroups of the same 64 outputs."""
        return self.warpgroups // self.halves

    @property
    def handed(self) -> int:
        """Warpgroups that leave their sums to the first of their team."""
        return self.halves * (self.team - 1)

    @property
    def pitch(self) -> int:
        """Numbers between rows of sums that are left, so that rows are in different banks."""
        return self.height + (8 if self.height % 16 == 0 else 0)

    @property
    def height(self) -> int:
        """Tokens of a row tile: columns of the matrix instruction."""
        return 8 * self.groups if self.groups > 1 else min(MOST_TOKENS, self.rows + -self.rows % 8)

    @property
    def row_tiles(self) -> int:
        """Row tiles, each of which reads all weights: the first from memory, others from L2."""
        return -(-self.rows // self.height)

    @property
    def out_bytes(self) -> int:
        """Bytes of an element of the result: partials are float32, too."""
        return 4 if self.wide or self.tile.splits > 1 else 2

    @property
    def blocks(self) -> int:
        """Blocks of packed words of a step."""
        return self.tile.depth * self.bits // 8 // BLOCK_BYTES

    @property
    def block_operands(self) -> int:
        """Operands of the matrix units in a block."""
        return BLOCK_BYTES * 8 // self.bits // OPERAND

    @property
    def operands(self) -> int:
        """Operands of the matrix units of a step and way."""
        return self.tile.depth // OPERAND // self.ways

    @property
    def scaled(self) -> int:
        """Inputs of a step that share a scale, if scales are by group."""
        if not self.group:
            return 0
        depth = self.tile.depth
        return (
            min(self.group, depth)
            if max(self.group, depth) % min(self.group, depth) == 0
            else OPERAND
        )

    @property
    def scales(self) -> int:
        """Scales of an output in a step, if they are by group."""
        return self.tile.depth // self.scaled if self.group else 0

    @property
    def scale_rows(self) -> int:
        """Rows of the scales of a step: counted ones are words of four."""
        return self.scales // 4 if self.counted else self.scales

    @property
    def block_groups(self) -> int:
        """Groups of a block, if they are fine."""
        return self.block_operands * OPERAND // self.group

    @property
    def scale_units(self) -> int:
        """Units of an output in a step, if scales are counted."""
        return self.tile.depth // UNIT if self.counted else 0

    @property
    def copies(self) -> int:
        """Copies that bring a step's tokens and weights."""
        scales = 1 + self.counted if self.fine else self.scales
        return self.groups + 1 + scales * self.of_group

    @property
    def of_group(self) -> int:
        """Numbers that an output has for every group."""
        return 2 if self.zeros else 1

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one step's tokens and weights."""
        scales = (4 if self.fine else 2) * self.scales
        if self.counted:
            scales = self.scales + 2 * self.scale_units
        weights = self.tile.depth * self.bits // 8 + scales * self.of_group
        return 2 * self.tile.depth * self.height + self.tile.columns * self.parts * weights

    @property
    def other_bytes(self) -> int:
        """Shared memory of the result, of sums that are left, and of barriers."""
        out = self.height * self.tile.columns * self.out_bytes
        return out + self.handed * WARPGROUP_ROWS * self.pitch * 4 + _BARRIER_BYTES

    @property
    def program_bytes(self) -> int:
        """Weights that a program with all turns reads, in 8 bits."""
        return self.turns * self.split_steps * self.tile.depth * self.tile.columns * self.parts

    def cost(self) -> float:
        """Bytes from memory in the time of the work: of weights, tokens and partials.

        The weights and the tokens are counted for 32 tokens and 8 bits, so that no choice depends
        on the rows.
        """
        units = self.turns * self.programs
        tokens = 2 * _WEIGHED_TOKENS * self.split_steps * self.tile.depth * units
        splits = self.tile.splits
        partials = 2 * 4 * _WEIGHED_TOKENS * self.columns * splits if splits > 1 else 0
        return self.read() + _CACHED * (tokens + partials)


def row_groups(rows: int) -> int:
    """In how many groups of equally many rows, 8 at most, the copy engine fetches them.

    It takes whole groups of 8 rows, or one that is not whole. So 10 rows are two groups of 5, as a
    matrix of three axes, which costs nothing. There is one group where they are whole anyway, and
    where groups would be small: other rows must be padded.
    """
    if rows <= 8 or rows % 8 == 0:
        return 1
    least = rows // 8 + 1
    return next((n for n in (least, least + 1) if rows % n == 0 and 8 * n <= MOST_TOKENS), 1)


@functools.cache
def quantised_tile(
    contracted: int,
    columns: int,
    *,
    bits: int = 8,
    gated: bool = False,
    split: bool = False,
    draft_rows: int | None = None,
) -> MatmulTile:
    """Choose the tile of weights of ``columns`` outputs only from their shape.

    Args:
      contracted: size of the contracted axis.
      columns: outputs, of each of two matmuls where they are gated.
      bits: of a code.
      gated: whether there are two matmuls, one of which gates the other.
      split: whether the contraction may be split and leave partials.
      draft_rows: how many rows there are, where a result's order of summation may follow from it.
    """
    widths = [width for width in (64, 128) if columns % width == 0]
    most = min(8, -(-contracted // (2 * DEPTH))) if split else 1
    tiles = [MatmulTile(width, splits, DEPTH) for width in widths for splits in range(1, most + 1)]
    parts = 2 if gated else 1

    def work(tile: MatmulTile, rows: int = 8) -> QuantisedWork:
        return QuantisedWork(rows, contracted, columns, tile, parts, bits=bits)

    tile = min(tiles, key=lambda tile: work(tile).cost())
    deep = dataclasses.replace(tile, depth=2 * DEPTH)
    if contracted % deep.depth:
        return tile
    if bits == 4:  # Two warpgroups share the words of 64 outputs, a block each.
        return deep if tile.columns == WARPGROUP_ROWS else tile
    if draft_rows is None or draft_rows > _DEEP_TOKENS:
        return tile
    # Four share them, and a program waits half as often.
    return deep if work(deep, draft_rows).stages > 2 else tile
