"""Tile choice of the attention kernels: frozen values from pure functions of the shape.

Nothing is timed at run time. The sweeps that gave the numbers are in ``docs/results``.
"""

import dataclasses
import math

from longspec_jax.ops.hardware import HOPPER, MULTIPROCESSORS, SHARED_BYTES, WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class PrefixTile:
    """How one program of the prefix kernel works.

    Attributes:
      rows: packed query rows of one program, as power-of-two parts of 16 to 128 that share every
        key and value read; ``(64, 16)`` serves 69 rows with 80 where one power would take 128.
      slots: cache slots per step of the inner loop, likewise a power of two.
      split: cache slots per program of a full cache; a multiple of ``slots``. A shorter row has as
        many, shorter splits (:meth:`~longspec_jax.ops.attention.packing.Problem.split_of`).
      warps: warps per program.
      stages: depth of the software pipeline.
    """

    rows: tuple[int, ...]
    slots: int
    split: int
    warps: int
    stages: int

    @property
    def total_rows(self) -> int:
        """Packed query rows one program covers."""
        return sum(self.rows)


@dataclasses.dataclass(frozen=True)
class MosaicTile:
    """How one program of the Hopper prefix kernel works.

    Attributes:
      warpgroups: one or two warpgroups that attend, with 64 packed rows each; one more fetches.
      slots: cache slots per step of the inner loop, 64 or 128.
      split: cache slots per program, as in :class:`PrefixTile`.
      stages: depth of the ring of key and value blocks in shared memory, 2 or more.
      programs: programs that share the work, one a multiprocessor; 132 on H100 and H200.
    """

    warpgroups: int
    slots: int
    split: int
    stages: int
    programs: int = MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How the packed rows of a key/value head are shared out to programs of the Hopper kernel.

    An item, what a program does at a time, is one row tile against one split. Where 64 rows are
    left over for two warpgroups, both attend to them, each to another split: an item of this
    lighter row tile is two neighbouring splits, and takes as long as any other.

    Attributes:
      rows: packed query rows of a key/value head.
      warpgroups: warpgroups that attend, as in :class:`MosaicTile`.
    """

    rows: int
    warpgroups: int

    @property
    def count(self) -> int:
        """Row tiles, with the lighter one."""
        return math.ceil(self.rows / (self.warpgroups * WARPGROUP_ROWS))

    @property
    def lighter(self) -> bool:
        """Whether the last row tile has rows for one of two warpgroups."""
        return self.warpgroups == 2 and math.ceil(self.rows / WARPGROUP_ROWS) % 2 == 1

    def items(self, splits: int) -> int:
        """Items of a key/value head."""
        return self.count * splits - (splits // 2 if self.lighter else 0)

    def most_splits(self, kv_heads: int) -> int:
        """The most splits that give every multiprocessor an item at most; at least one."""
        count = 1
        while kv_heads * self.items(count + 1) <= MULTIPROCESSORS:
            count += 1
        return count


@dataclasses.dataclass(frozen=True)
class TreeTile:
    """How one program of the tree kernel, or of the one for chunks, works.

    Attributes:
      rows: packed query rows of one program; these three are powers of two.
      keys: fresh keys per step, or per program where they are split over programs.
      partials: prefix splits merged per step of the epilogue.
      warps: warps per program.
      stages: depth of the software pipeline.
    """

    rows: int
    keys: int
    partials: int
    warps: int
    stages: int


def prefix_tile(
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    capacity: int,
    itemsize: int,
    capability: tuple[int, int],
    *,
    narrow: bool = False,
) -> PrefixTile | MosaicTile:
    """The fastest tile measured for ``tokens`` queries per row over a cache of ``capacity`` slots.

    Up to 64 packed rows are bound by memory, where both kernels read at the same rate and Triton's
    starts sooner; more rows are bound by the tensor cores, which only the Hopper kernel fills.
    """
    fits = width in mosaic_widths(narrow=narrow) and capacity >= 128 and capacity % 8 == 0
    fits = fits and itemsize == 2
    if capability[0] == HOPPER[0] and fits and tokens * heads // kv_heads > WARPGROUP_ROWS:
        return mosaic_prefix_tile(tokens, heads, kv_heads, width, capacity)
    return triton_prefix_tile(tokens, heads, kv_heads, width, capacity, itemsize, capability)


def mosaic_widths(*, narrow: bool) -> tuple[int, ...]:
    """Widths of heads that the Hopper kernels take, of a cache in 8 bits or of one in 16."""
    # Next to blocks of wide heads in 16 bits there is no room for rings of codes.
    return (64, 128) if narrow else (64, 128, 256)


def refuse_width(width: int, *, narrow: bool) -> None:
    """Raise for heads of a width that the Hopper kernels do not take.

    Raises:
      NotImplementedError: names the widths that there are.
    """
    served = mosaic_widths(narrow=narrow)
    if width not in served:
        raise NotImplementedError(
            f"head width {width} is not one of {', '.join(map(str, served))}, which the Hopper "
            f"kernels take of a cache in {8 if narrow else 16} bits"
        )


def mosaic_prefix_tile(
    tokens: int, heads: int, kv_heads: int, width: int, capacity: int
) -> MosaicTile:
    """Choose the tile of the Hopper kernel.

    Its programs stay on their multiprocessors, so that there are as many splits as give each one
    item at most: more rounds of shorter items cost their starts and the merge of their results.
    """
    packed = tokens * heads // kv_heads
    warpgroups = 1 if packed <= WARPGROUP_ROWS else 2
    wide = width > 128
    slots = 64 if packed <= WARPGROUP_ROWS or wide else 128
    row_tiles = RowTiles(packed, warpgroups)
    count = row_tiles.most_splits(kv_heads)
    if wide:  # As many as fit next to the queries.
        stages = 4 - warpgroups
    else:
        # A light item takes two blocks a step: with two stages each would come just as it is
        # needed.
        stages = 3 if row_tiles.lighter else 256 // slots
    return MosaicTile(warpgroups, slots, _split(capacity, count, slots), stages)


def triton_prefix_tile(
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    capacity: int,
    itemsize: int,
    capability: tuple[int, int],
) -> PrefixTile:
    """Choose the tile of the Triton kernels, which run from Ampere on."""
    packed = tokens * heads // kv_heads
    padded = 1 << (width - 1).bit_length()
    if itemsize > 2:
        # Exact float32 matmuls run on the vector units: small tiles, no pipeline to feed.
        rows, slots, warps = (16,), 32, 4
    elif packed <= 64 or padded > 128:
        rows, slots, warps = (min(64, max(16, 1 << (packed - 1).bit_length())),), 64, 4
    elif packed <= 80:
        rows, slots, warps = (64, 16), 64, 4
    else:
        rows, slots, warps = (128,), 64, 8
    room = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    stages = 4
    while stages > 1 and (sum(rows) + 2 * stages * slots) * padded * itemsize > room:
        # A shallow pipeline of small steps runs ahead better than one of large steps.
        stages, slots = (stages - 1, slots) if stages > 2 or slots == 16 else (stages, slots // 2)
    row_tiles = math.ceil(packed / sum(rows))
    # One program a multiprocessor: more, shorter splits cost their starts and their merge.
    count = max(1, min(64, MULTIPROCESSORS // (row_tiles * kv_heads)))
    return PrefixTile(rows, slots, _split(capacity, count, slots), warps, stages)


def tree_tile(
    tokens: int, heads: int, kv_heads: int, width: int, keys: int, itemsize: int
) -> TreeTile:
    """Choose the tree tile for ``tokens`` queries per row that see up to ``keys`` tree keys."""
    packed = tokens * heads // kv_heads
    if itemsize > 2 or width > 128:
        return TreeTile(16, 32, 4, 4, 2 if width <= 128 or itemsize == 2 else 1)
    # A whole tree of up to 128 nodes in one step; of a longer list, such as the draft's window,
    # 128 keys at a time.
    block = min(128, max(16, 1 << (keys - 1).bit_length()))
    return TreeTile(
        16, block, 16 if packed <= 16 else 8, 4, 3 if packed <= 16 and keys <= 128 else 2
    )


def chunk_tile(tokens: int, heads: int, kv_heads: int, width: int, itemsize: int) -> TreeTile:
    """Choose the tile for a chunk of ``tokens`` queries per row, and as many keys."""
    if itemsize > 2 or width > 128:
        return TreeTile(16, 32, 4, 4, 2 if width <= 128 or itemsize == 2 else 1)
    packed = tokens * heads // kv_heads
    if packed <= 512:
        return TreeTile(16, 64, 4, 4, 2)  # More programs, for short prompts.
    return TreeTile(128, 64, 1, 8, 3)


def _split(capacity: int, count: int, slots: int) -> int:
    """Slots per split for at most ``count`` splits, a multiple of ``slots``."""
    return max(slots, math.ceil(capacity / count / slots) * slots)
