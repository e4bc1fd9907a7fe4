"""Attention without Triton, from compute capability 8.0 on: splits of ``mma.sync``, merged by XLA.

A prefix, a tree's nodes under their mask and a prompt's chunk, whose tokens see those before them,
are all read by the kernel of :mod:`longspec_jax.ops.attention.path_ampere`, 64 packed rows at a
time. What it finds is merged outside: few numbers for the rows of a tree, and for a chunk, of which
there is one split, two for each that is written.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, Sinks, TreeRows
from longspec_jax.ops.attention import path_ampere
from longspec_jax.ops.attention.operands import (
    PREFIX_AXES,
    SPECULATIVE_AXES,
    TREE_AXES,
    Fresh,
    Partial,
    Prefix,
    merge,
    with_sinks,
)
from longspec_jax.ops.attention.packing import LOG2_E, MAX_GROUP, pack, unpack
from longspec_jax.ops.attention.path_ampere import SLOTS
from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS, require_mosaic
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned

_MOST_SPLITS = 32
MOST_MASKED = 1 << 18
"""Places of a mask, which is spread to a number for every packed row."""


@partitioned(PREFIX_AXES)
@launcher("scale", "cap", "dtype")
def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Attend to the slots below every row's length."""
    return _usual(_to_prefix(q, prefix, _factor(q, scale, cap)), q).in_dtype(dtype)


@partitioned(TREE_AXES)
@launcher("scale", "cap", "dtype")
def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Attend where the mask is true."""
    return _usual(_to_fresh(q, fresh, _factor(q, scale, cap)), q).in_dtype(dtype)


@partitioned(SPECULATIVE_AXES)
@launcher("scale", "cap")
def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """One softmax over the prefix and, masked, the fresh tokens."""
    factor = _factor(q, scale, cap)
    found = merge(_to_prefix(q, prefix, factor), _to_fresh(q, fresh, factor))
    return with_sinks(_usual(found, q), sinks).out.astype(q.dtype)


def _factor(q: Queries, scale: float | None, cap: float | None) -> float:
    """The factor on the scores, in base 2; refuses what the kernel cannot do."""
    require_mosaic("the kernel of attention without Triton")
    if cap is not None or q.shape[3] not in (64, 128) or q.dtype.itemsize != 2:
        raise NotImplementedError(
            f"attention without Triton takes heads of 64 or 128 numbers in 16 bits without a soft "
            f"cap, not {q.shape[3]} in {q.dtype}, cap {cap}"
        )
    return (q.shape[3] ** -0.5 if scale is None else scale) * LOG2_E


def _to_prefix(q: Queries, prefix: Prefix, factor: float) -> Partial:
    """Packed partial results of the cached tokens."""
    slots = prefix.keys.shape[2]
    bounded = prefix.start is not None or prefix.oldest is not None
    if bounded or prefix.keys.dtype != q.dtype or slots % SLOTS:
        raise NotImplementedError(
            f"attention without Triton takes a cache in {q.dtype} of a multiple of {SLOTS} slots "
            f"that is seen from its first one on, not {slots} slots in {prefix.keys.dtype}"
        )
    length = jnp.minimum(prefix.length.astype(jnp.int32), slots)
    cached = prefix.keys, prefix.values, length
    return _attend(q, cached, factor, rows=prefix.cache_rows)


def _to_fresh(q: Queries, fresh: Fresh, factor: float) -> Partial:
    """Packed partial results of fresh tokens under their mask, or of a chunk."""
    groups = q.shape[2] // fresh.keys.shape[2]
    if fresh.mask is None:
        slots = _as_slots(fresh.keys), _as_slots(fresh.values), _all(q, q.shape[1])
        return _attend(q, slots, factor, causal=groups)
    tokens, keys = fresh.mask.shape[1:]
    if tokens * keys > MOST_MASKED:
        raise NotImplementedError(
            f"attention without Triton takes masks of up to {MOST_MASKED} places, not "
            f"{tokens} x {keys}"
        )
    bias = jnp.where(jnp.repeat(fresh.mask, groups, axis=1), 0.0, -jnp.inf)
    bias = jnp.pad(bias, ((0, 0), (0, -bias.shape[1] % WARPGROUP_ROWS), (0, -keys % SLOTS)))
    slots = _as_slots(fresh.keys), _as_slots(fresh.values), _all(q, keys)
    return _attend(q, slots, factor, bias=bias)


def _as_slots(rows: TreeRows) -> CacheSlots:
    """Fresh tokens as slots of a cache, whole steps of them."""
    wider = (0, 0), (0, 0), (0, -rows.shape[1] % SLOTS), (0, 0)
    return jnp.pad(rows.transpose(0, 2, 1, 3), wider)


def _all(q: Queries, count: int) -> Lengths:
    return jnp.full(q.shape[:1], count, jnp.int32)


def _attend(
    q: Queries,
    slots: tuple[CacheSlots, CacheSlots, Lengths],
    factor: float,
    *,
    rows: Lengths | None = None,
    bias: Float[Array, "B R S"] | None = None,
    causal: int = 0,
) -> Partial:
    """Packed partial results of keys and values: as many splits as multiprocessors can take."""
    keys, values, length = slots
    kv_heads = keys.shape[1]
    if q.shape[2] // kv_heads > MAX_GROUP:
        raise NotImplementedError(
            f"{q.shape[2] // kv_heads} query heads for a key/value head exceed {MAX_GROUP}"
        )
    packed = pack(q, kv_heads)
    missing = -packed.shape[2] % WARPGROUP_ROWS
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, missing), (0, 0)))
    tiles = packed.shape[2] // WARPGROUP_ROWS * kv_heads * len(q)
    count = max(1, min(_MOST_SPLITS, MULTIPROCESSORS // tiles, keys.shape[2] // SLOTS))
    split = -(-length // (SLOTS * count)) * SLOTS
    cache_row = jnp.arange(len(q)) if rows is None else rows
    bounds = jnp.stack([cache_row.astype(jnp.int32), length, jnp.maximum(split, 1)], axis=1)
    limit = jnp.broadcast_to(length[:, None], (len(q), packed.shape[2]))
    if causal:
        limit = jnp.minimum(limit, jnp.arange(packed.shape[2]) // causal + 1)
    splits = path_ampere.attend_in_splits(
        bounds, limit, packed, keys, values, bias, scale=factor, count=count, causal=causal
    )
    reached = jnp.arange(count) * split[:, None] < length[:, None]
    return _merged(splits, reached)


def _merged(splits: path_ampere.Splits, reached: Bool[Array, "B P"]) -> Partial:
    """Partial results of all splits that were written."""
    there = reached[:, :, None, None]
    tops = jnp.where(there, splits.top, -jnp.inf)
    top = tops.max(axis=1)
    weight = jnp.exp2(tops - jnp.where(jnp.isneginf(top), 0.0, top)[:, None])
    total = jnp.where(there, splits.total * weight, 0.0).sum(axis=1)
    out = jnp.where(there[..., None], splits.out * weight[..., None], 0.0).sum(axis=1)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, (top + jnp.log2(total)) / LOG2_E, -jnp.inf)
    return Partial(out / total[..., None], lse)


def _usual(packed: Partial, q: Queries) -> Partial:
    """Partial results of the queries, in their usual shape."""
    rows = q.shape[1] * q.shape[2] // packed.out.shape[1]
    out, lse = packed.out[:, :, :rows], packed.lse[:, :, :rows, None]
    return Partial(unpack(out, q.shape[1]), unpack(lse, q.shape[1])[..., 0])
