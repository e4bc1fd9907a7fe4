"""Tile choice of the attention kernels: frozen values from pure functions of the shape.

Nothing is timed at run time. The sweeps behind the numbers are kept in ``docs/results``.
"""

import dataclasses
import math

_POWERS = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class PrefixTile:
    """How one program of the prefix kernel works.

    Attributes:
      rows: packed query rows of one program, as power-of-two parts that share every key and value
        read; ``(64, 16)`` serves 69 rows with 80 where one power of two would take 128.
      slots: cache slots per step of the inner loop.
      split: cache slots per program; a multiple of ``slots``. It depends on the capacity, never on
        the lengths, so a row's order of summation does not depend on its neighbours.
      warps: warps per program.
      stages: depth of the software pipeline.
    """

    rows: tuple[int, ...]
    slots: int
    split: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        """Refuse tiles the hardware cannot take."""
        if not self.rows or any(part not in _POWERS for part in self.rows):
            raise ValueError(f"row parts {self.rows} must be chosen from {_POWERS}")
        if self.slots not in _POWERS or self.split % self.slots:
            raise ValueError(
                f"slots {self.slots} must be one of {_POWERS} and divide the split {self.split}"
            )

    @property
    def total_rows(self) -> int:
        """Packed query rows one program covers."""
        return sum(self.rows)


WARPGROUP_ROWS = 64
"""Packed query rows of one warpgroup: the height of Hopper's matrix instruction."""


@dataclasses.dataclass(frozen=True)
class MosaicTile:
    """How one program of the Hopper prefix kernel works.

    Attributes:
      warpgroups: warpgroups that attend, with 64 packed rows each; one more fetches.
      slots: cache slots per step of the inner loop.
      split: cache slots per program, as in :class:`PrefixTile`.
      stages: depth of the ring of key and value blocks in shared memory.
    """

    warpgroups: int
    slots: int
    split: int
    stages: int

    def __post_init__(self) -> None:
        """Refuse tiles the hardware cannot take."""
        if self.warpgroups not in (1, 2, 3) or self.slots not in (64, 128):
            raise ValueError(
                f"{self.warpgroups} warpgroups and {self.slots} slots: there are 1, 2 or 3 of the "
                "first and 64 or 128 of the second"
            )
        if self.split % self.slots or self.stages < 2:
            raise ValueError(
                f"the split {self.split} must be a multiple of {self.slots} slots, and the "
                f"{self.stages} stages at least 2"
            )


@dataclasses.dataclass(frozen=True)
class TreeTile:
    """How one program of the tree kernel works.

    Attributes:
      rows: packed query rows of one program.
      keys: tree keys per step.
      partials: prefix splits merged per step of the epilogue.
      warps: warps per program.
      stages: depth of the software pipeline.
    """

    rows: int
    keys: int
    partials: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        """Refuse tiles the hardware cannot take."""
        if self.rows not in _POWERS or self.keys not in _POWERS:
            raise ValueError(f"rows {self.rows} and keys {self.keys} must be chosen from {_POWERS}")
        if self.partials & (self.partials - 1) or self.partials < 1:
            raise ValueError(f"partials {self.partials} must be a power of two")


def prefix_tile(
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    capacity: int,
    itemsize: int,
    capability: tuple[int, int],
) -> PrefixTile | MosaicTile:
    """Choose the prefix tile for ``tokens`` queries a row over a cache of ``capacity`` slots."""
    return triton_prefix_tile(tokens, heads, kv_heads, width, capacity, itemsize)


def mosaic_prefix_tile(tokens: int, heads: int, kv_heads: int, capacity: int) -> MosaicTile:
    """Choose the tile of the Hopper kernel."""
    packed = tokens * heads // kv_heads
    if packed <= WARPGROUP_ROWS:
        return MosaicTile(1, 64, _split(capacity, 16, 64), 4)
    return MosaicTile(2, 128, _split(capacity, 11, 128), 2)


def triton_prefix_tile(
    tokens: int, heads: int, kv_heads: int, width: int, capacity: int, itemsize: int
) -> PrefixTile:
    """Choose the tile of the Triton kernels, which run from Ampere on."""
    packed = tokens * heads // kv_heads
    if itemsize > 2:
        # Exact float32 products run on the vector units: small tiles, no pipeline to feed.
        return PrefixTile((16,), 32, _split(capacity, 16, 32), 4, 2 if width <= 128 else 1)
    if packed <= 16:
        rows, slots, warps, stages = (16,), 64, 4, 3
    elif packed <= 32:
        rows, slots, warps, stages = (32,), 64, 4, 3
    elif packed <= 64:
        rows, slots, warps, stages = (64,), 64, 4, 3
    elif packed <= 80:
        rows, slots, warps, stages = (64, 16), 64, 4, 3
    else:
        rows, slots, warps, stages = (128,), 64, 8, 3
    if width > 128:
        rows, slots, stages = (min(max(rows), 64),), 32, 2
    return PrefixTile(rows, slots, _split(capacity, 16, slots), warps, stages)


def _split(capacity: int, count: int, slots: int) -> int:
    """Slots per split for about ``count`` splits, a multiple of ``slots``."""
    return max(slots, math.ceil(capacity / count / slots) * slots)


def tree_tile(tokens: int, heads: int, kv_heads: int, width: int, itemsize: int) -> TreeTile:
    """Choose the tree tile for ``tokens`` queries a row."""
    packed = tokens * heads // kv_heads
    if itemsize > 2:
        return TreeTile(16, 32, 4, 4, 2 if width <= 128 else 1)
    if width > 128:
        return TreeTile(16, 32, 4, 4, 2)
    if packed > 1024:
        return TreeTile(128, 64, 1, 8, 2)
    return TreeTile(16, 64, 8, 4, 2)
