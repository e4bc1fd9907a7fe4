"""Losses over a vocabulary, computed for one chunk of tokens at a time.

The logits of ``B x T`` tokens over ``V`` entries are the largest array of a training step: 20 GB in
float32 for 32k tokens of QwQ. Here they exist for one chunk at a time, and only once. The gradient
of a sum over tokens with respect to the hidden states is known, up to one scalar, as soon as the
logits are. It is computed next to the loss, kept in the dtype of the hidden states, ``[B, T, D]``,
and scaled in the backward pass, which therefore repeats no matmul.
Matmuls are in the model's dtype with float32 accumulation; everything between them is float32.
"""

import functools
import typing
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.models.target import capped, head_logits
from longspec_jax.ops.matmul.few_rows import matmul_precision
from longspec_jax.ops.partitioned import row_shares
from longspec_jax.ops.slicing import chunk_length, cut, put, whole_chunks


def next_token_labels(
    tokens: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The token each position predicts and its weight; the last position predicts nothing."""
    return jnp.roll(tokens, -1, axis=1), jnp.roll(weights, -1, axis=1).at[:, -1].set(0.0)


def tokens_at_once(vocab_size: int) -> int:
    """Tokens whose float32 logits take about a gigabyte: a larger matmul is no faster."""
    return max(256, 2**28 // vocab_size)


def cross_entropy_sum(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int = 8192,
    head_gradient: bool = False,
    cap: float | None = None,
) -> Float[Array, ""]:
    """``sum(weights * -log softmax(head @ hidden)[labels])``, float32.

    Args:
      hidden: final hidden states.
      head: the LM head.
      labels: token to predict at every position.
      weights: 0 where a position is not to be learned; no gradient.
      chunk: most tokens whose logits exist at once on a device.
      head_gradient: give the head a gradient; a frozen one saves the matmul.
      cap: bounds the logits softly, ``cap * tanh(logits / cap)``, as the target's (Gemma 2).
    """
    products, about, learns = ((hidden, head),), (labels, weights), (head_gradient,)
    return chunked_loss(_text_loss, products, about, chunk=chunk, learns=learns, cap=cap)[0]


class Distillation(NamedTuple):
    """Sums over weighted positions, float32, by the names of the metrics."""

    loss: Float[Array, ""]
    """The mixture. Only it has a gradient."""
    cross_entropy: Float[Array, ""]
    """Of the text."""
    divergence: Float[Array, ""]
    """``KL(softmax(head @ teacher) || softmax(head @ hidden))``."""
    target_loss: Float[Array, ""]
    """The teacher's own cross-entropy of the text."""


def distillation_sums(
    hidden: Float[Array, "B T D"],
    teacher: Float[Array, "B T W"],
    head: Float[Array, "V D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    share: float,
    chunk: int = 8192,
    cap: float | None = None,
    teacher_head: Float[Array, "V W"] | None = None,
) -> Distillation:
    """``(1 - share) * cross_entropy + share * divergence``, and its parts.

    Args:
      hidden: final hidden states of the student.
      teacher: those of the teacher, at the same positions; no gradient.
      head: the LM head, which both share unless the teacher has one, and which then has no
        gradient.
      labels: token to predict at every position.
      weights: 0 where a position is not to be learned.
      share: of the divergence, 0 to 1.
      chunk: most tokens whose logits exist at once on a device; of each model half as many.
      cap: as in :func:`cross_entropy_sum`, of both models, or of a teacher with its own head.
      teacher_head: the teacher's own LM head; no gradient.
    """
    criterion = functools.partial(_distillation_loss, share, cap)
    is_shared = teacher_head is None
    loss, sums = chunked_loss(
        criterion,
        ((hidden, head),),
        (labels, weights, teacher),
        chunk=max(1, chunk // 2),
        learns=(not is_shared,),
        whole=head if is_shared else teacher_head,
        cap=cap if is_shared else None,
    )
    return Distillation(loss, *sums)


class ChunkLoss(NamedTuple):
    """What a criterion computes for one chunk of tokens."""

    loss: Float[Array, ""]
    """What is learned, a sum over the tokens."""
    error: Float[Array, "B t V"]
    """Its gradient with respect to the logits."""
    sums: PyTree = ()
    """Other sums over the tokens, not differentiated."""


Criterion: TypeAlias = Callable[[Array, Array, PyTree], ChunkLoss]
"""``(logits[B, t, V], whole, parts) -> ChunkLoss``; ``parts`` are the chunk's, ``whole`` belongs to
all chunks."""

Products: TypeAlias = tuple[tuple[Array, Array], ...]
"""Hidden states and a head each, ``[B, T, D]`` and ``[V, D]``, whose products sum up to the logits.
Several states of each token, ``[B, T, n, D]``, give the logits the same axes."""


def _text_loss(logits: Array, whole: PyTree, parts: tuple[Array, Array]) -> ChunkLoss:
    labels, weights = parts
    lse, surprise, label = surprise_of(logits, labels)
    error = (jnp.exp(logits - lse[..., None]) - label) * weights[..., None]
    return ChunkLoss(jnp.sum(weights * surprise), error)


def _distillation_loss(
    share: float, cap: float | None, logits: Array, head: Array, parts: tuple[Array, Array, Array]
) -> ChunkLoss:
    labels, weights, teacher = parts
    teacher_logits = capped(head_logits(head, teacher), cap)
    lse, surprise, label = surprise_of(logits, labels)
    teacher_lse, teacher_surprise, _ = surprise_of(teacher_logits, labels)
    learned, wanted = logits - lse[..., None], teacher_logits - teacher_lse[..., None]
    probable = jnp.exp(wanted)
    divergence = jnp.sum(probable * (wanted - learned), axis=-1)
    aim = (1 - share) * label + share * probable
    sums = tuple(jnp.sum(weights * each) for each in (surprise, divergence, teacher_surprise))
    loss = (1 - share) * sums[0] + share * sums[1]
    return ChunkLoss(loss, (jnp.exp(learned) - aim) * weights[..., None], sums)


def surprise_of(logits: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Log-sum-exp and ``-log softmax[labels]``, both ``[B, t]``, and the labels as one-hot."""
    # One-hot by comparison fuses, and stays local under a sharded vocabulary.
    label = labels[..., None] == jnp.arange(logits.shape[-1])
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse, lse - jnp.sum(label * logits, axis=-1), label


def before_cap(error: Array, logits: Array, cap: float | None) -> Array:
    """A gradient by what goes into a soft cap, of the one by the logits that come out."""
    return error if cap is None else error * (1 - jnp.square(logits / cap))


def chunked_loss(
    criterion: Criterion,
    products: Products,
    parts: PyTree,
    *,
    chunk: int,
    learns: tuple[bool, ...],
    whole: PyTree = (),
    cap: float | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """A criterion over all tokens of whole rows.

    Args:
      criterion: static; computes a chunk. Where all parts of a token are 0 its loss must be 0,
        because the last chunk may be padded with such tokens.
      products: what the logits are made of.
      parts: arrays ``[B, T, ...]`` that the criterion reads besides the logits; no gradient.
      chunk: most tokens of a device whose logits exist at once.
      learns: of each product, give its head a gradient, too; a frozen one saves the matmul.
      whole: arrays that the criterion reads for every chunk; no gradient.
      cap: as in :func:`cross_entropy_sum`; the criterion reads bounded logits.

    Returns:
      The loss, and the other sums. Only the loss is differentiable.
    """
    rows, length = products[0][0].shape[:2]
    size = chunk_length(rows // row_shares(rows), length, chunk)
    products = tuple((whole_chunks(hidden, size), head) for hidden, head in products)
    parts = jax.lax.stop_gradient(jax.tree.map(lambda part: whole_chunks(part, size), parts))
    how = _How(criterion, size, learns, cap)
    found = _chunked(how, products, jax.lax.stop_gradient(whole), parts)
    loss, others = typing.cast(tuple[Array, PyTree], found)
    return loss, jax.lax.stop_gradient(others)


class _How(NamedTuple):
    """What is static, by the names of :func:`chunked_loss`."""

    criterion: Criterion
    size: int
    """Tokens of a row in a chunk."""
    learns: tuple[bool, ...]
    cap: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(how: _How, products: Products, whole: PyTree, parts: PyTree) -> tuple[Array, PyTree]:
    return _loop(how, products, whole, parts, ())[0]


def _forward(how: _How, products: Products, whole: PyTree, parts: PyTree) -> tuple[PyTree, PyTree]:
    first = tuple(
        (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32) if head_learns else None)
        for (hidden, head), head_learns in zip(products, how.learns, strict=True)
    )
    total, gradients = _loop(how, products, whole, parts, first)
    return total, tuple(
        (gradient, None if head_sum is None else head_sum.astype(head.dtype))
        for (gradient, head_sum), (_, head) in zip(gradients, products, strict=True)
    )


def _backward(how: _How, gradients: PyTree, cotangents: PyTree) -> tuple[PyTree, None, None]:
    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangents[0]).astype(gradient.dtype)

    return jax.tree.map(scaled, gradients), None, None


_chunked.defvjp(_forward, _backward)


def _loop(
    how: _How, products: Products, whole: PyTree, parts: PyTree, first: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    """Loss and sums, and the gradients if there are any to begin with.

    Gradients are, of each product, of its hidden states and, if it is not None, of its head.
    """
    hidden, heads = zip(*products, strict=True)

    def computed(start: Array) -> tuple[ChunkLoss, tuple[Array, ...]]:
        xs, mine = jax.tree.map(lambda part: cut(part, start, how.size), (hidden, parts))
        logits = capped(functools.reduce(jnp.add, map(head_logits, heads, xs)), how.cap)
        found = how.criterion(logits, whole, mine)
        return found._replace(error=before_cap(found.error, logits, how.cap)), xs

    def step(carry: tuple[PyTree, PyTree], start: Array) -> tuple[tuple[PyTree, PyTree], None]:
        total, gradients = carry
        found, xs = computed(start)
        if gradients:
            gradients = tuple(
                _add_gradients(so_far, found.error, x, head, start)
                for so_far, x, head in zip(gradients, xs, heads, strict=True)
            )
        return (jax.tree.map(jnp.add, total, (found.loss, found.sums)), gradients), None

    shapes, _ = jax.eval_shape(computed, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes.loss, shapes.sums))
    return jax.lax.scan(step, (zeros, first), jnp.arange(0, hidden[0].shape[1], how.size))[0]


def _add_gradients(so_far: PyTree, error: Array, x: Array, head: Array, start: Array) -> PyTree:
    """The gradients of a product with those of a chunk put in and added."""
    gradient, head_sum = so_far
    precision, error = matmul_precision(head.dtype), error.astype(head.dtype)
    tokens = "BTn"[: x.ndim - 1]
    dx = jnp.einsum(f"{tokens}V,VD->{tokens}D", error, head, precision=precision)
    if head_sum is not None:
        head_sum = head_sum + jnp.einsum(
            f"{tokens}V,{tokens}D->VD",
            error,
            x,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    return put(gradient, dx, start), head_sum
