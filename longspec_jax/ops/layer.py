"""The small ops of a layer, each one launch in a decode step on a GPU.

XLA makes two or three kernels of each, whose launches take a tenth of a decode step over one token.
For the few rows of a decode step on a GPU one Pallas kernel does it
(:mod:`longspec_jax.ops.layer_pallas`, and :mod:`longspec_jax.ops.layer_ampere` without Triton).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CachedRows, CacheSlots, Lengths
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.caches import put_tokens
from longspec_jax.ops.dispatch import Implementation, Op, differentiable_op, op, traced_once
from longspec_jax.ops.hardware import require_decode_step, require_mosaic
from longspec_jax.ops.slicing import along

MAX_WIDTH = 16384
"""One program of the norm's kernel holds a whole row in registers."""
Heads = tuple[Array, Array, Array]
"""Queries ``[B, T, N, H]``, keys and values ``[B, T, K, H]``."""


def _kernel_of(listing: Op) -> Callable[[Implementation], Implementation]:
    """List the decorated function for Triton, and for Mosaic where this jax lacks Triton."""

    def decorate(function: Implementation) -> Implementation:
        listing.without_triton(partial(function, mosaic=True))
        listing.kernel("pallas")(partial(function, mosaic=False))
        return function

    return decorate


def _kernels(mosaic: bool) -> Any:
    """The module of the kernels: this jax may lack the backend of either."""
    if mosaic:
        require_mosaic("the small ops' kernels without Triton")
        from longspec_jax.ops import layer_ampere

        return layer_ampere
    from longspec_jax.ops import layer_pallas

    return layer_pallas


@differentiable_op(static=1)
@traced_once("eps")
def residual_norm(
    x: Float[Array, "*rows D"],
    partials: Float[Array, "S *rows D"] | None,
    scale: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Add a sublayer's output to the residual stream and normalise the sum.

    Args:
      x: the residual stream.
      partials: split-K partials of what is added (:mod:`longspec_jax.ops.matmul.few_rows`); None
        before the first sublayer.
      scale: the norm's weights.
      eps: added to the mean square.

    Returns:
      ``x + partials.sum(0)`` and its RMS norm, both in the dtype of ``x``; differentiable.
    """
    total = x if partials is None else add(x, partials)
    return total, rms_norm(total, scale, eps)


@_kernel_of(residual_norm)
def _residual_norm_kernel(
    x: Array, partials: Array | None, scale: Array, eps: float, *, mosaic: bool
) -> tuple[Array, Array]:
    rows = x.size // x.shape[-1]
    require_decode_step("the norm's kernel", rows, x.dtype)
    if x.shape[-1] > MAX_WIDTH:
        raise NotImplementedError(f"the norm's kernel takes widths up to {MAX_WIDTH}")
    return _kernels(mosaic).residual_norm(x, partials, scale, eps=eps)


def add(x: Array, partials: Array) -> Array:
    """``x + partials.sum(0)`` in the dtype of ``x``, rounded once."""
    if partials.shape[0] == 1:
        return x + partials[0]
    return (x.astype(jnp.float32) + added(partials)).astype(x.dtype)


def added(partials: Float[Array, "S *rows D"]) -> Float[Array, "*rows D"]:
    """Split-K partials added up in float32, one after the other."""
    total, *others = partials.astype(jnp.float32)
    for part in others:
        total += part
    return total


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / rms(x) * scale`` over the last axis, computed in float32, in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * factor * scale.astype(jnp.float32)).astype(x.dtype)


@differentiable_op(static=1)
@traced_once("eps")
def split_heads(
    qkv: Float[Array, "B T K G2 H"],
    cos: Float[Array, " B #T half"],
    sin: Float[Array, " B #T half"],
    scales: tuple[Float[Array, " H"], Float[Array, " H"]] | None = None,
    eps: float = 0.0,
) -> Heads:
    """Split queries, keys and values, and rotate queries and keys by the tokens' positions.

    Args:
      qkv: the fused projection: per key/value head its queries, then its key, then its value.
      cos: cosine of the rotary angles, float32.
      sin: sine of the rotary angles, float32.
      scales: weights of the RMS norms of every query head and every key head, which come before
        the rotation; None for a model without such norms.
      eps: of the norms.

    Returns:
      Rotated queries ``[B, T, N, H]`` and keys ``[B, T, K, H]``, and values ``[B, T, K, H]``;
      differentiable.
    """
    q, k, v = split_qkv(qkv)
    if scales is not None:
        q, k = rms_norm(q, scales[0], eps), rms_norm(k, scales[1], eps)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), v


@_kernel_of(split_heads)
def _split_heads_kernel(
    qkv: Array,
    cos: Array,
    sin: Array,
    scales: tuple[Array, Array] | None,
    eps: float,
    *,
    mosaic: bool,
) -> Heads:
    _require_heads(qkv, mosaic)
    return _kernels(mosaic).split_heads(qkv, cos, sin, scales, eps=eps)


@op
def split_into(
    qkv: Float[Array, "B T K G2 H"],
    cos: Float[Array, " B #T half"],
    sin: Float[Array, " B #T half"],
    rows: tuple[Float[Array, "B U K H"], Float[Array, "B U K H"]],
    first: int,
) -> Heads:
    """:func:`split_heads`, with keys and values put among others from place ``first`` on.

    Args:
      qkv: as there.
      cos: as there; of one token where all are at the same position.
      sin: likewise.
      rows: keys and values of which ``T`` are replaced, in place where they may be.
      first: the first of these.

    Returns:
      Rotated queries ``[B, T, N, H]``, and all keys and values ``[B, U, K, H]``.
    """
    q, *fresh = split_heads.definition(qkv, cos, sin)
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
    keys, values = map(write, rows, fresh)
    return q, keys, values


@_kernel_of(split_into)
def _split_into_kernel(
    qkv: Array, cos: Array, sin: Array, rows: tuple[Array, Array], first: int, *, mosaic: bool
) -> Heads:
    _require_heads(qkv, mosaic)
    return _kernels(mosaic).split_heads(qkv, cos, sin, None, rows, first=first)


def _require_heads(qkv: Array, mosaic: bool) -> None:
    rows = qkv.shape[0] * qkv.shape[1]
    require_decode_step("the kernel that splits heads", rows, qkv.dtype)
    if mosaic and qkv.shape[-1] % 16:
        raise NotImplementedError(f"heads of {qkv.shape[-1]} numbers are not a multiple of 16")


def wide_qk_norm(
    qkv: Float[Array, "B T K G2 H"],
    scales: tuple[Float[Array, "K G H"], Float[Array, "K H"]],
    eps: float,
) -> Float[Array, "B T K G2 H"]:
    """Normalise all query heads of a token together, and all its key heads; values stay."""
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1:, :]

    def normalised(heads: Array, scale: Array) -> Array:
        flat = heads.reshape(*heads.shape[:2], -1)
        return residual_norm(flat, None, scale.reshape(-1), eps)[1].reshape(heads.shape)

    q, k = normalised(q, scales[0]), normalised(k, scales[1])
    return jnp.concatenate([q, k[..., None, :], v], axis=3)


def split_qkv(qkv: Float[Array, "B T K G2 H"]) -> Heads:
    """Queries, keys and values of the fused projection, none rotated."""
    batch, tokens, kv_heads, slots, width = qkv.shape
    q = qkv[:, :, :, : slots - 2].reshape(batch, tokens, kv_heads * (slots - 2), width)
    return q, qkv[:, :, :, -2], qkv[:, :, :, -1]


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Rotate the pairs ``(x[i], x[i + H/2])`` of every head of ``x[B, T, heads, H]``."""
    cos, sin = (table[:, :, None, :] for table in angles)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


@op
def append_rows(
    caches: Sequence[CacheSlots],
    fresh: Sequence[CachedRows],
    path: Int[Array, "B h"],
    length: Lengths,
    cache_rows: Lengths | None = None,
    *,
    ring: bool = False,
) -> tuple[CacheSlots, ...]:
    """Write fresh rows ``path[b]`` at slots ``length[b] ... length[b] + h - 1`` of every cache.

    Args:
      caches: keys or values of the layers, all of one shape; updated in place where they may be.
      fresh: the layers' fresh rows.
      path: the rows to append, in order.
      length: where; the caller guarantees ``length + h <= S``, or ``h <= S`` in a ring.
      cache_rows: the row of the caches for every batch row, no two alike; its own if absent.
      ring: whether slots are counted modulo their number.
    """
    each = zip(caches, fresh, strict=True)
    if ring:
        at = (length[:, None] + jnp.arange(path.shape[1])) % caches[0].shape[2]
        return tuple(put_tokens(slots, cache_rows, at, along(path, new)) for slots, new in each)
    return tuple(_append(slots, new, path, length, cache_rows) for slots, new in each)


@traced_once()
def _append(
    slots: CacheSlots,
    fresh: CachedRows,
    path: Int[Array, "B h"],
    length: Lengths,
    cache_rows: Lengths | None,
) -> CacheSlots:
    """One layer's slots with its fresh rows, as in :func:`append_rows` without a ring."""

    def write_row(slots: Array, fresh: Array, path: Array, at: Array) -> Array:
        rows = fresh[path].swapaxes(0, 1)
        return jax.lax.dynamic_update_slice_in_dim(slots, rows, at, axis=1)

    if cache_rows is not None:
        for row, at in enumerate(cache_rows):
            own = fresh[row, path[row]].swapaxes(0, 1)[None]
            slots = jax.lax.dynamic_update_slice(slots, own, (at, 0, length[row], 0))
        return slots
    if slots.shape[0] == 1:  # A plain slice update; vmap would turn it into a scatter.
        return write_row(slots[0], fresh[0], path[0], length[0])[None]
    return jax.vmap(write_row)(slots, fresh, path, length)


@_kernel_of(append_rows)
def _append_rows_kernel(
    caches: Sequence[CacheSlots],
    fresh: Sequence[CachedRows],
    path: Array,
    length: Array,
    cache_rows: Array | None = None,
    *,
    ring: bool = False,
    mosaic: bool,
) -> tuple[CacheSlots, ...]:
    dtype, width = caches[0].dtype, caches[0].shape[3]
    # Fresh rows have the dtype of the cache: the kernel copies.
    dtype = jnp.bfloat16 if dtype == CODES else dtype
    require_decode_step("the kernel that appends rows", path.size, dtype)
    if mosaic and width % 8:
        raise NotImplementedError(f"heads of {width} numbers are not a multiple of 8")
    return _kernels(mosaic).append_rows(caches, fresh, path, length, cache_rows, ring=ring)
