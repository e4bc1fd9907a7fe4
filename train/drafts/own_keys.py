"""Fused causal attention in which every query has keys of its own besides those of the row."""

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
      multiplies by the attention to only those.
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
        shifted(jnp.pad(keys, wider), extra.at[..., width : width + 2].set(1)),
        shifted(jnp.pad(values, wider), extra.at[..., width].set(1)),
        scale=scale,
    )
    return out[..., :width], out[..., width : width + 1]


def shifted(rows: Float[Array, "B T ..."], first: Array | int) -> Float[Array, "B T ..."]:
    """Rows without the last token, after another one."""
    first = jnp.broadcast_to(jnp.asarray(first, rows.dtype), rows[:, :1].shape)
    return jnp.concatenate([first, rows[:, :-1]], axis=1)


def attention_with_own(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    own_keys: Float[Array, "B T R K H"],
    own_values: Float[Array, "B T R K H"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """One softmax over keys ``<= t`` of a row and ``R`` keys that token ``t`` has for itself.

    The last token of a row, which has no use here, gets 0.

    Args:
      q: the queries.
      keys: of the row.
      values: likewise.
      own_keys: those that a token has for itself.
      own_values: likewise.
      scale: factor on the scores; ``H ** -0.5`` if absent.
    """
    batch, length, heads, width = q.shape
    factor = width**-0.5 if scale is None else scale
    grouped = q.reshape(batch, length, keys.shape[2], -1, width)
    scores = factor * jnp.einsum(
        "BTKGH,BTRKH->BTKGR", grouped, own_keys, preferred_element_type=jnp.float32
    )
    own = jnp.einsum(
        "BTKGR,BTRKH->BTKGH", jax.nn.softmax(scores).astype(q.dtype), own_values
    ).reshape(q.shape)
    score = jax.nn.logsumexp(scores, axis=-1).reshape(batch, length, heads, 1)
    # A query sees the keys before its place and shall see its own: it moves one place.
    out = causal_beside(shifted(q, 0), keys, values, shifted(score, 0), scale=factor)
    out, share = (jnp.pad(each[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))) for each in out)
    return out + share * own
