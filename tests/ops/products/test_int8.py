"""Products with weights of 8 bits: how far they are from the whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.models.target import head_logits
from longspec_jax.ops.products import int8 as module
from longspec_jax.ops.products.int8 import int8_product, round_rows


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
