"""The LM head over long rows, a chunk of tokens at a time, the gradient in the same iteration.

The logits of ``B x T`` tokens over ``V`` entries are the largest array of a training step: 20 GB in
float32 for 32k tokens of QwQ. Here they exist for one chunk at a time, and once: a sum over tokens
has a gradient for the hidden states that is known, up to one scalar, as soon as the logits are. It
is made beside the loss, kept in the dtype of the hidden states, ``[B, T, D]``, and multiplied by
the scalar in the backward pass, which has no product left to do.
Products are in the model's dtype with float32 accumulation; everything between them is float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.models.target import head_logits
from longspec_jax.ops.matmul.few_rows import matmul_precision
from longspec_jax.ops.partitioned import row_shares
from longspec_jax.ops.slicing import chunk_length, cut, put, whole_chunks

HEAD_GRADIENT = "head_gradient"
"""Under this name :func:`jax.checkpoint` can keep the gradient, and with it spare the products."""


class Judgement(NamedTuple):
    """What a criterion says of some tokens."""

    loss: Float[Array, ""]
    """What is learned, a sum over the tokens."""
    error: Float[Array, "B t V"]
    """Its gradient with respect to the logits."""
    sums: Any = ()
    """Other sums over the tokens, not differentiated."""
    tokens: Any = ()
    """Something of every token, ``[B, t]``, not differentiated."""


Criterion: TypeAlias = Callable[[Array, Array, Any], Judgement]
"""``(logits[B, t, V], head[V, D], parts) -> judgement``; ``parts`` are the chunk's."""


def judge(
    criterion: Criterion,
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    parts: Any,
    *,
    chunk: int,
    head_gradient: bool = False,
) -> tuple[Float[Array, ""], Any, Any]:
    """A criterion over all tokens of whole rows.

    Args:
      criterion: static; judges a chunk. Of tokens whose parts are 0 the loss must be 0, because
        the last chunk may be padded with them.
      hidden: final hidden states.
      head: the LM head.
      parts: arrays ``[B, T, ...]`` that the criterion reads beside the logits; no gradient.
      chunk: most tokens of a device whose logits exist at once.
      head_gradient: give the head a gradient, too; a frozen one saves the product.

    Returns:
      The loss, the one thing that is differentiable, the other sums, and what is said of each
      token.
    """
    rows, length = hidden.shape[:2]
    size = chunk_length(rows // row_shares(rows), length, chunk)
    hidden = whole_chunks(hidden, size)
    parts = jax.lax.stop_gradient(jax.tree.map(lambda part: whole_chunks(part, size), parts))
    found: Any = _judge(criterion, size, head_gradient, hidden, head, parts)
    loss, (sums, tokens) = found[0], jax.lax.stop_gradient(found[1])
    return loss, sums, jax.tree.map(lambda part: part[:, :length], tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _judge(
    criterion: Criterion, size: int, head_gradient: bool, hidden: Array, head: Array, parts: Any
) -> tuple[Array, tuple[Any, Any]]:
    total, tokens, _ = _loop(criterion, size, hidden, head, parts, ())
    return total[0], (total[1], tokens)


def _forward(
    criterion: Criterion, size: int, head_gradient: bool, hidden: Array, head: Array, parts: Any
) -> tuple[Any, tuple[Array, Array | None]]:
    wide = jnp.zeros(head.shape, jnp.float32) if head_gradient else None
    first = jnp.zeros_like(hidden), wide
    total, tokens, (gradient, head_sum) = _loop(criterion, size, hidden, head, parts, first)
    gradient = checkpoint_name(gradient, HEAD_GRADIENT)
    if head_sum is not None:
        head_sum = checkpoint_name(head_sum.astype(head.dtype), HEAD_GRADIENT)
    return (total[0], (total[1], tokens)), (gradient, head_sum)


def _backward(
    criterion: Criterion, size: int, head_gradient: bool, saved: Any, cotangents: Any
) -> tuple[Any, ...]:
    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangents[0]).astype(gradient.dtype)

    gradient, head_sum = saved
    return scaled(gradient), None if head_sum is None else scaled(head_sum), None


_judge.defvjp(_forward, _backward)


def _loop(
    criterion: Criterion, size: int, hidden: Array, head: Array, parts: Any, first: Any
) -> tuple[Any, Any, Any]:
    """Loss and sums, what is said of each token, and the gradients if there are any to begin with.

    Gradients are of hidden states and, if it is not None, of the head.
    """
    # Where hidden states change and labels do not, as in a scan over levels, JAX would take what
    # depends on labels alone out of that scan, and keep their one-hot form for all chunks.
    hidden, parts = jax.lax.optimization_barrier((hidden, parts))

    def judged(start: Array) -> tuple[Judgement, Array]:
        x, mine = jax.tree.map(lambda part: cut(part, start, size), (hidden, parts))
        return criterion(head_logits(head, x), head, mine), x

    def step(carry: tuple[Any, Any], start: Array) -> tuple[tuple[Any, Any], Any]:
        total, gradients = carry
        found, x = judged(start)
        if gradients:
            gradients = _add_gradients(gradients, found.error, x, head, start)
        total = jax.tree.map(jnp.add, total, (found.loss, found.sums))
        return (total, gradients), found.tokens

    shapes, _ = jax.eval_shape(judged, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes.loss, shapes.sums))
    starts = jnp.arange(0, hidden.shape[1], size)
    (total, gradients), tokens = jax.lax.scan(step, (zeros, first), starts)
    whole = hidden.shape[:2]
    return total, jax.tree.map(lambda part: part.swapaxes(0, 1).reshape(whole), tokens), gradients


def _add_gradients(gradients: Any, error: Array, x: Array, head: Array, start: Array) -> Any:
    """The gradients with those of a chunk put in and added."""
    gradient, head_sum = gradients
    precision, error = matmul_precision(head.dtype), error.astype(head.dtype)
    dx = jnp.einsum("BTV,VD->BTD", error, head, precision=precision)
    if head_sum is not None:
        head_sum = head_sum + jnp.einsum(
            "BTV,BTD->VD", error, x, precision=precision, preferred_element_type=jnp.float32
        )
    return put(gradient, dx, start), head_sum
