"""Losses over a vocabulary without ever holding all logits.

The logits of ``B x T`` tokens over ``V`` entries are the largest array of a training step: 20 GB in
float32 for 32k tokens of QwQ. Here they exist for one chunk of tokens at a time, in the forward
pass and again in the backward pass, which recomputes them from the saved float32 log-sum-exp.
Products are in the model's dtype with float32 accumulation; everything between them is float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Shaped

from longspec_jax.axes import Array
from longspec_jax.ops.partitioned import row_shares
from longspec_jax.ops.products.skinny import matmul_precision


def next_token_labels(
    tokens: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """The token each position predicts and its weight; the last position predicts nothing."""
    return jnp.roll(tokens, -1, axis=1), jnp.roll(weights, -1, axis=1).at[:, -1].set(0.0)


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
      weights: 0 where a position is not to be learned.
      chunk: most tokens whose logits exist at once on a device.
      head_gradient: give the head a gradient; a frozen one saves the product.
    """
    rows, length = labels.shape
    size = chunk_length(rows // row_shares(rows), length, chunk)
    # Padding has weight 0, and its gradients fall away with it.
    hidden, labels, weights = (whole_chunks(part, size) for part in (hidden, labels, weights))
    return _cross_entropy_sum(hidden, head, labels, weights, size, head_gradient)


def tokens_at_once(vocab_size: int) -> int:
    """Tokens whose float32 logits take about a gigabyte: a larger product is no faster."""
    return max(256, 2**28 // vocab_size)


def chunk_length(rows: int, length: int, chunk: int) -> int:
    """Tokens of each row in one chunk: the largest divisor of the length that fits.

    Where that is less than half of what fits, as for prime lengths, chunks are as even as can be
    and the last one is padded by :func:`whole_chunks`. Chunks cut every row and never the batch,
    because the batch is what devices share.
    """
    fits = min(length, max(1, chunk // rows))
    divisor = max(size for size in range(1, fits + 1) if length % size == 0)
    return divisor if 2 * divisor >= fits else -(-length // -(-length // fits))


def whole_chunks(part: Shaped[Array, "..."], size: int, axis: int = 1) -> Shaped[Array, "..."]:
    """An array with zeros behind it, as far as the last chunk needs some."""
    padding = [(0, -part.shape[axis] % size if each == axis else 0) for each in range(part.ndim)]
    return jnp.pad(part, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy_sum(
    hidden: Array, head: Array, labels: Array, weights: Array, size: int, head_gradient: bool
) -> Array:
    return _forward(hidden, head, labels, weights, size, head_gradient)[0]


def _forward(
    hidden: Array, head: Array, labels: Array, weights: Array, size: int, head_gradient: bool
) -> tuple[Array, Any]:
    def step(total: Array, start: Array) -> tuple[Array, Array]:
        x, y, w = (_cut(part, start, size) for part in (hidden, labels, weights))
        logits = _logits(x, head)
        lse = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.sum(jnp.where(_is_label(logits, y), logits, 0.0), axis=-1)
        return total + jnp.sum(w * (lse - chosen)), lse

    starts = jnp.arange(0, labels.shape[1], size)
    total, lse = jax.lax.scan(step, jnp.float32(0), starts)
    return total, (hidden, head, labels, weights, lse)


def _backward(size: int, head_gradient: bool, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    hidden, head, labels, weights, lse = saved
    precision = matmul_precision(head.dtype)

    def step(carry: tuple[Array, Any], chunk: tuple[Array, Array]) -> tuple[Any, None]:
        gradient, head_sum = carry
        start, chunk_lse = chunk
        x, y, w = (_cut(part, start, size) for part in (hidden, labels, weights))
        logits = _logits(x, head)
        error = jnp.exp(logits - chunk_lse[..., None]) - _is_label(logits, y)
        error = (error * (w * cotangent)[..., None]).astype(head.dtype)
        dx = jnp.einsum("BTV,VD->BTD", error, head, precision=precision).astype(hidden.dtype)
        gradient = jax.lax.dynamic_update_slice_in_dim(gradient, dx, start, axis=1)
        if head_gradient:
            head_sum = head_sum + jnp.einsum(
                "BTV,BTD->VD", error, x, precision=precision, preferred_element_type=jnp.float32
            )
        return (gradient, head_sum), None

    head_sum = jnp.zeros(head.shape, jnp.float32) if head_gradient else None
    starts = jnp.arange(0, labels.shape[1], size)
    (gradient, head_sum), _ = jax.lax.scan(step, (jnp.zeros_like(hidden), head_sum), (starts, lse))
    return gradient, None if head_sum is None else head_sum.astype(head.dtype), None, None


_cross_entropy_sum.defvjp(_forward, _backward)


def greedy_tokens(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], *, chunk: int = 8192
) -> Int[Array, "B T"]:
    """The most probable token at every position; no gradient."""
    rows, length = hidden.shape[:2]
    size = chunk_length(rows // row_shares(rows), length, chunk)
    hidden = whole_chunks(jax.lax.stop_gradient(hidden), size)
    starts = jnp.arange(0, hidden.shape[1], size)
    found = jax.lax.map(
        lambda start: jnp.argmax(_logits(_cut(hidden, start, size), head), axis=-1), starts
    )
    return jnp.moveaxis(found, 0, 1).reshape(rows, -1)[:, :length]


def divergence_sum(
    hidden: Float[Array, "B T D"],
    teacher: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    weights: Float[Array, "B T"],
    *,
    chunk: int = 8192,
) -> Float[Array, ""]:
    """``sum(weights * KL(softmax(head @ teacher) || softmax(head @ hidden)))``, float32.

    Args:
      hidden: final hidden states of the model that learns; teacher and head get no gradient.
      teacher: those of the model that is imitated, at the same positions.
      head: the LM head, which both share.
      weights: 0 where a position is not to be learned.
      chunk: most tokens of a device of which logits exist at once, twice.
    """
    rows, length = weights.shape
    size = chunk_length(rows // row_shares(rows), length, chunk)
    hidden, teacher, weights = (whole_chunks(part, size) for part in (hidden, teacher, weights))
    return _divergence_sum(hidden, teacher, head, weights, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _divergence_sum(hidden: Array, teacher: Array, head: Array, weights: Array, size: int) -> Array:
    def step(total: Array, start: Array) -> tuple[Array, None]:
        x, y, w = (_cut(part, start, size) for part in (hidden, teacher, weights))
        learned, wanted = (jax.nn.log_softmax(_logits(each, head)) for each in (x, y))
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - learned), axis=-1)
        return total + jnp.sum(w * divergence), None

    return jax.lax.scan(step, jnp.float32(0), jnp.arange(0, weights.shape[1], size))[0]


def _divergence_forward(
    hidden: Array, teacher: Array, head: Array, weights: Array, size: int
) -> tuple[Array, Any]:
    saved = hidden, teacher, head, weights
    return _divergence_sum(*saved, size), saved


def _divergence_backward(size: int, saved: Any, cotangent: Array) -> tuple[Any, ...]:
    hidden, teacher, head, weights = saved

    def step(gradient: Array, start: Array) -> tuple[Array, None]:
        x, y, w = (_cut(part, start, size) for part in (hidden, teacher, weights))
        learned, wanted = (jax.nn.softmax(_logits(each, head)) for each in (x, y))
        error = ((learned - wanted) * (w * cotangent)[..., None]).astype(head.dtype)
        precision = matmul_precision(head.dtype)
        dx = jnp.einsum("BTV,VD->BTD", error, head, precision=precision).astype(hidden.dtype)
        return jax.lax.dynamic_update_slice_in_dim(gradient, dx, start, axis=1), None

    starts = jnp.arange(0, weights.shape[1], size)
    return jax.lax.scan(step, jnp.zeros_like(hidden), starts)[0], None, None, None


_divergence_sum.defvjp(_divergence_forward, _divergence_backward)


def _cut(part: Array, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(part, start, size, axis=1)


def _logits(x: Array, head: Array) -> Float[Array, "B T V"]:
    return jnp.einsum(
        "BTD,VD->BTV",
        x,
        head,
        precision=matmul_precision(head.dtype),
        preferred_element_type=jnp.float32,
    )


def _is_label(logits: Array, labels: Array) -> Array:
    """One-hot by comparison, which fuses and stays local under a sharded vocabulary."""
    return labels[..., None] == jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
