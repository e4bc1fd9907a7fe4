"""Attention without Triton, from compute capability 8.0 on: splits of ``mma.sync`` and their merge.

A prefix, a tree's nodes under their mask and a prompt's chunk, whose tokens see those before them,
are all read by the kernel of :mod:`longspec_jax.ops.attention.path_ampere`, 64 packed rows at a
time. Another one merges what it found, of a prefix and of fresh tokens, in ascending order.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, Ref, Sinks, TreeRows
from longspec_jax.ops import ampere
from longspec_jax.ops.attention.operands import (
    PREFIX_AXES,
    SPECULATIVE_AXES,
    TREE_AXES,
    Fresh,
    Partial,
    Prefix,
    with_sinks,
)
from longspec_jax.ops.attention.packing import LOG2_E, MAX_GROUP, pack, shortest_split
from longspec_jax.ops.attention.path_ampere import SLOTS, Scores, Splits, attend_in_splits
from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS, require_mosaic
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned

_MOST_SPLITS = 32
MERGED_ROWS, AT_ONCE = 16, 4
"""Packed rows of a program that merges, and splits that it reads together."""
MOST_MASKED = 1 << 18
"""Places of a mask, which is spread to a number for every packed row."""


class _Part(NamedTuple):
    """What was found among some keys."""

    bounds: Int[Array, "B 3"]
    splits: Splits


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
    return _merged([_to_prefix(q, prefix, _factor(q, scale, cap))], q, dtype)


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
    return _merged([_to_fresh(q, fresh, _factor(q, scale, cap))], q, dtype)


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
    parts = _to_prefix(q, prefix, factor), _to_fresh(q, fresh, factor)
    found = _merged(parts, q, q.dtype if sinks is None else jnp.float32)
    return with_sinks(found, sinks).out.astype(q.dtype)


def _factor(q: Queries, scale: float | None, cap: float | None) -> float:
    """The factor on the scores, in base 2; refuses what the kernel cannot do."""
    require_mosaic("the kernel of attention without Triton")
    if cap is not None or q.shape[3] not in (64, 128) or q.dtype.itemsize != 2:
        raise NotImplementedError(
            f"attention without Triton takes heads of 64 or 128 numbers in 16 bits without a soft "
            f"cap, not {q.shape[3]} in {q.dtype}, cap {cap}"
        )
    return (q.shape[3] ** -0.5 if scale is None else scale) * LOG2_E


def _to_prefix(q: Queries, prefix: Prefix, factor: float) -> _Part:
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


def _to_fresh(q: Queries, fresh: Fresh, factor: float) -> _Part:
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
) -> _Part:
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
    # The first tokens of a chunk would leave nothing of a second split, which the merge reads.
    most = 1 if causal else min(_MOST_SPLITS, keys.shape[2] // SLOTS)
    count = max(1, min(most, MULTIPROCESSORS // tiles))
    split = shortest_split(length, count, SLOTS)
    cache_row = jnp.arange(len(q)) if rows is None else rows
    bounds = jnp.stack([cache_row.astype(jnp.int32), length, jnp.maximum(split, 1)], axis=1)
    splits = attend_in_splits(
        bounds, packed, keys, values, None, bias, scores=Scores(factor), count=count, causal=causal
    )
    return _Part(bounds, splits)


def _merged(parts: Sequence[_Part], q: Queries, dtype: DTypeLike) -> Partial:
    """Outputs of this type and natural log-sum-exps, from all splits of all parts."""
    batch, tokens, heads, width = q.shape
    kv_heads = parts[0].splits.top.shape[2]
    groups = heads // kv_heads
    kernel = plgpu.kernel(
        functools.partial(_merge_kernel, parts=len(parts), groups=groups),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ),
        grid=(pl.cdiv(tokens * groups, MERGED_ROWS), kv_heads, batch),
        grid_names=("block", "kv_head", "batch"),
        compiler_params=ampere.compiler_params(),
        kernel_name="merge_splits",
    )
    out, lse = kernel(*[each for part in parts for each in (part.bounds, *part.splits)])
    return Partial(out, lse)


def _merge_kernel(*refs: Ref, parts: int, groups: int) -> None:
    """Merge the splits of 16 packed rows of a key/value head, in ascending order."""
    *given, merged, sums = refs
    block, kv_head, batch = (jax.lax.axis_index(name) for name in ("block", "kv_head", "batch"))
    shape = MERGED_ROWS, merged.shape[3]
    layout = ampere.rows_layout(shape[1])
    one = layout.reduce(1)
    row = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=one) + block * MERGED_ROWS
    there = row < merged.shape[1] * groups
    row = jnp.where(there, row, 0)
    h = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def spread(numbers: Array) -> Array:
        return ampere.along_rows(numbers, shape, layout)

    def numbers(value: float, shape: tuple[int, ...], layout: ampere.Layout) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    state = numbers(-math.inf, shape[:1], one), numbers(0.0, shape[:1], one)
    state = *state, numbers(0.0, shape, layout)
    for first in range(0, 4 * parts, 4):
        bounds, out, top, total = given[first : first + 4]
        length, split = bounds[batch, 1], bounds[batch, 2]
        reached = jax.lax.div(length + split - 1, split)

        def visit(
            step: jax.Array,
            state: tuple[Array, ...],
            refs: tuple[Ref, ...] = (out, top, total),
            reached: jax.Array = reached,
        ) -> tuple[Array, ...]:
            # Unrolled, so that all reads are in flight before the first is used.
            for ahead in range(AT_ONCE):
                index = step * AT_ONCE + ahead
                known, exists = jnp.minimum(index, refs[0].shape[1] - 1), index < reached
                at = batch, known, kv_head
                more = ampere.gather(refs[0], (*at, spread(row), h), layout)
                highest, added = (ampere.gather(ref, (*at, row), one) for ref in refs[1:])
                highest = jnp.where(exists, highest, -math.inf)
                before, weight, acc = state
                new = jnp.maximum(before, highest)
                shift = jnp.where(new == -math.inf, 0.0, new)
                keep, share = jnp.exp2(before - shift), jnp.exp2(highest - shift)
                acc = acc * spread(keep) + jnp.where(exists, more, 0.0) * spread(share)
                weight = weight * keep + jnp.where(exists, added, 0.0) * share
                state = new, weight, acc
            return state

        steps = jax.lax.div(reached + AT_ONCE - 1, jnp.int32(AT_ONCE))
        state = jax.lax.fori_loop(0, steps, visit, state)
    highest, weight, acc = state
    seen = weight > 0
    weight = jnp.where(seen, weight, 1.0)
    head = kv_head * groups + jax.lax.rem(row, jnp.int32(groups))
    at = batch, jax.lax.div(row, jnp.int32(groups)), head
    lse = jnp.where(seen, highest / LOG2_E + jnp.log(weight), -math.inf)
    ampere.scatter(sums, at, lse, there, one)
    at = batch, spread(at[1]), spread(head), h
    ampere.scatter(merged, at, acc / spread(weight), spread(there), layout)
