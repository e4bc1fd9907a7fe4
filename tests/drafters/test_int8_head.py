"""The draft's LM head in 8 bits: how far logits move, which rows, and what is counted as its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import DraftConfig
from longspec_jax.drafters import int8_head
from longspec_jax.drafters.int8_head import int8_logits, round_rows
from longspec_jax.drafters.longspec import LongSpecParams
from longspec_jax.models.target import head_logits
from longspec_jax.sharding import make_mesh, param_shardings
from tests.kit import draft_params, random_draft, random_target, tiny_target_config

TARGET = tiny_target_config()
VOCABULARY = jnp.asarray([90, 5, 7, 33, 61, 2, 71])


def random_table(rows: int, width: int, seed: int) -> np.ndarray:
    """Rows of very different sizes, the fourth of them zero."""
    random = np.random.default_rng(seed)
    sizes = np.exp(2 * random.standard_normal((rows, 1)))
    sizes[3] = 0
    return (sizes * random.standard_normal((rows, width))).astype(np.float32)


@pytest.fixture(scope="module")
def params() -> LongSpecParams:
    layer = random_draft(DraftConfig.for_target(TARGET, window=5))
    return draft_params(layer, random_target(TARGET))


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
    monkeypatch.setattr(int8_head, "decodes_on_ampere", lambda rows, dtype: integers)
    table = jnp.asarray(random_table(211, 67, seed), dtype)
    hidden = jax.random.normal(jax.random.key(seed), (5, 31, 67), jnp.dtype(dtype))
    expected = np.asarray(head_logits(table, hidden))
    logits = int8_logits(*round_rows(table), hidden)
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
    """One element a hundred times the others, as real hidden states have; and one state of zeros."""
    rows, scale = round_rows(jnp.asarray(random_table(211, 67, 3)))
    hidden = jax.random.normal(jax.random.key(1), (3, 67)).at[:, 5].mul(100).at[2].set(0)
    exact = np.float64(hidden) @ (np.float64(rows) * np.float64(scale)[:, None]).T
    monkeypatch.setattr(int8_head, "decodes_on_ampere", lambda rows, dtype: True)
    logits = int8_logits(rows, scale, hidden)
    assert np.abs(logits - exact).max() < 1e-4 * np.abs(exact).max()
    assert not np.any(logits[2])


def test_largest_steps_are_exact_in_bfloat16() -> None:
    steps = jnp.arange(-127, 128, dtype=jnp.int8)
    np.testing.assert_array_equal(steps.astype(jnp.bfloat16).astype(jnp.int32), steps)


def test_rounding_and_restricting_in_either_order(params: LongSpecParams) -> None:
    first, last = (
        params.with_int8_head().restricted(VOCABULARY),
        params.restricted(VOCABULARY).with_int8_head(),
    )
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    hidden = jax.random.normal(jax.random.key(0), (3, 36))
    whole = params.with_int8_head().logits(hidden)
    np.testing.assert_allclose(last.logits(hidden), whole[:, VOCABULARY], rtol=1e-5, atol=1e-5)


def test_a_head_is_rounded_once(params: LongSpecParams) -> None:
    with pytest.raises(ValueError, match="in 8 bits already"):
        params.with_int8_head().with_int8_head()


def test_own_leaves_out_what_the_target_has(params: LongSpecParams) -> None:
    def beside_the_layer(params: LongSpecParams) -> int:
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params.own)]
        return sum(sizes) - sum(4 * leaf.size for leaf in jax.tree.leaves(params.layer))

    assert beside_the_layer(params) == 0
    assert beside_the_layer(params.with_int8_head()) == 101 * 36 + 101 * 4
    assert beside_the_layer(params.restricted(VOCABULARY)) == 7 * 36 * 4 + 7 * 4
    both = params.restricted(VOCABULARY).with_int8_head()
    assert beside_the_layer(both) == 7 * 36 + 7 * 4 + 7 * 4
    assert params.with_int8_head().embedding is params.embedding


def test_rows_and_their_scales_share_a_device() -> None:
    mesh = make_mesh(fsdp=2, tp=2)
    table = jnp.asarray(random_table(26, 6, 0))
    rows, scale = round_rows(table)
    leaves = {"head": rows, "head_scale": scale}
    placed = jax.device_put(leaves, param_shardings(mesh, leaves))
    assert placed["head"].sharding.shard_shape((26, 6)) == (13, 3)
    assert placed["head_scale"].sharding.shard_shape((26,)) == (13,)
    spread = jax.device_put(table, param_shardings(mesh, {"head": table})["head"])
    for ours, theirs in zip(round_rows(spread), (rows, scale), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    hidden = jax.random.normal(jax.random.key(0), (3, 6))
    np.testing.assert_allclose(
        int8_logits(placed["head"], placed["head_scale"], hidden),
        int8_logits(rows, scale, hidden),
        rtol=1e-5,
        atol=1e-5,
    )
