"""Anchor-offset positions and the noisy shift."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit import relative_error
from train.transforms import anchored_positions, noisy_shifts, plain_positions, shifted_attention


@pytest.mark.parametrize("per_row", [True, False])
def test_positions_keep_the_sinks_and_move_the_rest_by_one_offset(per_row: bool) -> None:
    positions = np.asarray(
        anchored_positions(jax.random.key(3), (2, 53), 11, max_offset=29, per_row=per_row)
    )
    steps = np.diff(positions, axis=-1)
    assert positions.shape == (2, 53, 11) and positions.max() <= 10 + 29
    # A row is 0, 1, ..., then one jump, then 1 at a time again.
    assert np.all((steps != 1).sum(-1) <= 1) and np.all(steps >= 1)
    kept = (positions == np.arange(11)).sum(-1)
    moved = kept < 11
    assert set(kept[moved]) <= {0, 1, 2, 3, 4} and moved.any()
    rows_differ = len({tuple(row) for row in positions[0]}) > 1
    assert rows_differ == per_row


def test_every_sink_count_and_both_ends_of_the_offset_occur() -> None:
    positions = np.asarray(anchored_positions(jax.random.key(0), (1, 2000), 7, max_offset=5))[0]
    offsets = positions[:, -1] - 6
    sinks = (positions == np.arange(7)).sum(-1)[offsets > 0]
    assert set(offsets) == {0, 1, 2, 3, 4, 5} and set(sinks) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("per_row", [True, False])
def test_shifts_are_between_one_and_four(per_row: bool) -> None:
    shifts = np.asarray(noisy_shifts(jax.random.key(5), (300, 3), per_row=per_row))
    assert set(shifts.ravel()) == {1, 2, 3, 4}
    assert bool(np.all(shifts == shifts[:, :1])) != per_row


def test_draws_are_functions_of_the_key() -> None:
    def draw(seed: int) -> jax.Array:
        return anchored_positions(jax.random.key(seed), (2, 3), 5, max_offset=100)

    assert jnp.array_equal(draw(1), draw(1)) and not jnp.array_equal(draw(1), draw(2))
    assert jnp.array_equal(plain_positions((2, 3), 5)[1, 2], jnp.arange(5))


def dense_shifted(q: jax.Array, k: jax.Array, v: jax.Array, shift: jax.Array) -> jax.Array:
    """The meaning: query ``t`` sees keys ``<= t - shift``, and nothing gives zero."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(part, groups, axis=2) for part in (k, v))
    index = jnp.arange(q.shape[1])
    seen = (index[None, :, None] - index[None, None, :] >= shift[:, None, None])[:, None]
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True)) * seen
    total = weights.sum(-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v)


def test_shifted_attention_means_a_shifted_causal_mask() -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    q = jax.random.normal(keys[0], (4, 11, 6, 8))
    k, v = (jax.random.normal(key, (4, 11, 2, 8)) for key in keys[1:3])
    cotangent = jax.random.normal(keys[3], q.shape)
    shift = jnp.asarray([1, 2, 3, 4])

    @jax.jit
    def with_gradients(q: jax.Array) -> tuple[jax.Array, ...]:
        actual, pull = jax.vjp(lambda q: shifted_attention(q, k, v, shift), q)
        expected, dense_pull = jax.vjp(lambda q: dense_shifted(q, k, v, shift), q)
        return actual, expected, *pull(cotangent), *dense_pull(cotangent)

    actual, expected, gradient, dense_gradient = with_gradients(q)
    assert relative_error(actual, expected) < 1e-5
    assert relative_error(gradient, dense_gradient) < 1e-5
    for row in range(4):
        assert not np.any(actual[row, : row + 1]), "rows before the shift see nothing"


def test_one_program_serves_every_shift() -> None:
    q, k = jnp.ones((2, 7, 2, 4)), jnp.ones((2, 7, 1, 4))
    attend = jax.jit(shifted_attention)
    for shift in (1, 2, 3, 4):
        attend(q, k, k, jnp.full((2,), shift))
    assert attend._cache_size() == 1
