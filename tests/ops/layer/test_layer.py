"""The small ops of a layer: the kernels against plain JAX, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops.layer import (
    append_rows,
    append_rows_pallas,
    residual_norm,
    residual_norm_pallas,
    split_heads,
    split_heads_pallas,
    table_heads,
    table_heads_pallas,
    table_query,
    table_query_pallas,
)
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.products.int8 import Int8Rows
from tests.kit import COMPILED, TOLERANCE, normal, relative_error

DTYPES = ["float32", "bfloat16"]


def angles(seed: int, *shape: int) -> tuple[jax.Array, jax.Array]:
    angle = jax.random.uniform(jax.random.key(seed), shape) * 6
    return jnp.cos(angle), jnp.sin(angle)


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 256])
@pytest.mark.parametrize("splits", [1, 3])
def test_residual_norm_kernel(interpret: bool, dtype: str, width: int, splits: int) -> None:
    x, scale = normal(0, 2, 3, width, dtype=dtype), normal(2, width, dtype=dtype)
    # A product whose contraction was split leaves float32 summands.
    summands = normal(1, splits, 2, 3, width, dtype=dtype if splits == 1 else "float32")
    total, out = residual_norm_pallas.residual_norm(
        x, summands, scale, eps=1e-5, interpret=interpret
    )
    assert total.dtype == out.dtype == jnp.dtype(dtype)
    if interpret or splits == 1:
        # On a GPU XLA may add several summands in another order.
        np.testing.assert_array_equal(total, residual_norm.add(x, summands))
    exact = np.float64(x) + np.float64(summands).sum(axis=0)
    assert relative_error(total, exact) <= TOLERANCE[dtype]
    wide = np.float64(total)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.float64(scale)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    composed = residual_norm.composed(x, summands, scale, 1e-5)
    assert relative_error(composed[1], expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "groups", "width"), [(3, 1, 32), (2, 4, 24), (7, 5, 16)])
def test_split_heads_kernel(
    interpret: bool, dtype: str, kv_heads: int, groups: int, width: int
) -> None:
    qkv = normal(0, 2, 3, kv_heads, groups + 2, width, dtype=dtype)
    cos, sin = angles(1, 2, 3, width // 2)
    actual = split_heads_pallas.split_heads(qkv, cos, sin, interpret=interpret)
    expected = split_heads.composed(qkv, cos, sin)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert relative_error(ours, np.float64(theirs)) <= TOLERANCE[dtype]


def token_table(seed: int, *shape: int) -> Int8Rows:
    """Heads of 29 tokens, one of them zero."""
    return Int8Rows.of(normal(seed, 29, *shape).at[3].set(0))


def test_a_table_of_8_bits_is_near_what_was_put_in() -> None:
    heads = normal(0, 29, 3, 4, 16)
    table = Int8Rows.of(heads.at[5, 1].set(0))
    error = np.abs(table.take(jnp.arange(29)[None]).widened()[0] - heads.at[5, 1].set(0))
    assert (error <= table.scale[..., None] / 2 + 1e-7).all()
    assert (np.abs(table.steps).max(-1) == 127).sum() == 29 * 3 * 4 - 4
    outside = table.take(jnp.array([[-1, 29]])).widened()
    np.testing.assert_array_equal(outside, table.take(jnp.array([[0, 28]])).widened())


HEADS = [(3, 1, 32), (2, 4, 24), (7, 5, 16)]


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "groups", "width"), HEADS)
@pytest.mark.parametrize("place", [None, 4])
def test_table_heads_kernel(
    interpret: bool, dtype: str, kv_heads: int, groups: int, width: int, place: int | None
) -> None:
    table = token_table(0, kv_heads, groups + 2, width)
    bias = normal(1, kv_heads, groups + 2, width, dtype=dtype)
    tokens = jnp.array([[3, 28, 0], [7, 29, -2]])
    cos_sin = Angles(*angles(2, 2, 3 if place is None else 6, width // 2))
    operands = table, bias, tokens, cos_sin
    actual = table_heads_pallas.table_heads(*operands, place=place, interpret=interpret)
    # By way of the op on a product's result.
    qkv = table.take(tokens).widened() + bias.astype(jnp.float32)
    spread = (jnp.broadcast_to(part, (2, 3, width // 2)) for part in cos_sin.at(place))
    exact = split_heads.composed(qkv, *spread)
    composed = table_heads.composed(*operands, place)
    for ours, theirs, same in zip(actual, exact, composed, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == same.dtype == jnp.dtype(dtype)
        assert relative_error(ours, np.float64(theirs)) <= TOLERANCE[dtype]
        assert relative_error(same, np.float64(theirs)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "groups", "width"), HEADS)
@pytest.mark.parametrize("splits", [1, 4])
def test_table_query_kernel(
    interpret: bool, dtype: str, kv_heads: int, groups: int, width: int, splits: int
) -> None:
    heads, model_width, place, eps = kv_heads * groups, 72, 1, 1e-5
    table, bias = token_table(0, heads, width), normal(1, heads, width, dtype=dtype)
    embedding = normal(2, 29, model_width, dtype=dtype)
    tokens = jnp.array([[3, 28, 0], [7, 29, -2]])
    both = model_width + heads * width
    summands = normal(3, splits, 2, 3, both, dtype=dtype if splits == 1 else "float32")
    cos_sin = Angles(*angles(4, 2, 2, width // 2))
    operands = table, bias, embedding, tokens, summands, cos_sin
    options = dict(place=place, eps=eps, kv_heads=kv_heads)
    actual = table_query_pallas.table_query(*operands, **options, interpret=interpret)

    inside = np.clip(tokens, 0, 28)
    added = np.float64(summands).sum(0)
    total = np.float64(embedding)[inside] + added[..., :model_width]
    factor = 1 / np.sqrt((total**2).mean(-1) + eps)
    query = added[..., model_width:].reshape(2, 3, heads, width)
    looked_up = np.float64(table.take(tokens).widened())
    query = (looked_up + query) * factor[..., None, None] + np.float64(bias)
    low, high = np.split(query, 2, axis=-1)
    cos, sin = (np.float64(part[:, place, None, None]) for part in (cos_sin.cos, cos_sin.sin))
    query = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    for found in (actual, table_query.composed(*operands, **options)):
        assert [part.dtype for part in found] == [jnp.dtype(dtype)] * 2
        assert relative_error(found[0], total) <= TOLERANCE[dtype]
        assert relative_error(found[1], query) <= TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_rows_kernel(interpret: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_rows_pallas, "CACHES", 2)  # Three caches take two launches.
    caches = [normal(seed, 2, 3, 19, 24, dtype=dtype) for seed in range(3)]
    fresh = [normal(9 + seed, 2, 7, 3, 24, dtype=dtype) for seed in range(3)]
    path = jnp.asarray([[0, 3, 6], [0, 1, 1]])
    length = jnp.asarray([16, 5])
    actual = append_rows_pallas.append_rows(caches, fresh, path, length, interpret=interpret)
    plain = append_rows.composed(caches, fresh, path, length)
    for ours, theirs, cache, rows in zip(actual, plain, caches, fresh, strict=True):
        expected = np.array(cache)
        for b in range(2):
            for step in range(3):
                expected[b, :, int(length[b]) + step] = rows[b, int(path[b, step])]
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(theirs, expected)


def test_gradients_are_those_of_plain_jax() -> None:
    x, delta, scale = normal(0, 2, 32), normal(1, 1, 2, 32), normal(2, 32)

    def loss(op, x, delta, scale):
        total, out = op(x, delta, scale, 1e-5)
        return (total**2).sum() + jnp.sin(out).sum()

    ours, plain = (
        jax.jit(jax.grad(functools.partial(loss, op), (0, 1, 2)))(x, delta, scale)
        for op in (residual_norm.residual_norm, residual_norm.composed)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, plain)

    qkv, (cos, sin) = normal(3, 1, 2, 2, 3, 8), angles(4, 1, 2, 4)

    def heads_loss(op, qkv):
        return sum(
            (index + 1) * jnp.sin(part).sum() for index, part in enumerate(op(qkv, cos, sin))
        )

    np.testing.assert_array_equal(
        jax.jit(jax.grad(functools.partial(heads_loss, split_heads.split_heads)))(qkv),
        jax.jit(jax.grad(functools.partial(heads_loss, split_heads.composed)))(qkv),
    )
