"""Which positions the attention of a query at a position adds up together, and in which order.

The numbers here define the bits of a target's 16-bit text
(:mod:`longspec_jax.ops.attention.path_kernels`). They depend on the position and on the model's
heads, never on the tree, the other rows or the cache's capacity.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Lengths
from longspec_jax.ops import hardware
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.packing import MAX_GROUP, shortest_split
from longspec_jax.ops.attention.tiles import MosaicTile, RowTiles, refuse_width
from longspec_jax.ops.hardware import HOPPER, SHARED_BYTES, WARPGROUP_ROWS

MOST_NODES = 128
"""Of a tree: one program of the kernel holds all of their keys."""

RECENT = 16
"""Tokens before a query that may be in the tree: the most levels of one."""
LEAST_WINDOW = RECENT + 2
"""Tokens of a window that shows more than the recent tokens and the query's own."""
SEGMENT = 16
"""Tokens of a head whose queries are fetched together: their packed rows lie side by side."""
ALIGNED, FETCHED = 8, 32
"""The copy engine begins at every eighth slot, and a matmul takes sixteen. The recent cached tokens
lie within this many slots."""
SLOTS = 128
"""Cache slots by which a split grows: one or two steps of the softmax."""
REFERENCE_NODES = 64
"""Nodes of the tree for which the number of splits fits the machine."""
FAR = 2**16
"""Where narrow heads get twice the splits: a step of one query, whose row tile is one of several,
has a program on half of the multiprocessors or less, and at long contexts its time is that of the
longest split. Rounds that far took as long with either. Nearer they would not, and wider heads'
took 3 to 5 % longer (docs/results/path_splits_h200.json)."""
REACH = 512
"""Positions by which the reach grows; from 64k on by a 64th of the power of two below."""


def splits_of(kv_heads: int, groups: int, narrow: bool = False) -> int:
    """Most splits before :data:`FAR`, by a row's key/value heads and the query heads of each."""
    rows = REFERENCE_NODES * groups
    return RowTiles(rows, attending_warpgroups(rows, groups, narrow)).most_splits(kv_heads)


def splits_double(groups: int, width: int) -> bool:
    """Whether a row has twice as many from :data:`FAR` on: of narrow heads in whole row tiles."""
    return width == 64 and groups > 2 and groups % 2 == 0


def path_tile(rows: int, width: int, groups: int, parts: int, narrow: bool = False) -> MosaicTile:
    """How a program of the prefix kernel works.

    Args:
      rows: packed query rows of a key/value head.
      width: of a head.
      groups: query heads of a key/value head. Of one, 64 rows are bound by memory, which small
        steps suit better; of more by the tensor cores. For wide heads only small steps fit.
      parts: programs that share the values' columns.
      narrow: whether the cache is in 8 bits.
    """
    warpgroups = attending_warpgroups(rows, groups, narrow)
    slots = SLOTS // 2 if groups == 1 or width > 128 else SLOTS
    out = 4 * warpgroups * WARPGROUP_ROWS * (width // parts) if rows < WARPGROUP_ROWS else 0
    held = 2 * warpgroups * WARPGROUP_ROWS * width + out
    stages = (SHARED_BYTES[HOPPER] - held - 2048) // (2 * slots * (width + width // parts))
    # Rows have their own number of slots in a split.
    return MosaicTile(warpgroups, slots, slots, min(stages, 6))


def attending_warpgroups(rows: int, groups: int, narrow: bool) -> int:
    """Warpgroups that attend.

    Of a cache in 8 bits two have a split each where rows are one warpgroup's: while one waits for
    what is widened, the other one attends. With grouped heads the splits of many rows, twice as
    many, would cost more than that gains.
    """
    return 2 if rows > WARPGROUP_ROWS or (narrow and groups == 1) else 1


def span(window: int) -> int:
    """Slots before the recent tokens that a window shows."""
    return window - 1 - RECENT


def window_splits(window: int, slots: int, most: int) -> tuple[int, int]:
    """Slots of a split in a layer with a window, and the splits that the nodes of a tree reach.

    Splits begin at multiples of their size, wherever the window begins, so that a query's own
    position decides which of its keys share one.

    Args:
      window: tokens that a query sees, its own included.
      slots: of a step of the softmax.
      most: splits that fit the machine.
    """
    seen = window - 1  # By the root or by the deepest node, before their recent tokens.
    split = -(-seen // (slots * max(1, most - 1))) * slots
    return split, -(-seen // split) + 1


def reach(position: Lengths) -> Lengths:
    """The first position beyond those whose queries have the same splits as this one's.

    It grows by :data:`REACH` or more. A round ends there, so that its nodes have the splits that
    plain decoding gives them; and a split is at most that much longer than it has to be.
    """
    past = position.astype(jnp.int32) + 1
    bits = 32 - jax.lax.clz(past)
    step = jnp.maximum(REACH, jnp.left_shift(1, jnp.maximum(bits - 7, 0)))
    return jax.lax.div(past + step - 1, step) * step


def split_of(
    position: Lengths, kv_heads: int, groups: int, width: int, narrow: bool = False
) -> Lengths:
    """Slots of a split for a query at this position: whole steps, enough for all positions."""
    end, splits = reach(position), splits_of(kv_heads, groups, narrow)
    near = shortest_split(end, splits, SLOTS)
    if not splits_double(groups, width):
        return near
    return jnp.where(end > FAR, shortest_split(end, 2 * splits, SLOTS), near)


def require_kernel(
    q: Array, cached: Array, fresh: Array, levels: int, window: int | None = None
) -> bool:
    """Whether the kernel is Hopper's; refuse what it cannot do, with the value and the rule.

    Args:
      q: queries ``[B, T, N, H]``.
      cached: keys ``[B, K, S, H]``.
      fresh: keys ``[B, T, K, H]``.
      levels: the greatest depth of a node.
      window: as in :func:`longspec_jax.ops.attention.dispatch.path_attention`.
    """
    narrow = cached.dtype == CODES
    groups = q.shape[2] // cached.shape[1]
    hopper = require_target(groups, q.shape[3], q.dtype, narrow=narrow)
    require_tree(fresh.shape[1], levels)
    if not hopper and (cached.dtype != q.dtype or cached.shape[2] % SLOTS):
        raise NotImplementedError(
            f"a cache of {cached.shape[2]} slots in {cached.dtype} is not one in {q.dtype} of a "
            f"multiple of {SLOTS} slots"
        )
    require_window(window)
    if window is not None and cached.shape[2] % SLOTS:
        raise NotImplementedError(f"a ring of {cached.shape[2]} slots is not a multiple of {SLOTS}")
    if cached.shape[2] < SLOTS or cached.shape[2] % 8:
        raise NotImplementedError(
            f"capacity {cached.shape[2]} is not a multiple of 8 of at least {SLOTS} slots"
        )
    if fresh.shape[1] != q.shape[1]:
        raise NotImplementedError(f"{q.shape[1]} nodes have {fresh.shape[1]} keys")
    if q.shape[1] > ALIGNED and q.shape[1] % ALIGNED:
        raise NotImplementedError(f"{q.shape[1]} nodes are not a multiple of {ALIGNED}")
    return hopper


def require_target(groups: int, width: int, dtype: DTypeLike, *, narrow: bool) -> bool:
    """Whether the kernel is Hopper's.

    Refuses machines without one, and targets of other heads, types or caches.
    """
    hopper = hardware.require_one_order("the kernel of one order along a path")
    if dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"{dtype} is neither bfloat16 nor float16")
    refuse_width(width, narrow=narrow)
    if not hopper and width > 128:
        raise NotImplementedError(f"heads of {width} numbers have a kernel only on Hopper GPUs")
    if groups > MAX_GROUP:
        raise NotImplementedError(f"{groups} query heads for a key/value head exceed {MAX_GROUP}")
    return hopper


def require_window(window: int | None) -> None:
    """Refuse a window that leaves nothing to the prefix kernel."""
    if window is not None and window < LEAST_WINDOW:
        raise NotImplementedError(
            f"a window of {window} tokens is smaller than {LEAST_WINDOW}, the least that the "
            "kernels of one order serve"
        )


def serves_tree(nodes: int, levels: int) -> bool:
    """Whether the nodes' order of sums does not depend on the tree."""
    return nodes <= MOST_NODES and levels <= RECENT


def require_tree(nodes: int, levels: int) -> None:
    """Refuse trees whose nodes' order of sums would depend on the tree."""
    if not serves_tree(nodes, levels):
        raise NotImplementedError(
            f"a tree of {nodes} nodes and {levels} levels has more than {MOST_NODES} or {RECENT}"
        )
