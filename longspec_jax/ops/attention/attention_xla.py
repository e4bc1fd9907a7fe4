"""Attention in plain XLA, which runs on every platform.

The prefix is an online softmax over blocks of cache slots. Scores exist for one block of slots at a
time, and blocks past the longest row are never visited, so neither memory nor time depends on the
cache's capacity. A block that a row does not see leaves that row's running state bit for bit
unchanged, which makes a row's result independent of its neighbours' lengths. Fresh tokens are one
masked softmax over a few hundred keys. :mod:`longspec_jax.ops.attention.reference` defines each op.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Num

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, Sinks, TreeRows
from longspec_jax.ops.attention.float8 import widened
from longspec_jax.ops.attention.operands import Fresh, Partial, Prefix, merge, with_sinks
from longspec_jax.ops.attention.packing import pack, unpack
from longspec_jax.ops.dispatch import traced_once
from longspec_jax.ops.partitioned import row_shares
from longspec_jax.ops.slicing import cut, whole_chunks

BLOCK = 1024
"""Cache slots per step: large enough for efficient matmuls, small next to any long prefix. Also the
most queries of a step in training."""
LEAST_BLOCK = 128
"""Queries of a step in training, whatever their scores take."""
MOST_SCORES = 2**28
"""Scores of a device that exist at once in training, float32: 1 GiB."""


@traced_once("scale", "cap", "dtype")
def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Attend to ``start[b] <= s < length[b]``, or to what a window shows of a ring."""
    k, v, length, start = prefix.keys, prefix.values, prefix.length, prefix.start
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    factor = width**-0.5 if scale is None else scale
    ring = None
    if prefix.oldest is not None:
        ring = prefix.positions(), prefix.oldest.repeat(heads // kv_heads, axis=1)[:, None, :, None]
    block = min(BLOCK, slots)
    rows = (heads // kv_heads) * tokens
    packed = pack(q, kv_heads)
    first = jnp.zeros_like(length) if start is None else start
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def visit(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = state
        # The last block may be shifted back to stay inside the cache; ``fresh`` skips the overlap.
        offset = jnp.minimum(index * block, slots - block)
        slot = offset + jnp.arange(block)
        fresh = slot >= index * block
        seen = fresh & (slot >= first[:, None]) & (slot < length[:, None])
        k_block, v_block = (
            widened(_block(cache, prefix.cache_rows, offset, block), q.dtype) for cache in (k, v)
        )
        # Masked slots may hold anything, NaN included.
        v_block = jnp.where(seen[:, None, :, None], v_block, jnp.zeros_like(v_block))
        scores = jnp.einsum(
            "BKRH,BKSH->BKRS",
            packed,
            k_block,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores, seen = capped(scores * factor, cap), seen[:, None, None, :]
        if ring is not None:
            position = jax.lax.dynamic_slice_in_dim(ring[0], offset, block, axis=1)
            seen &= position[:, None, None, :] >= ring[1]
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        shift = jnp.where(jnp.isneginf(new_top), 0.0, new_top)
        weights = jnp.exp(scores - shift[..., None])
        keep = jnp.exp(top - shift)
        added = jnp.einsum(
            "BKRS,BKSH->BKRH",
            weights.astype(q.dtype),
            v_block,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * keep + weights.sum(axis=-1), out * keep[..., None] + added

    state = (
        jnp.full((batch, kv_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, rows), jnp.float32),
        jnp.zeros((batch, kv_heads, rows, width), jnp.float32),
    )
    last = (jnp.clip(length.max(), 0, slots) + block - 1) // block
    top, total, out = jax.lax.fori_loop(first.min() // block, last, visit, state)
    empty = total == 0
    out = out / jnp.where(empty, 1.0, total)[..., None]
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
    lse = unpack(lse[..., None], tokens)[..., 0]
    return Partial(unpack(out, tokens), lse).in_dtype(dtype)


def capped(scores: Array, cap: float | None) -> Array:
    """``cap * tanh(scores / cap)``, a soft bound; without a cap the scores."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _block(
    cache: CacheSlots, rows: Lengths | None, offset: Array, size: int
) -> Num[Array, "B K s H"]:
    """Some slots of every row, or of these rows."""
    if rows is None:
        return jax.lax.dynamic_slice_in_dim(cache, offset, size, axis=2)
    shape = (1, cache.shape[1], size, cache.shape[3])
    return jax.vmap(lambda row: jax.lax.dynamic_slice(cache, (row, 0, offset, 0), shape)[0])(rows)


@traced_once("scale", "cap", "dtype")
def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Attend where the mask is true."""
    k, v, mask = fresh.keys, fresh.values, fresh.mask
    assert mask is not None
    batch, tokens, heads, width = q.shape
    kv_heads = k.shape[2]
    factor = width**-0.5 if scale is None else scale
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "BTKGH,BUKH->BKGTU", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, None, None], capped(scores * factor, cap), -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    empty = total == 0
    # Rows no query sees may hold anything, NaN included.
    v = jnp.where(mask.any(axis=1)[:, :, None, None], v, jnp.zeros_like(v))
    out = jnp.einsum(
        "BKGTU,BUKH->BKGTH",
        weights.astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    out = (out / jnp.where(empty, 1.0, total)).transpose(0, 3, 1, 2, 4).reshape(q.shape)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(batch, tokens, heads)
    return Partial(out, lse).in_dtype(dtype)


@traced_once("scale", "cap", "attend")
def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    attend: Callable[..., Partial] = prefix_attention,
) -> Float[Array, "B T N H"]:
    """Merge attention to the prefix, by ``attend``, to the fresh tokens, and to the sinks."""
    fresh = replace(fresh, mask=fresh.seen(prefix))
    past = attend(q, prefix, scale=scale, cap=cap)
    merged = merge(past, tree_attention(q, fresh, scale=scale, cap=cap))
    return with_sinks(merged, sinks).out.astype(q.dtype)


def causal_attention(
    q: Queries,
    k: TreeRows,
    v: TreeRows,
    sinks: Sinks | None = None,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Whole sequences, a block of queries at a time; scores are computed again for gradients.

    Through a window a block reads the keys before it that the window holds, and its own.
    """
    batch, tokens, heads, _ = q.shape
    share = heads * batch // row_shares(batch)
    seen = tokens if window is None else min(tokens, window + BLOCK)
    size = min(BLOCK, tokens, max(LEAST_BLOCK, MOST_SCORES // (share * seen)))
    seen = tokens if window is None else min(tokens, window + size)
    queries = whole_chunks(q, size)

    @jax.checkpoint
    def attend(start: Array) -> Array:
        first = 0 if window is None else jnp.clip(start - window, 0, tokens - seen)
        keys, values = (cut(each, first, seen) for each in (k, v))
        distance = start + jnp.arange(size)[:, None] - (first + jnp.arange(seen))
        mask = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
        fresh = Fresh(keys, values, jnp.broadcast_to(mask, (batch, *mask.shape)))
        found = tree_attention(cut(queries, start, size), fresh, scale=scale, cap=cap)
        return with_sinks(found, sinks).out.astype(q.dtype)

    found = jax.lax.map(attend, jnp.arange(0, queries.shape[1], size))
    return found.swapaxes(0, 1).reshape(queries.shape)[:, :tokens]
