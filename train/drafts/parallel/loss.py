"""The loss of blocks: cross-entropy of the text and distance to the target's distribution.

``(1 - share) * -log q[label] + share * sum |p - q|`` of every slot, ``q`` the draft's distribution
with the Markov head's correction and ``p`` the target's (DSpark's loss, whose share is 0.9). Half
of the distance is the total variation: how often draws of the two must differ.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.models.target import capped, head_logits

from ...losses import ChunkLoss, Products, chunked_loss, surprise_of


class About(NamedTuple):
    """What is known of every slot."""

    labels: Int[Array, "B n"]
    """The token of the text that follows."""
    weights: Float[Array, "B n"]
    """0 where nothing is to be learned."""
    teacher: Float[Array, "B n D"]
    """The target's final hidden state that predicts the same token."""


class BlockLoss(NamedTuple):
    """Sums over weighted slots, float32."""

    loss: Float[Array, ""]
    """The mixture, which alone has a gradient."""
    cross_entropy: Float[Array, ""]
    """Of the text."""
    distance: Float[Array, ""]
    """``sum |p - q|``, 0 to 2."""
    teacher_loss: Float[Array, ""]
    """The target's own cross-entropy of the text."""


def block_loss(
    products: Products,
    about: About,
    *,
    share: float,
    chunk: int,
    cap: float | None = None,
) -> BlockLoss:
    """The loss of all slots and its parts.

    Args:
      products: of the target's LM head, which is frozen, and of the Markov head if there is one:
        its embedding of the token before each slot's, and its other table, which learn.
      about: of the slots; no gradient.
      share: of the distance, 0 to 1.
      chunk: most tokens of a device whose logits exist at once; of each model half as many.
      cap: bounds the logits of both softly, as the target's.
    """
    (_, head), *markov = products
    learns = (False, *(True for _ in markov))
    options: Any = dict(chunk=max(1, chunk // 2), head_gradients=learns, whole=head, cap=cap)
    loss, sums = chunked_loss(partial(_of_chunk, share, cap), products, about, **options)
    return BlockLoss(loss, *sums)


def _of_chunk(
    share: float, cap: float | None, logits: Array, head: Array, about: About
) -> ChunkLoss:
    wanted = capped(head_logits(head, about.teacher), cap)
    lse, surprise, label = surprise_of(logits, about.labels)
    teacher_lse, teacher, _ = surprise_of(wanted, about.labels)
    q, p = jnp.exp(logits - lse[..., None]), jnp.exp(wanted - teacher_lse[..., None])
    distance, sign = jnp.abs(p - q).sum(-1), jnp.sign(q - p)
    away = q * (sign - jnp.sum(q * sign, axis=-1, keepdims=True))
    error = (1 - share) * (q - label) + share * away
    sums = tuple(jnp.sum(about.weights * each) for each in (surprise, distance, teacher))
    loss = (1 - share) * sums[0] + share * sums[1]
    return ChunkLoss(loss, error * about.weights[..., None], sums)
