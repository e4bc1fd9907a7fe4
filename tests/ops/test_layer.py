"""The small ops of a layer: the kernels against plain JAX, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.ops import layer, layer_pallas
from tests.kit import COMPILED, TOLERANCE, normal, relative_error

DTYPES = ["float32", "bfloat16"]


def angles(seed: int, *shape: int) -> tuple[jax.Array, jax.Array]:
    angle = jax.random.uniform(jax.random.key(seed), shape) * 6
    return jnp.cos(angle), jnp.sin(angle)


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize(
    ("dtype", "width", "splits"), [("float32", 96, 3), ("bfloat16", 96, 1), ("bfloat16", 256, 3)]
)
def test_residual_norm_kernel(interpret: bool, dtype: str, width: int, splits: int) -> None:
    x, scale = normal(0, 2, 3, width, dtype=dtype), normal(2, width, dtype=dtype)
    # A matmul whose contraction was split leaves float32 partials.
    partials = normal(1, splits, 2, 3, width, dtype=dtype if splits == 1 else "float32")
    total, out = layer_pallas.residual_norm(x, partials, scale, eps=1e-5, interpret=interpret)
    assert total.dtype == out.dtype == jnp.dtype(dtype)
    if interpret or splits == 1:
        # On a GPU XLA may add several partials in another order.
        np.testing.assert_array_equal(total, layer.add(x, partials))
    exact = np.float64(x) + np.float64(partials).sum(axis=0)
    assert relative_error(total, exact) <= TOLERANCE[dtype]
    wide = np.float64(total)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.float64(scale)
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    composed = layer.residual_norm.definition(x, partials, scale, 1e-5)
    assert relative_error(composed[1], expected) <= TOLERANCE[dtype]
    first, alone = layer_pallas.residual_norm(total, None, scale, eps=1e-5, interpret=interpret)
    np.testing.assert_array_equal(first, total)
    np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "groups", "width"),
    [("float32", 3, 1, 32), ("bfloat16", 2, 4, 24), ("float32", 7, 5, 16)],
)
def test_split_heads_kernel(
    interpret: bool, dtype: str, kv_heads: int, groups: int, width: int
) -> None:
    qkv = normal(0, 2, 3, kv_heads, groups + 2, width, dtype=dtype)
    cos, sin = angles(1, 2, 3, width // 2)
    scales = normal(2, width, dtype=dtype), normal(3, width, dtype=dtype)
    for norms in (None, scales):
        actual = layer_pallas.split_heads(qkv, cos, sin, norms, eps=1e-2, interpret=interpret)
        expected = layer.split_heads.definition(qkv, cos, sin, norms, 1e-2)
        for ours, theirs in zip(actual, expected, strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert relative_error(ours, np.float64(theirs)) <= TOLERANCE[dtype]
    q, k, _ = layer.split_qkv(qkv)
    for ours, part, scale in zip(actual, (q, k), scales, strict=False):
        wide = np.float64(part)
        normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-2) * np.float64(scale)
        exact = layer.rotate(jnp.asarray(normed, jnp.float32), (cos, sin))
        assert relative_error(ours, np.float64(exact)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_go_among_others(interpret: bool, tokens: int) -> None:
    """As a level of a draft's tree goes after its window: one position, neighbouring places."""
    qkv, (cos, sin) = normal(0, 2, tokens, 2, 6, 24), angles(1, 2, 1, 12)
    rows = normal(2, 2, 7, 2, 24), normal(3, 2, 7, 2, 24)
    same = (jnp.broadcast_to(each, (2, tokens, 12)) for each in (cos, sin))
    q, *fresh = layer.split_heads.definition(qkv, *same)
    expected = [np.array(each) for each in rows]
    for every, own in zip(expected, fresh, strict=True):
        every[:, 4 : 4 + tokens] = own
    in_kernel = layer_pallas.split_heads(qkv, cos, sin, None, rows, first=4, interpret=interpret)
    for found in (in_kernel, layer.split_into.definition(qkv, cos, sin, rows, 4)):
        for ours, theirs in zip(found, (q, *expected), strict=True):
            assert ours.shape == theirs.shape
            assert relative_error(ours, np.float64(theirs)) <= TOLERANCE["float32"]
        for ours, theirs in zip(found[1:], rows, strict=True):
            others = np.r_[0:4, 4 + tokens : 7]
            np.testing.assert_array_equal(ours[:, others], theirs[:, others])


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_rows_kernel(interpret: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pallas, "CACHES", 2)  # Three caches take two launches.
    caches = [normal(seed, 2, 3, 19, 24, dtype=dtype) for seed in range(3)]
    fresh = [normal(9 + seed, 2, 7, 3, 24, dtype=dtype) for seed in range(3)]
    path = jnp.asarray([[0, 3, 6], [0, 1, 1]])
    length = jnp.asarray([16, 5])
    actual = layer_pallas.append_rows(caches, fresh, path, length, interpret=interpret)
    plain = layer.append_rows.definition(caches, fresh, path, length)
    for ours, theirs, cache, rows in zip(actual, plain, caches, fresh, strict=True):
        expected = np.array(cache)
        for b in range(2):
            for step in range(3):
                expected[b, :, int(length[b]) + step] = rows[b, int(path[b, step])]
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(theirs, expected)
    # The same rows among others, which are not written.
    among = [normal(20 + seed, 5, 3, 19, 24, dtype=dtype) for seed in range(3)]
    there = jnp.asarray([4, 1])
    among = [every.at[there].set(cache) for every, cache in zip(among, caches, strict=True)]
    others = fresh, path, length, there
    ours = layer_pallas.append_rows(among, *others, interpret=interpret)
    for found in (ours, layer.append_rows.definition(among, *others)):
        for every, mine, written in zip(among, found, plain, strict=True):
            np.testing.assert_array_equal(mine, every.at[there].set(written))
    # In a ring the second row's last two go to its first slots.
    length = jnp.asarray([16, 18 + 19])
    rings = layer_pallas.append_rows(caches, fresh, path, length, ring=True, interpret=interpret)
    for found in (rings, layer.append_rows.definition(caches, fresh, path, length, ring=True)):
        for mine, cache, rows in zip(found, caches, fresh, strict=True):
            expected = np.array(cache)
            for b in range(2):
                for step in range(3):
                    expected[b, :, (int(length[b]) + step) % 19] = rows[b, int(path[b, step])]
            np.testing.assert_array_equal(mine, expected)


def test_gradients_are_those_of_plain_jax() -> None:
    x, delta, scale = normal(0, 2, 32), normal(1, 1, 2, 32), normal(2, 32)

    def loss(op, x, delta, scale):
        total, out = op(x, delta, scale, 1e-5)
        return (total**2).sum() + jnp.sin(out).sum()

    ours, plain = (
        jax.jit(jax.grad(functools.partial(loss, op), (0, 1, 2)))(x, delta, scale)
        for op in (layer.residual_norm, layer.residual_norm.definition)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, plain)

    qkv, (cos, sin) = normal(3, 1, 2, 2, 3, 8), angles(4, 1, 2, 4)

    def heads_loss(op, qkv, scales):
        parts = op(qkv, cos, sin, scales, 1e-5)
        return sum((index + 1) * jnp.sin(part).sum() for index, part in enumerate(parts))

    for scales in (None, (normal(5, 8), normal(6, 8))):
        ours, plain = (
            jax.jit(jax.grad(functools.partial(heads_loss, op), (0, 1)))(qkv, scales)
            for op in (layer.split_heads, layer.split_heads.definition)
        )
        jax.tree.map(np.testing.assert_array_equal, ours, plain)
