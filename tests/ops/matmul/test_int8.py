"""Matmuls with weights of 8 bits: how far they are from the whole ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.models.target import head_logits
from longspec_jax.ops import hardware
from longspec_jax.ops.matmul import int8, int8_pallas
from longspec_jax.ops.matmul.int8 import (
    Int8Rows,
    int8_gated_matmul,
    int8_matmul,
    int8_matmul_partials,
    round_rows,
)
from longspec_jax.ops.matmul.int8_pallas import Int8Tile
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
def test_logits_are_close_to_the_whole_heads(
    integers: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the spread of each token's own logits: every row is rounded by its own scale."""
    monkeypatch.setattr(hardware, "has_kernels", lambda dtype: integers)
    table = jnp.asarray(random_table(211, 67, 0), dtype)
    hidden = jax.random.normal(jax.random.key(0), (5, 31, 67), jnp.dtype(dtype))
    expected = np.asarray(head_logits(table, hidden))
    logits = int8_matmul(hidden, Int8Rows.of(table))
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
    monkeypatch.setattr(hardware, "has_kernels", lambda dtype: True)
    logits = int8_matmul(hidden, Int8Rows(rows, scale))
    assert np.abs(logits - exact).max() < 1e-4 * np.abs(exact).max()
    assert not np.any(logits[2])


def test_largest_steps_are_exact_in_bfloat16() -> None:
    steps = jnp.arange(-127, 128, dtype=jnp.int8)
    np.testing.assert_array_equal(steps.astype(jnp.bfloat16).astype(jnp.int32), steps)


FITTING, ODD = (96, 64, Int8Tile(16, 32, 2, 4, 2)), (83, 67, Int8Tile(32, 16, 2, 4, 2))
"""Outputs, width and tile: nothing left over; something left over of each, half a split empty."""


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize(
    ("splits", "sizes", "count"), [(1, FITTING, 16), (2, FITTING, 1), (1, ODD, 3), (2, ODD, 16)]
)
def test_the_kernels_matmul(interpret: bool, splits: int, sizes: Any, count: int) -> None:
    outputs, width, tile = sizes
    rows, scale = round_rows(jnp.asarray(random_table(outputs, width, count)))
    x = jax.random.normal(jax.random.key(count), (count, width), jnp.bfloat16)
    tile = dataclasses.replace(tile, splits=splits)
    got = int8_pallas.int8_matmul(x, rows, scale, tile=tile, dtype=jnp.float32, interpret=interpret)
    assert got.shape == (splits, count, outputs) and got.dtype == jnp.float32
    exact = np.float64(x) @ (np.float64(rows) * np.float64(scale)[:, None]).T
    np.testing.assert_allclose(got.sum(0), exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("interpret", COMPILED)
@pytest.mark.parametrize("sizes", [FITTING, ODD], ids=["fitting", "odd"])
def test_the_kernels_bias_and_gate(interpret: bool, sizes: Any) -> None:
    """As the matmuls in plain JAX, which round to the 16-bit type where the kernel does."""
    outputs, width, tile = sizes
    whole = Int8Rows.of(jnp.asarray(random_table(2 * outputs, width, 5)) / 10)
    rows, scale = whole.steps, whole.scale
    bias = jax.random.normal(jax.random.key(1), (2 * outputs,), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(2), (5, width), jnp.bfloat16)
    options = dict(
        tile=dataclasses.replace(tile, splits=1), dtype=jnp.bfloat16, interpret=interpret
    )
    biased = int8_pallas.int8_matmul(x, rows, scale, bias, **options)[0]
    gated = int8_pallas.int8_matmul(x, rows, scale, gated=True, **options)[0]
    assert biased.dtype == gated.dtype == jnp.bfloat16 and gated.shape == (5, outputs)
    for got, expected in (
        (biased, int8_matmul(x, whole, bias, dtype=jnp.bfloat16)),
        (gated, int8_gated_matmul(x, whole)),
    ):
        got, expected = np.float32(got), np.float32(expected)
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize(("gated", "split"), [(False, False), (True, False), (False, True)])
def test_tiles_fill_any_machine_that_they_run_on(gated: bool, split: bool) -> None:
    """Programs enough, and shared memory where there is least of it."""
    for contracted, outputs in ((4096, 4096), (4096, 8192), (5120, 10240), (27648, 5120)):
        tile = int8_pallas.int8_tile(
            int8_pallas.MATRIX_ROWS, contracted, outputs, gated=gated, split=split
        )
        assert (tile.splits > 1) == split
        assert -(-outputs // tile.outputs) * tile.splits >= 80
        stage = tile.depth * (2 * int8_pallas.MATRIX_ROWS + tile.outputs * (1 + gated))
        assert tile.stages * stage <= min(hardware.SHARED_BYTES.values())
    with pytest.raises(NotImplementedError, match="up to 16 rows, not 17"):
        int8_pallas.int8_tile(int8_pallas.MATRIX_ROWS + 1, 4096, 4096)


@pytest.mark.parametrize(
    ("contracted", "outputs", "programs"),
    [
        (4096, 4096, (32, 4)),
        (11008, 4096, (32, 4)),
        (14336, 4096, (64, 4)),
        (27648, 5120, (64, 4)),
        (4096, 8192, (64, 4)),
        (5120, 10240, (64, 2)),
    ],
)
def test_partials_take_the_fastest_tile_of_the_sweep(
    contracted: int, outputs: int, programs: tuple[int, int]
) -> None:
    """docs/results/draft_tiles_h200.json, the last run."""
    tile = int8_pallas.int8_tile(int8_pallas.MATRIX_ROWS, contracted, outputs, split=True)
    assert (tile.outputs, tile.splits) == programs


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize(
    ("outputs", "width"), [(12288, 4096), (4096, 4096), (4096, 11008), (32000, 4096), (5120, 1000)]
)
def test_matmuls_of_real_layers(count: int, outputs: int, width: int) -> None:
    """With the tiles that are chosen for them, against the matmuls in plain JAX."""
    draw = jax.jit(lambda key: jax.random.randint(key, (outputs, width), -127, 128, jnp.int8))
    rows, scale = draw(jax.random.key(0)), jnp.full((outputs,), 1e-3)
    x = jax.random.normal(jax.random.key(1), (count, width), jnp.bfloat16)
    exact = int8._widened(x.astype(jnp.float32), rows) * scale
    whole = Int8Rows(rows, scale)
    size = float(jnp.abs(exact).max())
    assert float(jnp.abs(int8_matmul(x, whole) - exact).max()) < 1e-4 * size
    assert float(jnp.abs(int8_matmul_partials(x, whole).sum(0) - exact).max()) < 5e-3 * size
    half = outputs // 2
    expected = jax.nn.silu(exact[:, :half]) * exact[:, half:]
    error = jnp.abs(int8_gated_matmul(x, whole).astype(jnp.float32) - expected).max()
    assert float(error) < 2e-2 * float(jnp.abs(expected).max())
