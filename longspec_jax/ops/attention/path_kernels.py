"""Attention to a tree's nodes whose bits depend on a node's position and path alone: two kernels.

Plain decoding finds a token's keys in the cache. Verification finds some of them in the tree. Sums
of floating-point numbers depend on their order, so both must add the same numbers in the same
order, wherever they come from:

- What a query at position ``p`` sees up to ``p - RECENT`` is cached in either case, as a path has
  at most ``RECENT`` tokens above the node. It goes through the prefix kernel, in blocks and splits
  at positions that ``p`` alone determines (:mod:`longspec_jax.ops.attention.path`), with one tile
  of 64 rows for one query and for many. A block that a row does not see leaves the row's softmax as
  it was.
- The ``RECENT`` tokens before it and the query's own are *recent*: cached or in the tree. Their
  scores are dot products of their own. Their values are added one after the other in the order of
  their positions: each is a matmul in which a row meets no other number than 0, and adding 0
  changes no bit. Their weights are rounded to multiples of 2^-18, so that the sum of the
  weights is exact in any order.

The recent tokens' kernel begins with them and adds the splits in ascending order, under one
maximum of all.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Queries
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.operands import PATH_AXES, Fresh, Prefix
from longspec_jax.ops.attention.packing import LOG2_E, pack
from longspec_jax.ops.attention.path import (
    RECENT,
    SEGMENT,
    attending_warpgroups,
    path_tile,
    split_of,
    splits_of,
)
from longspec_jax.ops.attention.prefix_items import Bounds, Work
from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned


@partitioned(PATH_AXES)
@launcher("scale")
def path_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    depth: Int[Array, "B T"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to the prefix and along each node's path; see :func:`dispatch.path_attention`."""
    from longspec_jax.ops.attention import prefix_mosaic, recent_mosaic  # Older versions lack them.

    batch, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    factor = (width**-0.5 if scale is None else scale) * LOG2_E
    length = jnp.minimum(prefix.length.astype(jnp.int32), slots)
    depth = depth.astype(jnp.int32)
    groups = heads // kv_heads
    missing = -tokens % SEGMENT
    # As they lie in memory already (layer_pallas.split_heads).
    packed = pack(q, kv_heads)
    if groups == 1 or tokens == 1 and (groups <= 8 or groups % 8 == 0):
        # The rows of a key/value head lie together, in whole tiles of shared memory.
        missing = 0
    else:
        packed = packed.reshape(batch, kv_heads, tokens, groups, width)
    mask = jnp.pad(fresh.mask, ((0, 0), (0, missing), (0, -tokens % SEGMENT)))
    node_depth = jnp.pad(depth, ((0, 0), (0, -tokens % WARPGROUP_ROWS)), constant_values=-1)
    depth = jnp.pad(depth, ((0, 0), (0, missing)))
    limit = jnp.clip(length[:, None] + depth - RECENT, 0, slots)
    narrow = prefix.keys.dtype == CODES
    split = split_of(length, kv_heads, groups, narrow)
    bounds = Bounds.packed(limit.min(axis=1), limit.max(axis=1), split, prefix.cache_rows)
    rows = groups * limit.shape[1]
    padded = -(-rows // WARPGROUP_ROWS) * WARPGROUP_ROWS
    splits = splits_of(kv_heads, groups, narrow)
    shared = attending_warpgroups(rows, groups, narrow) == 1 and width >= 128
    parts = 2 if shared and 2 * batch * kv_heads * splits <= MULTIPROCESSORS else 1
    work = Work(
        tile=path_tile(rows, width, groups, parts, narrow),
        batch=batch,
        kv_heads=kv_heads,
        rows=padded,
        slots=slots,
        splits=splits,
        scale=factor,
        parts=parts,
    )
    limit = _packed(limit, groups, padded, 0)
    reached = jax.lax.div(bounds[:, 1] + split - 1, split)
    first = jnp.maximum(length - RECENT, 0)
    # Side by side, so that what one kernel read is near when the other one begins.
    row = jnp.stack([first, length, reached, depth.max(axis=1)], axis=1)
    where = jnp.concatenate([bounds, row], axis=1)
    partials = prefix_mosaic.launch(work, where, limit, packed, prefix.keys, prefix.values)
    bias = _packed(jnp.where(mask, 0.0, -jnp.inf), groups, padded, -jnp.inf)
    keys_and_values = prefix.keys, prefix.values, fresh.keys, fresh.values
    return recent_mosaic.attend_and_merge(
        where, limit, node_depth, bias, packed, *keys_and_values, *partials, scale=factor
    )


def _packed(per_token: Array, groups: int, rows: int, fill: int | float) -> Array:
    """Numbers of every token, for its packed rows: ordered by head, then by token."""
    batch, tokens, *rest = per_token.shape
    repeated = jnp.broadcast_to(per_token[:, None], (batch, groups, tokens, *rest))
    packed = repeated.reshape(batch, groups * tokens, *rest)
    padding = [(0, 0), (0, rows - groups * tokens)] + [(0, 0)] * len(rest)
    return jnp.pad(packed, padding, constant_values=fill)
