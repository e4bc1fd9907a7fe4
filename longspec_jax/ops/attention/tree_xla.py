"""Tree attention in plain XLA: one masked softmax over a few hundred fresh keys."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from longspec_jax.axes import Queries
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.operands import Fresh


def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Partial:
    """Attend where the mask is true; see :func:`reference.tree_attention`."""
    k, v, mask = fresh.keys, fresh.values, fresh.mask
    batch, tokens, heads, width = q.shape
    kv_heads = k.shape[2]
    factor = width**-0.5 if scale is None else scale
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "BTKGH,BUKH->BKGTU", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, None, None], scores * factor, -jnp.inf)
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
