"""The meaning of every attention op: dense, float32, one softmax, no tricks.

Each function has the signature of the op in :mod:`longspec_jax.ops.attention.dispatch` that it
defines. Nothing here is fast; everything here is short enough to check by eye.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from longspec_jax.axes import Array, Queries, Sinks, TreeRows
from longspec_jax.ops.attention.float8 import widened
from longspec_jax.ops.attention.operands import Fresh, Partial, Prefix


def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Every query of row ``b`` sees the cache slots ``start[b] <= s < length[b]``.

    Or, in a layer with a window, those whose position is not before ``oldest[b, t]``.
    """
    prefix, seen = prefix.of_batch(), _seen(q, prefix)
    keys, values = (widened(x.swapaxes(1, 2), q.dtype) for x in (prefix.keys, prefix.values))
    return _dense(q, keys, values, seen, scale, cap).in_dtype(dtype)


def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Query ``t`` sees key ``u`` where ``mask[b, t, u]`` is true."""
    assert fresh.mask is not None
    return _dense(q, fresh.keys, fresh.values, fresh.mask, scale, cap).in_dtype(dtype)


def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """One softmax over the slots that the prefix shows, the masked fresh rows, and the sinks."""
    prefix = prefix.of_batch()
    keys, values = (widened(x.swapaxes(1, 2), q.dtype) for x in (prefix.keys, prefix.values))
    k = jnp.concatenate([keys, fresh.keys], axis=1)
    v = jnp.concatenate([values, fresh.values], axis=1)
    mask = jnp.concatenate([_seen(q, prefix), fresh.seen(prefix)], axis=2)
    out = _dense(q, k, v, mask, scale, cap, sinks).out
    return out.astype(q.dtype)


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
    """Query ``t`` sees keys ``u <= t``, and with a window only those with ``t - u <= window``."""
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance <= window
    mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape))
    return _dense(q, k, v, mask, scale, cap, sinks).out.astype(q.dtype)


def _seen(q: Queries, prefix: Prefix) -> Bool[Array, "B T S"]:
    """The slots that every query sees."""
    if prefix.oldest is not None:
        position = prefix.positions()[:, None]
        return (position >= 0) & (position >= prefix.oldest[:, :, None])
    slots = jnp.arange(prefix.keys.shape[2])
    seen = slots < prefix.length[:, None]
    if prefix.start is not None:
        seen &= slots >= prefix.start[:, None]
    return jnp.broadcast_to(seen[:, None, :], (q.shape[0], q.shape[1], slots.size))


def _dense(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U K H"],
    v: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"],
    scale: float | None,
    cap: float | None,
    sinks: Sinks | None = None,
) -> Partial:
    """Masked softmax attention with the scores written out, all in float32."""
    batch, tokens, heads, width = q.shape
    groups = heads // k.shape[2]
    factor = width**-0.5 if scale is None else scale
    grouped = q.astype(jnp.float32).reshape(batch, tokens, k.shape[2], groups, width)
    # Masked memory may hold anything, NaN included: clear it rather than multiply by 0.
    seen = mask.any(axis=1)[:, :, None, None]
    k = jnp.where(seen, k.astype(jnp.float32), 0.0)
    v = jnp.where(seen, v.astype(jnp.float32), 0.0)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("BTKGH,BUKH->BKGTU", grouped, k, precision=exact) * factor
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    if sinks is not None:  # One more score a head, of a key whose value is zero.
        own = sinks.astype(jnp.float32).reshape(1, k.shape[2], groups, 1, 1)
        own = jnp.broadcast_to(own, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, own], axis=-1)
        v = jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    top = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    lse = jnp.where(total > 0, jnp.where(jnp.isneginf(top), 0.0, top) + jnp.log(total), -jnp.inf)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("BKGTU,BUKH->BTKGH", weights, v, precision=exact)
    lse = lse[..., 0].transpose(0, 3, 1, 2)
    return Partial(out.reshape(q.shape), lse.reshape(batch, tokens, heads))
