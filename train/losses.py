"""Losses over a vocabulary without ever holding all logits (:mod:`train.head_loop`)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.models.target import head_logits

from .head_loop import Judgement, judge


def next_token_labels(
    tokens: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The token each position predicts and its weight; the last position predicts nothing."""
    return jnp.roll(tokens, -1, axis=1), jnp.roll(weights, -1, axis=1).at[:, -1].set(0.0)


def tokens_at_once(vocab_size: int) -> int:
    """Tokens whose float32 logits take about a gigabyte: a larger product is no faster."""
    return max(256, 2**28 // vocab_size)


def cross_entropy_sum(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int = 8192,
    head_gradient: bool = False,
) -> Float[Array, ""]:
    """``sum(weights * -log softmax(head @ hidden)[labels])``, float32.

    Args:
      hidden: final hidden states.
      head: the LM head.
      labels: token to predict at every position.
      weights: 0 where a position is not to be learned; no gradient.
      chunk: most tokens whose logits exist at once on a device.
      head_gradient: give the head a gradient; a frozen one saves the product.
    """
    parts = labels, weights
    return judge(_of_text, hidden, head, parts, chunk=chunk, head_gradient=head_gradient)[0]


def cross_entropy_and_choice(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int = 8192,
) -> tuple[Float[Array, ""], Int[Array, "B T"]]:
    """:func:`cross_entropy_sum`, and of the same logits the most probable token everywhere."""
    loss, _, tokens = judge(_of_text_and_choice, hidden, head, (labels, weights), chunk=chunk)
    return loss, tokens


def cross_entropy_sums(
    hidden: Float[Array, "B T D"],
    other: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int = 8192,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """:func:`cross_entropy_sum` of two models' hidden states; only the first has a gradient.

    In one pass over chunks half as long, so that the logits of both take no more than those of one.
    """
    parts = labels, weights, other
    loss, told, _ = judge(_of_text_twice, hidden, head, parts, chunk=max(1, chunk // 2))
    return loss, told


class TokenScores(NamedTuple):
    """How well each position predicts the next token; no gradient."""

    loss: Float[Array, "B T"]
    choice: Int[Array, "B T"]
    """The most probable token."""


def token_scores(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    *,
    chunk: int = 8192,
) -> TokenScores:
    """The cross-entropy of every token by itself, and the most probable token everywhere."""
    return judge(_of_each_token, hidden, head, labels, chunk=chunk)[2]


class Distillation(NamedTuple):
    """Sums over weighted positions, float32."""

    loss: Float[Array, ""]
    """The mixture, which alone has a gradient."""
    cross_entropy: Float[Array, ""]
    """Of the text."""
    divergence: Float[Array, ""]
    """``KL(softmax(head @ teacher) || softmax(head @ hidden))``."""
    teacher_loss: Float[Array, ""]
    """The teacher's own cross-entropy of the text."""


def distillation_sums(
    hidden: Float[Array, "B T D"],
    teacher: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    share: float,
    chunk: int = 8192,
) -> Distillation:
    """``(1 - share) * cross_entropy + share * divergence``, and its parts.

    Args:
      hidden: final hidden states of the model that learns; teacher and head get no gradient.
      teacher: those of the model that is imitated, at the same positions.
      head: the LM head, which both share.
      labels: token to predict at every position.
      weights: 0 where a position is not to be learned.
      share: of the divergence, 0 to 1.
      chunk: most tokens whose logits exist at once on a device; of each model half as many.
    """
    criterion = functools.partial(_of_mixture, share)
    parts = labels, weights, teacher
    loss, sums, _ = judge(criterion, hidden, head, parts, chunk=max(1, chunk // 2))
    return Distillation(loss, *sums)


def _of_text(logits: Array, head: Array, parts: tuple[Array, Array]) -> Judgement:
    labels, weights = parts
    lse, surprise, label = _surprise(logits, labels)
    error = (jnp.exp(logits - lse[..., None]) - label) * weights[..., None]
    return Judgement(jnp.sum(weights * surprise), error)


def _of_text_and_choice(logits: Array, head: Array, parts: tuple[Array, Array]) -> Judgement:
    return _of_text(logits, head, parts)._replace(tokens=jnp.argmax(logits, axis=-1))


def _of_each_token(logits: Array, head: Array, labels: Array) -> Judgement:
    _, surprise, _ = _surprise(logits, labels)
    tokens = TokenScores(surprise, jnp.argmax(logits, axis=-1))
    return Judgement(jnp.float32(0), jnp.zeros_like(logits), tokens=tokens)  # Nothing is learned.


def _of_text_twice(logits: Array, head: Array, parts: tuple[Array, Array, Array]) -> Judgement:
    labels, weights, other = parts
    _, surprise, _ = _surprise(head_logits(head, other), labels)
    told = jnp.sum(weights * surprise)
    return _of_text(logits, head, (labels, weights))._replace(sums=told)


def _of_mixture(
    share: float, logits: Array, head: Array, parts: tuple[Array, Array, Array]
) -> Judgement:
    labels, weights, teacher = parts
    teacher_logits = head_logits(head, teacher)
    lse, surprise, label = _surprise(logits, labels)
    teacher_lse, teacher_surprise, _ = _surprise(teacher_logits, labels)
    learned, wanted = logits - lse[..., None], teacher_logits - teacher_lse[..., None]
    probable = jnp.exp(wanted)
    divergence = jnp.sum(probable * (wanted - learned), axis=-1)
    aim = (1 - share) * label + share * probable
    sums = tuple(jnp.sum(weights * each) for each in (surprise, divergence, teacher_surprise))
    loss = (1 - share) * sums[0] + share * sums[1]
    return Judgement(loss, (jnp.exp(learned) - aim) * weights[..., None], sums)


def _surprise(logits: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Log-sum-exp and ``-log softmax[labels]``, both ``[B, t]``, and the labels as one-hot."""
    # One-hot by comparison fuses and stays local under a sharded vocabulary. No constant is as
    # large as the logits: JAX would take it out of a scan over levels, and keep it.
    label = labels[..., None] == jnp.arange(logits.shape[-1])
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse, lse - jnp.sum(label * logits, axis=-1), label
