"""Products with weights of 8 bits: how far they are from the whole ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.models.target import head_logits
from longspec_jax.ops.products import int8 as module
from longspec_jax.ops.products import int8_pallas
from longspec_jax.ops.products.int8 import (
    int8_gated_product,
    int8_product,
    int8_summands,
    round_rows,
)
from longspec_jax.ops.products.tiles import Int8Tile
from tests.kit import COMPILED


def random_table(rows: int, width: int, seed: int) -> np.ndarray:
    """Rows of very different sizes, the fourth of them zero."""
    random = np.random.default_rng(seed)
    sizes = np.exp(2 * random.standard_normal((rows, 1)))
    sizes[3] = 0
    return (sizes * random.standard_normal((rows, width))).astype(np.float32)


def test_rows_by_hand() -> None:
    """The largest element of a row takes 127 steps, whatever its sign; zeros stay zeros."""
    table = jnp.asarray([[1.0, -2.54, 0.011], [0, 0, 0], [127, 63.4, -0.6]])
    rows, scale = round_rows(table)
    np.testing.assert_array_equal(rows, [[50, -127, 1], [0, 0, 0], [127, 63, -1]])
    np.testing.assert_allclose(scale, [0.02, 0, 1], rtol=1e-6)
    assert rows.dtype == jnp.int8 and scale.dtype == jnp.float32


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_are_close_to_the_whole_heads(
    integers: bool, dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the spread of each token's own logits: every row is rounded by its own scale."""
    monkeypatch.setattr(module, "decodes_on_ampere", lambda rows, dtype: integers)
    table = jnp.asarray(random_table(211, 67, seed), dtype)
    hidden = jax.random.normal(jax.random.key(seed), (5, 31, 67), jnp.dtype(dtype))
    expected = np.asarray(head_logits(table, hidden))
    logits = int8_product(hidden, *round_rows(table))
    assert logits.dtype == jnp.float32 and logits.shape == (5, 31, 211)
    assert not np.any(logits[..., 3]), "the row of zeros"
    error, spread = (np.std(x, axis=(0, 1)) for x in (logits - expected, expected))
    others = spread > 0
    assert others.sum() == 210
    # An error of 1 / sqrt(12) steps, 127 of them to 2 or 4 standard deviations: 0.5 to 0.9 %.
    assert 1e-3 < np.max(error[others] / spread[others]) < 1.2e-2


def test_hidden_states_in_two_terms_lose_nothing_to_speak_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One element a hundred times the others, as hidden states have; one state of zeros."""
    rows, scale = round_rows(jnp.asarray(random_table(211, 67, 3)))
    hidden = jax.random.normal(jax.random.key(1), (3, 67)).at[:, 5].mul(100).at[2].set(0)
    exact = np.float64(hidden) @ (np.float64(rows) * np.float64(scale)[:, None]).T
    monkeypatch.setattr(module, "decodes_on_ampere", lambda rows, dtype: True)
    logits = int8_product(hidden, rows, scale)
    assert np.abs(logits - exact).max() < 1e-4 * np.abs(exact).max()
    assert not np.any(logits[2])


def test_largest_steps_are_exact_in_bfloat16() -> None:
    steps = jnp.arange(-127, 128, dtype=jnp.int8)
    np.testing.assert_array_equal(steps.astype(jnp.bfloat16).astype(jnp.int32), steps)


FITTING, ODD = (96, 64, Int8Tile(16, 32, 2, 4, 2)), (83, 67, Int8Tile(32, 16, 2, 4, 2))
"""Outputs, width and tile: nothing left over; something left over of each, half a split empty."""


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sizes", [FITTING, ODD], ids=["fitting", "odd"])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_the_kernels_product(interpret: bool, splits: int, sizes: Any, count: int) -> None:
    outputs, width, tile = sizes
    rows, scale = round_rows(jnp.asarray(random_table(outputs, width, count)))
    x = jax.random.normal(jax.random.key(count), (count, width), jnp.bfloat16)
    tile = dataclasses.replace(tile, splits=splits)
    got = int8_pallas.product(x, rows, scale, tile=tile, dtype=jnp.float32, interpret=interpret)
    assert got.shape == (splits, count, outputs) and got.dtype == jnp.float32
    exact = np.float64(x) @ (np.float64(rows) * np.float64(scale)[:, None]).T
    np.testing.assert_allclose(got.sum(0), exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("sizes", [FITTING, ODD], ids=["fitting", "odd"])
def test_the_kernels_bias_and_gate(interpret: bool, sizes: Any) -> None:
    """As the products in plain JAX, which round to the 16-bit type where the kernel does."""
    outputs, width, tile = sizes
    rows, scale = round_rows(jnp.asarray(random_table(2 * outputs, width, 5)) / 10)
    bias = jax.random.normal(jax.random.key(1), (2 * outputs,), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(2), (5, width), jnp.bfloat16)
    options = dict(
        tile=dataclasses.replace(tile, splits=1), dtype=jnp.bfloat16, interpret=interpret
    )
    biased = int8_pallas.product(x, rows, scale, bias, **options)[0]
    gated = int8_pallas.product(x, rows, scale, gated=True, **options)[0]
    assert biased.dtype == gated.dtype == jnp.bfloat16 and gated.shape == (5, outputs)
    for got, expected in (
        (biased, int8_product(x, rows, scale, bias, dtype=jnp.bfloat16)),
        (gated, int8_gated_product(x, rows, scale)),
    ):
        got, expected = np.float32(got), np.float32(expected)
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize(
    ("outputs", "width"), [(12288, 4096), (4096, 4096), (4096, 11008), (32000, 4096), (5120, 1000)]
)
def test_products_of_real_layers(count: int, outputs: int, width: int) -> None:
    """With the tiles that are chosen for them, against the products in plain JAX."""
    draw = jax.jit(lambda key: jax.random.randint(key, (outputs, width), -127, 128, jnp.int8))
    rows, scale = draw(jax.random.key(0)), jnp.full((outputs,), 1e-3)
    x = jax.random.normal(jax.random.key(1), (count, width), jnp.bfloat16)
    exact = module._widened(x.astype(jnp.float32), rows) * scale
    size = float(jnp.abs(exact).max())
    assert float(jnp.abs(int8_product(x, rows, scale) - exact).max()) < 1e-4 * size
    assert float(jnp.abs(int8_summands(x, rows, scale).sum(0) - exact).max()) < 5e-3 * size
    half = outputs // 2
    expected = jax.nn.silu(exact[:, :half]) * exact[:, half:]
    error = jnp.abs(int8_gated_product(x, rows, scale).astype(jnp.float32) - expected).max()
    assert float(error) < 2e-2 * float(jnp.abs(expected).max())
