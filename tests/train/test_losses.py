"""Chunked cross-entropy against the dense one."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.ops.slicing import chunk_length
from tests.kit import ALL_PASSES, each_row, relative_error
from train.acceptance import count_hits
from train.drafts.parallel import About, block_loss
from train.losses import cross_entropy_sum, distillation_sums, next_token_labels


def dense(hidden: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    logits = jnp.einsum("BTD,VD->BTV", hidden.astype(jnp.float32), head.astype(jnp.float32))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return -jnp.sum(weights * chosen)


def inputs(dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    drawn = np.random.default_rng(7)
    hidden, head = 3 * drawn.normal(size=(3, 12, 20)), drawn.normal(size=(37, 20))
    labels, weights = drawn.integers(37, size=(3, 12)), drawn.random((3, 12)) > 0.3
    parts = (hidden, dtype), (head, dtype), (labels, jnp.int32), (weights, jnp.float32)
    return tuple(jnp.asarray(part, kind) for part, kind in parts)


@each_row("chunk", [1, 9, 1000])
@each_row(("dtype", "bound"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_value_and_gradients_equal_the_dense_ones(
    chunk: int, dtype: jnp.dtype, bound: float
) -> None:
    hidden, head, labels, weights = inputs(dtype)

    def chunked(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy_sum(hidden, head, labels, weights, chunk=chunk, head_gradient=True)

    @jax.jit
    def both(hidden: jax.Array, head: jax.Array) -> Any:
        wide = (hidden.astype(jnp.float32), head.astype(jnp.float32))
        return (
            jax.value_and_grad(chunked, (0, 1))(hidden, head),
            jax.value_and_grad(dense, (0, 1))(*wide, labels, weights),
        )

    (value, gradients), (expected, dense_gradients) = both(hidden, head)
    assert value.dtype == jnp.float32 and relative_error(value, expected) < 1e-5
    for actual, wanted in zip(gradients, dense_gradients, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual.astype(jnp.float32), wanted) < bound


@each_row(
    ("chunk", "dtype", "bound", "share"),
    [
        # Every two of them together.
        (1, jnp.float32, 1e-5, 0.3),
        (9, jnp.float32, 1e-5, 1.0),
        (1000, jnp.float32, 1e-5, 0.3),
        (1, jnp.bfloat16, 2e-2, 1.0),
        (9, jnp.bfloat16, 2e-2, 0.3),
        (1000, jnp.bfloat16, 2e-2, 1.0),
    ],
)
def test_distillation_equals_the_dense_one(
    chunk: int, dtype: jnp.dtype, bound: float, share: float
) -> None:
    hidden, head, labels, weights = inputs(dtype)
    noise = np.random.default_rng(1).normal(size=hidden.shape)
    teacher = hidden + jnp.asarray(noise, dtype)

    def chunked(hidden: jax.Array, teacher: jax.Array, head: jax.Array) -> Any:
        found = distillation_sums(hidden, teacher, head, labels, weights, share=share, chunk=chunk)
        return found.loss, found

    def wide(hidden: jax.Array) -> tuple[jax.Array, Any]:
        learned, wanted = (
            jax.nn.log_softmax(jnp.einsum("BTD,VD->BTV", x, head.astype(jnp.float32)))
            for x in (hidden, teacher.astype(jnp.float32))
        )
        divergence = jnp.sum(weights * jnp.sum(jnp.exp(wanted) * (wanted - learned), -1))
        texts = [dense(x, head, labels, weights) for x in (hidden, teacher)]
        loss = (1 - share) * texts[0] + share * divergence
        return loss, (loss, texts[0], divergence, texts[1])

    learn = jax.jit(jax.value_and_grad(chunked, (0, 1, 2), has_aux=True))
    (_, found), gradients = learn(hidden, teacher, head)
    (_, expected), gradient = jax.jit(jax.value_and_grad(wide, has_aux=True))(
        hidden.astype(jnp.float32)
    )
    for name, actual, wanted in zip(found._fields, found, expected, strict=True):
        assert actual.dtype == jnp.float32 and relative_error(actual, wanted) < 1e-5, name
    assert gradients[0].dtype == dtype
    assert relative_error(gradients[0].astype(jnp.float32), gradient) < bound
    assert not jnp.any(gradients[1]) and not jnp.any(gradients[2])
    assert learn(hidden, hidden, head)[0][1].divergence == 0.0


@each_row("head_gradient", [False, True])
def test_capped_logits_have_the_gradients_of_the_definition(head_gradient: bool) -> None:
    """Of the text, of a distribution that is capped as well, and of a parallel draft's blocks."""
    hidden, head, labels, weights = inputs(jnp.float32)
    teacher, cap, share = hidden[::-1] + 1, 4.0, 0.3

    def logs(x: jax.Array, head: jax.Array) -> jax.Array:
        scores = jnp.einsum("BTD,VD->BTV", x, head, precision="highest")
        return jax.nn.log_softmax(cap * jnp.tanh(scores / cap))

    def expected(hidden: jax.Array, head: jax.Array) -> Any:
        ours, theirs = logs(hidden, head), logs(teacher, head)
        text = -jnp.take_along_axis(ours, labels[..., None], -1)[..., 0]
        divergence = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
        distance = jnp.abs(jnp.exp(theirs) - jnp.exp(ours)).sum(axis=-1)
        mixed = ((1 - share) * text + share * each for each in (divergence, distance))
        return tuple(jnp.sum(weights * each) for each in (text, *mixed))

    def found(hidden: jax.Array, head: jax.Array) -> Any:
        about: Any = dict(chunk=9, cap=cap)
        text = cross_entropy_sum(
            *(hidden, head, labels, weights), head_gradient=head_gradient, **about
        )
        of_both = distillation_sums(hidden, teacher, head, labels, weights, share=share, **about)
        of_slots = About(labels, weights, teacher)
        slots = block_loss(((hidden, head),), of_slots, share=share, **about)
        return text, of_both.loss, slots.loss

    for which, name in enumerate(("text", "distillation", "blocks")):
        ours, theirs = (
            jax.jit(jax.value_and_grad(lambda *x, m=make, at=which: m(*x)[at], (0, 1)))(
                hidden, head
            )
            for make in (found, expected)
        )
        assert relative_error(ours[0], theirs[0]) < 1e-5, name
        assert relative_error(ours[1][0], theirs[1][0]) < 1e-5, name
        if head_gradient and not which:
            assert relative_error(ours[1][1], theirs[1][1]) < 1e-5


def products(function: Any, hidden: jax.Array) -> int:
    """How many a compiled function has; those of a loop count once."""
    return jax.jit(function).lower(hidden).compile(ALL_PASSES).as_text().count(" dot(")


def test_logits_are_made_once_whatever_is_learned() -> None:
    """And the gradient is one more product: none is repeated for the backward pass."""
    hidden, head, labels, weights = inputs(jnp.float32)

    def text(hidden: jax.Array) -> jax.Array:
        return cross_entropy_sum(hidden, head, labels, weights, chunk=9)

    def mixture(hidden: jax.Array) -> jax.Array:
        found = distillation_sums(hidden, -head[labels], head, labels, weights, share=0.5, chunk=9)
        return found.loss

    assert products(text, hidden) == 1
    assert products(jax.grad(text), hidden) == 2
    assert products(jax.grad(mixture), hidden) == 3


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, labels, weights = inputs(jnp.float32)
    loss = jax.grad(lambda head: cross_entropy_sum(hidden, head, labels, weights))
    assert not jnp.any(jax.jit(loss)(head))


def test_logits_exist_for_one_chunk_only() -> None:
    hidden, head = jnp.zeros((2, 512, 16)), jnp.zeros((1009, 16))
    labels, weights = jnp.zeros((2, 512), jnp.int32), jnp.ones((2, 512))
    whole = 2 * 512 * 1009 * 4

    def temporary_bytes(chunk: int) -> int:
        loss = jax.grad(lambda h: cross_entropy_sum(h, head, labels, weights, chunk=chunk))
        return jax.jit(loss).lower(hidden).compile(ALL_PASSES).memory_analysis().temp_size_in_bytes

    assert temporary_bytes(64) < whole / 2 < temporary_bytes(1024)


@each_row("length", [11, 13])
def test_a_padded_last_chunk_changes_no_value_and_no_gradient(length: int) -> None:
    drawn = np.random.default_rng(3)
    hidden, head = (jnp.asarray(drawn.normal(size=size)) for size in ((2, length, 8), (19, 8)))
    labels = jnp.asarray(drawn.integers(19, size=(2, length)))
    weights = jnp.asarray(drawn.random((2, length)))
    assert length % chunk_length(2, length, 10)

    def chunked(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy_sum(hidden, head, labels, weights, chunk=10, head_gradient=True)

    value, gradients = jax.jit(jax.value_and_grad(chunked, (0, 1)))(hidden, head)
    own = jax.jit(jax.value_and_grad(dense, (0, 1)))
    expected, wanted = own(hidden, head, labels, weights)
    assert relative_error(value, expected) < 1e-5
    for gradient, dense_gradient in zip(gradients, wanted, strict=True):
        assert gradient.shape == dense_gradient.shape
        assert relative_error(gradient, dense_gradient) < 1e-5


def test_labels_are_the_next_tokens() -> None:
    labels, weights = next_token_labels(jnp.asarray([[5, 6, 7]]), jnp.asarray([[1.0, 0.0, 1.0]]))
    assert labels[0, :2].tolist() == [6, 7] and weights.tolist() == [[0.0, 1.0, 0.0]]


def test_agreement_is_counted_once_however_long_the_rows_are() -> None:
    drawn = np.random.default_rng(5)
    sizes = (2, 13, 8), (2, 13, 8), (19, 8)
    wanted, hidden, head = (jnp.asarray(drawn.normal(size=size)) for size in sizes)
    counted = jnp.ones((2, 2, 13))

    def count(chunk: int) -> jax.Array:
        hits = partial(count_hits, chunk=chunk)
        return jax.jit(hits)(hidden, head, wanted, head, counted)[0]

    assert chunk_length(2, 13, 10) == 5
    assert jnp.array_equal(count(10), count(1000)) and count(10).any()
