"""The meaning of every attention op: dense, float32, one softmax, no tricks.

Each function has the signature of the op in :mod:`longspec_jax.ops.attention.dispatch` that it defines.
Nothing here is fast; everything here is short enough to check by eye.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, TreeMask, TreeRows
from longspec_jax.ops.attention.merge import Partial


def prefix_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    start: Lengths | None = None,
    *,
    scale: float | None = None,
) -> Partial:
    """Every query of row ``b`` sees the cache slots ``start[b] <= s < length[b]``."""
    slots = jnp.arange(k.shape[2])
    seen = slots < length[:, None]
    if start is not None:
        seen &= slots >= start[:, None]
    mask = jnp.broadcast_to(seen[:, None, :], (q.shape[0], q.shape[1], k.shape[2]))
    return _dense(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask, scale)


def tree_attention(
    q: Queries, k: TreeRows, v: TreeRows, mask: TreeMask, *, scale: float | None = None
) -> Partial:
    """Query ``t`` sees key ``u`` where ``mask[b, t, u]`` is true."""
    return _dense(q, k, v, mask, scale)


def speculative_attention(
    q: Queries,
    prefix_k: CacheSlots,
    prefix_v: CacheSlots,
    length: Lengths,
    tree_k: TreeRows,
    tree_v: TreeRows,
    mask: TreeMask,
    *,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """One softmax over the committed slots ``s < length[b]`` and the masked tree rows."""
    slots = jnp.arange(prefix_k.shape[2])
    seen = jnp.broadcast_to(
        (slots < length[:, None])[:, None, :], (q.shape[0], q.shape[1], slots.size)
    )
    k = jnp.concatenate([prefix_k.swapaxes(1, 2), tree_k], axis=1)
    v = jnp.concatenate([prefix_v.swapaxes(1, 2), tree_v], axis=1)
    out = _dense(q, k, v, jnp.concatenate([seen, mask], axis=2), scale).out
    return out.astype(q.dtype)


def causal_attention(
    q: Queries,
    k: TreeRows,
    v: TreeRows,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """Query ``t`` sees keys ``u <= t``, and with a window only those with ``t - u <= window``."""
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance <= window
    mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape))
    return _dense(q, k, v, mask, scale).out.astype(q.dtype)


def _dense(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B U K H"],
    v: Float[Array, "B U K H"],
    mask: Bool[Array, "B T U"],
    scale: float | None,
) -> Partial:
    """Masked softmax attention with the scores written out, all in float32."""
    batch, tokens, heads, width = q.shape
    groups = heads // k.shape[2]
    factor = width**-0.5 if scale is None else scale
    grouped = q.astype(jnp.float32).reshape(batch, tokens, k.shape[2], groups, width)
    # Memory behind the mask may hold anything, NaN included: clear it rather than multiply by 0.
    seen = mask.any(axis=1)[:, :, None, None]
    k = jnp.where(seen, k.astype(jnp.float32), 0.0)
    v = jnp.where(seen, v.astype(jnp.float32), 0.0)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("BTKGH,BUKH->BKGTU", grouped, k, precision=exact) * factor
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    lse = jnp.where(total > 0, jnp.where(jnp.isneginf(top), 0.0, top) + jnp.log(total), -jnp.inf)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("BKGTU,BUKH->BTKGH", weights, v, precision=exact)
    lse = lse[..., 0].transpose(0, 3, 1, 2)
    return Partial(out.reshape(q.shape), lse.reshape(batch, tokens, heads))
