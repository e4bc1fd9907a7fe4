"""Fused causal attention in which every query has keys of its own beside those of the row."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.attention.dispatch import causal_attention

PADDED = 8
"""Channels that heads get for one more key: the fewest that fused attention takes."""


def causal_beside(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    score: Float[Array, "B T N 1"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N 1"]]:
    """One softmax over the keys ``< t`` of a row and what query ``t`` has for itself.

    No fused attention has such a mask. But all of a query's own keys together weigh as much as one
    key whose score is the log of the sum of their exponentials. So plain causal attention gets one
    more key in front of all, and queries a channel with that score. What it gives that key, which
    a channel of the values shows, is the share of the own keys.

    Args:
      q: the queries.
      keys: of the row; the last one is not seen.
      values: likewise.
      score: the log of the sum, float32.
      scale: factor on the scores of ``keys``.

    Returns:
      What the keys of the row add to the output, and the share of the query's own, which the caller
      multiplies by the attention to them alone.
    """
    batch, length, heads, width = q.shape
    score = score / scale
    # In bfloat16 one channel would round the score too coarsely: a second one has the rest.
    coarse = jax.lax.stop_gradient(score.astype(q.dtype))
    rest = (score - coarse.astype(jnp.float32)).astype(q.dtype)
    channels = jnp.zeros((batch, length, heads, PADDED - 2), q.dtype)
    extra = jnp.zeros((batch, 1, keys.shape[2], width + PADDED), q.dtype)
    wider = ((0, 0), (0, 0), (0, 0), (0, PADDED))
    out = causal_attention(
        jnp.concatenate([q, coarse, rest, channels], axis=-1),
        behind(jnp.pad(keys, wider), extra.at[..., width : width + 2].set(1)),
        behind(jnp.pad(values, wider), extra.at[..., width].set(1)),
        scale=scale,
    )
    return out[..., :width], out[..., width : width + 1]


def behind(rows: Float[Array, "B T ..."], first: Array | int) -> Float[Array, "B T ..."]:
    """Rows without the last token, behind another one."""
    first = jnp.broadcast_to(jnp.asarray(first, rows.dtype), rows[:, :1].shape)
    return jnp.concatenate([first, rows[:, :-1]], axis=1)
