"""How much attention one query pays to every block of a cache (SpecExtend).

No attention op returns its scores: one query against the cached keys is a product as cheap as
reading them once.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths


def attended_scores(
    q: Float[Array, "B N H"],
    keys: CacheSlots,
    length: Lengths,
    block: int,
    *,
    scale: float | None = None,
) -> Float[Array, "B n"]:
    """Softmax attention to the slots ``s < length[b]``, averaged over heads and summed by blocks.

    Args:
      q: the query of one token, rotary applied.
      keys: one layer's cache; its slots must be whole blocks.
      length: slots of every row that hold tokens; those beyond may hold anything.
      block: slots of a block.
      scale: factor on the scores; ``H ** -0.5`` if absent.

    Returns:
      A share of 1 for every block, float32; zeros for a row without tokens.
    """
    batch, heads, width = q.shape
    kv_heads, slots = keys.shape[1:3]
    factor = width**-0.5 if scale is None else scale
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "BKGH,BKSH->BKGS",
        grouped,
        keys,
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    seen = (jnp.arange(slots) < length[:, None])[:, None, None]
    scores = jnp.where(seen, scores * factor, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    shares = weights / jnp.where(total > 0, total, 1.0)
    return shares.mean(axis=(1, 2)).reshape(batch, slots // block, block).sum(axis=2)
