"""Attention to a tree's nodes whose bits depend only on a node's position and path: two kernels.

Plain decoding finds a token's keys in the cache. Verification finds some of them in the tree. Sums
of floating-point numbers depend on their order, so both must add the same numbers in the same
order, wherever they come from:

- What a query at position ``p`` sees up to ``p - RECENT`` is cached in either case, as a path has
  at most ``RECENT`` tokens above the node. It goes through the prefix kernel, in blocks and splits
  at positions that only ``p`` determines (:mod:`longspec_jax.ops.attention.path`), with one tile
  of 64 rows for one query and for many. A block that a row does not see leaves the row's softmax as
  it was.
- The ``RECENT`` tokens before it and the query's own are *recent*: cached or in the tree. Their
  scores are dot products of their own. Their values are added one after the other in the order of
  their positions: each is a matmul in which a row meets no other number than 0, and adding 0
  changes no bit. Their weights are rounded to multiples of 2^-18, so that the sum of the
  weights is exact in any order.

The recent tokens' kernel begins with them and adds the splits in ascending order, under one
maximum of all. A program has 64 packed rows of a key/value head and some columns of their output.
It holds the keys of all nodes.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Queries, Ref, Sinks
from longspec_jax.ops.attention import prefix_mosaic
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.operands import PATH_AXES, Fresh, Prefix
from longspec_jax.ops.attention.packing import LOG2_E, pack
from longspec_jax.ops.attention.path import (
    ALIGNED,
    FAR,
    FETCHED,
    RECENT,
    SEGMENT,
    SLOTS,
    attending_warpgroups,
    path_tile,
    span,
    split_of,
    splits_double,
    splits_of,
    window_splits,
)
from longspec_jax.ops.attention.prefix_items import Bounds, Work
from longspec_jax.ops.attention.recent_programs import (
    CONTRACTED,
    WINDOWS,
    Memory,
    RecentOperands,
    RecentProgram,
)
from longspec_jax.ops.attention.widening import shared_codes
from longspec_jax.ops.hardware import HOPPER, MULTIPROCESSORS, SHARED_BYTES, WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.mosaic import ACC, load, swizzled
from longspec_jax.ops.partitioned import partitioned

COLUMNS = 16
"""Columns of the values that a program adds up; twice as many of a cache in 8 bits, which are
widened by 32, and where programs would be too many."""
_MOST_AT_ONCE = 16
"""Splits whose results are merged without a loop."""
_LEVELS = 8
"""Levels of a tree whose values are in memory at once, each among zeros; half of them where two
programs share a multiprocessor, and of wide heads."""


@partitioned(PATH_AXES)
@launcher("scale", "cap", "window")
def path_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    depth: Int[Array, "B T"],
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to the prefix and along each node's path; see :func:`dispatch.path_attention`."""
    batch, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    factor = (width**-0.5 if scale is None else scale) * LOG2_E
    length = prefix.length.astype(jnp.int32)
    if window is None:
        length = jnp.minimum(length, slots)
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
    mask = jnp.pad(fresh.seen(prefix), ((0, 0), (0, missing), (0, -tokens % SEGMENT)))
    node_depth = jnp.pad(depth, ((0, 0), (0, -tokens % WARPGROUP_ROWS)), constant_values=-1)
    depth = jnp.pad(depth, ((0, 0), (0, missing)))
    limit = length[:, None] + depth - RECENT
    limit = jnp.clip(limit, 0, slots) if window is None else jnp.maximum(limit, 0)
    narrow = prefix.keys.dtype == CODES
    splits, turns = splits_of(kv_heads, groups, narrow), 1
    if window is None:
        split = split_of(length, kv_heads, groups, width, narrow)
        turns = 2 if slots > FAR and splits_double(groups, width) else 1
        splits *= turns
    else:
        size, splits = window_splits(window, SLOTS, splits)
        split = jnp.full_like(length, size)
    bounds = Bounds.packed(limit.min(axis=1), limit.max(axis=1), split, prefix.cache_rows)
    rows = groups * limit.shape[1]
    padded = -(-rows // WARPGROUP_ROWS) * WARPGROUP_ROWS
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
        turns=turns,
        parts=parts,
        span=None if window is None else span(window),
        cap=cap,
    )
    limit = _packed(limit, groups, padded, 0)
    reached = jax.lax.div(bounds[:, 1] + split - 1, split)
    if work.span is not None:
        reached -= jax.lax.div(jnp.maximum(bounds[:, 0] - work.span, 0), split)
    first = jnp.maximum(length - RECENT, 0)
    # Side by side, so that what one kernel read is near when the other one begins.
    row = jnp.stack([first, length, reached, depth.max(axis=1)], axis=1)
    where = jnp.concatenate([bounds, row], axis=1)
    partials = prefix_mosaic.launch(work, where, limit, packed, prefix.keys, prefix.values)
    bias = _packed(jnp.where(mask, 0.0, -jnp.inf), groups, padded, -jnp.inf)
    keys_and_values = prefix.keys, prefix.values, fresh.keys, fresh.values
    own = None
    if sinks is not None:
        own = sinks.astype(jnp.float32).reshape(kv_heads, groups) * LOG2_E
        own = jnp.repeat(own, rows // groups, axis=1)
        own = jnp.pad(own, ((0, 0), (0, padded - rows)))
    of_nodes = where, limit, node_depth, bias, packed
    return _attend_and_merge(
        *of_nodes, *keys_and_values, *partials, own, scale=factor, cap=cap, ring=window is not None
    )


def _packed(per_token: Array, groups: int, rows: int, fill: int | float) -> Array:
    """Numbers of every token, for its packed rows: ordered by head, then by token."""
    batch, tokens, *rest = per_token.shape
    repeated = jnp.broadcast_to(per_token[:, None], (batch, groups, tokens, *rest))
    packed = repeated.reshape(batch, groups * tokens, *rest)
    padding = [(0, 0), (0, rows - groups * tokens)] + [(0, 0)] * len(rest)
    return jnp.pad(packed, padding, constant_values=fill)


def _attend_and_merge(
    where: Int[Array, "B fields"],
    limit: Int[Array, "B R"],
    depth: Int[Array, "B padded"],
    bias: Float[Array, "B R nodes"],
    q: Float[Array, "B K packed H"] | Float[Array, "B K T G H"],
    k: CacheSlots,
    v: CacheSlots,
    fresh_k: Float[Array, "B T K H"],
    fresh_v: Float[Array, "B T K H"],
    partial: Float[Array, "B P K some H"],
    partial_lse: Float[Array, "B P K R"],
    sinks: Float[Array, "K R"] | None,
    *,
    scale: float,
    cap: float | None,
    ring: bool,
) -> Float[Array, "B T N H"]:
    """Attend to the recent tokens and merge with the splits, in ascending order.

    Args:
      where: of every batch row, after the bounds of the prefix kernel, the position of the first
        cached recent token, the row's length, the splits that it reaches, and the greatest depth of
        a node.
      limit: the first slot that each packed row sees here; the splits end before it.
      depth: of every node, whole warpgroups of rows; -1 after them.
      bias: 0 for each node that a packed row sees; minus infinity for the others.
      q: packed queries, of one node or of single heads; or every head's by itself, as
        :func:`prefix_mosaic.launch` takes them.
      k: cached keys.
      v: cached values.
      fresh_k: the tree's keys.
      fresh_v: the tree's values.
      partial: the splits' results.
      partial_lse: their log-sum-exps.
      sinks: one more score of every packed row, in base 2, of a key whose value is 0.
      scale: factor on the scores, in base 2.
      cap: bounds the scores softly, if there is one; natural.
      ring: whether the cached slots are a ring.
    """
    batch, nodes, width = q.shape[0], fresh_k.shape[1], q.shape[-1]
    kv_heads, tokens = k.shape[1], bias.shape[2]
    packed = q.ndim == 4
    groups = q.shape[2] // nodes if packed else q.shape[3]
    rows = q.shape[2] if packed else groups * tokens
    programs = batch * kv_heads * pl.cdiv(rows, WARPGROUP_ROWS)
    few = programs * width // COLUMNS <= MULTIPROCESSORS and k.dtype != CODES
    columns = COLUMNS if few else 2 * COLUMNS
    # The keys of wide heads leave no room for more levels either.
    crowded = programs * width // columns > MULTIPROCESSORS or width > 128
    segment = math.gcd(tokens, WARPGROUP_ROWS)
    queries = 1 if packed else WARPGROUP_ROWS // segment
    copies = 2 + FETCHED // ALIGNED + 2 * WINDOWS if ring else 3 + WINDOWS
    memory = _memory(
        dtype=q.dtype,
        width=width,
        columns=columns,
        tokens=tokens,
        node_rows=depth.shape[1],
        levels=min(nodes, _LEVELS // 2 if crowded else _LEVELS),
        splits=partial.shape[1],
        narrow=k.dtype == CODES,
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, scale=scale, cap=cap, ring=ring, segment=segment),
        out_type=jax.ShapeDtypeStruct((batch, nodes, kv_heads * groups, width), q.dtype),
        scratch_types=memory | dict(ready=plgpu.Barrier(num_arrivals=copies + queries)),
        grid=(width // columns, pl.cdiv(rows, WARPGROUP_ROWS), kv_heads, batch),
        grid_names=("part", "row_tile", "kv_head", "batch"),
        compiler_params=plgpu.CompilerParams(
            # One warpgroup: what it shares is committed by name below.
            approx_math=True,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,
        ),
        kernel_name="recent_tokens",
    )
    # The copy engine knows five dimensions, with those of swizzled memory: a program's columns are
    # one index.
    partial = partial.reshape(*partial.shape[:4], width // columns, columns)
    last = () if sinks is None else (sinks,)
    return kernel(where, limit, depth, bias, q, k, v, fresh_k, fresh_v, partial, partial_lse, *last)


def _memory(
    *,
    dtype: DTypeLike,
    width: int,
    columns: int,
    tokens: int,
    node_rows: int,
    levels: int,
    splits: int,
    narrow: bool,
) -> dict[str, Any]:
    """What :class:`Memory` names, but ``ready``; as many splits as the rest leaves room for."""

    def shared(*shape: int, row_bytes: int = 128) -> Any:
        return swizzled(shape, dtype, row_bytes)

    held = 2 * (
        WARPGROUP_ROWS * width
        + (FETCHED + tokens) * width
        + ((2 + WINDOWS) * WARPGROUP_ROWS + (1 + levels) * node_rows) * columns
    )
    room = SHARED_BYTES[HOPPER] - held - 4 * WARPGROUP_ROWS * (splits + _MOST_AT_ONCE) - 2048
    codes = {}
    if narrow:
        codes = dict(
            k_codes=shared_codes(FETCHED, width), v_codes=shared_codes(WARPGROUP_ROWS, columns)
        )
        room -= FETCHED * width + WARPGROUP_ROWS * columns
    at_once = min(splits, _MOST_AT_ONCE, room // (4 * WARPGROUP_ROWS * columns))
    # A matmul contracts whole swizzles.
    values = functools.partial(shared, row_bytes=2 * CONTRACTED)
    return dict(
        q=shared(WARPGROUP_ROWS, width),
        cached_k=shared(FETCHED, width),
        cached_v=values(WARPGROUP_ROWS, columns),
        cached_alone=values(WINDOWS, WARPGROUP_ROWS, columns),
        fresh_k=shared(tokens, width),
        fresh_v=values(node_rows, columns),
        fresh_alone=values(levels, node_rows, columns),
        partial=swizzled((at_once, WARPGROUP_ROWS, columns), jnp.float32, 4 * columns),
        lse=plgpu.SMEM((pl.cdiv(splits, at_once) * at_once, WARPGROUP_ROWS), jnp.float32),
        out=plgpu.SMEM((WARPGROUP_ROWS, columns), dtype),
        lse_ready=plgpu.Barrier(),
        partial_ready=plgpu.Barrier(),
        **codes,
    )


def _kernel(
    *refs: Ref, scale: float, cap: float | None, ring: bool, segment: int, **memory: Ref
) -> None:
    """One program: 64 packed rows of a key/value head, some columns of their output."""
    *given, out = refs
    operands = RecentOperands(out, *given)
    batch = jax.lax.axis_index("batch")
    cache_row = operands.where[batch, Bounds._fields.index("cache_row")]
    first, length, reached, deepest = (
        operands.where[batch, len(Bounds._fields) + at] for at in range(4)
    )
    program = RecentProgram(
        refs=operands,
        memory=Memory(**memory),
        scale=scale,
        cap=cap,
        ring=ring,
        segment_tokens=segment,
        batch=batch,
        kv_head=jax.lax.axis_index("kv_head"),
        row_tile=jax.lax.axis_index("row_tile"),
        part=jax.lax.axis_index("part"),
        first=first,
        length=length,
        reached=reached,
        deepest=deepest,
        cache_row=cache_row,
    )
    row = plgpu.Layout.WGMMA.reduce(1)
    limit = load(operands.limit.at[batch, program.rows], row)
    bias = load(operands.bias.at[batch, program.rows], plgpu.Layout.WGMMA)
    depth = load(operands.depth.at[batch], row)
    program.fetch()
    weights, top, total = program.softmax(limit, bias)
    acc = pl.run_scoped(
        functools.partial(program.add_values, weights, depth),
        ACC((WARPGROUP_ROWS, program.columns), jnp.float32),
    )
    acc, total = program.merge(acc, top, total)
    program.write(acc * jax.lax.broadcast_in_dim(1.0 / total, acc.shape, [0]))
