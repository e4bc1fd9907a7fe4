"""The draft's pass over long rows, anchor-offset positions and the noisy shift."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.longspec import DraftConfig, LongSpecLayer
from tests.kit import ALL_PASSES, relative_error, tiny_target_config
from train.drafts import longspec as passes
from train.drafts.longspec import Draws, noisy_shifts, run_draft, shifted_attention
from train.target import (
    TargetView,
    anchored_positions,
    mlp_tokens_at_once,
    plain_positions,
)

TOKENS, WIDTH, MLP, CHUNK = 4096, 32, 112, 512
CONFIG = DraftConfig.for_target(
    tiny_target_config(
        model_width=WIDTH, mlp_width=MLP, num_heads=4, num_kv_heads=2, head_width=8,
        max_positions=TOKENS,
    ),
    window=5,
)  # fmt: skip


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Stands for the fused kernel, which keeps its result and holds no scores."""
    return jax.lax.erf_inv(q) + (k.mean(2) + v.mean(2))[:, :, None]


def keeping(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    out = attention(q, k, v)
    return out, (q, k, v, out)


def backward(saved: Any, cotangent: jax.Array) -> Any:
    q, k, v, out = saved
    total = (cotangent * out).mean(2)[:, :, None]
    return cotangent * q, total * k, total * v


attention.defvjp(keeping, backward)


@pytest.fixture
def gradient(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``(chunk) -> (function, its arguments)``: the gradient of a pass for the parameters."""
    monkeypatch.setattr(passes, "causal_attention", lambda q, k, v, **_: attention(q, k, v))
    monkeypatch.setattr(
        passes,
        "shifted_attention",
        lambda q, k, v, shift: shifted_attention(q, k, v, shift, attend=attention),
    )
    rows, keys = jnp.zeros((1, TOKENS), jnp.int32), jnp.zeros((1, TOKENS, 2, 8))
    params = jax.eval_shape(
        lambda: LongSpecLayer(CONFIG).init(
            jax.random.key(0), jnp.zeros((1, 2, WIDTH)), rows[:, :2], lambda q, k, v: q,
            lambda q: q,
        )["params"]
    )  # fmt: skip
    frozen = {"embedding": jnp.zeros((64, WIDTH))}
    view = TargetView(jnp.zeros(()), keys, keys)

    def of(chunk: int) -> Any:
        def loss(params: Any) -> jax.Array:
            draws = Draws(rows, jnp.ones(1, jnp.int32))
            return jnp.sum(run_draft(CONFIG, params, frozen, rows, draws, view, chunk))

        return jax.grad(loss), params

    return of


def test_no_product_is_repeated_but_the_mlps_first_and_no_attention(gradient: Any) -> None:
    plain, chunked = (
        str(jax.make_jaxpr(function)(params)) for function, params in map(gradient, (0, CHUNK))
    )
    assert chunked.count(" dot_general[") == plain.count(" dot_general[") + 1
    assert chunked.count(" erf_inv") == plain.count(" erf_inv") == 2


def test_a_pass_over_long_rows_takes_less_than_half_the_memory(gradient: Any) -> None:

    def temporary_bytes(chunk: int) -> int:
        function, params = gradient(chunk)
        return (
            jax.jit(function).lower(params).compile(ALL_PASSES).memory_analysis().temp_size_in_bytes
        )

    assert temporary_bytes(CHUNK) < temporary_bytes(0) / 2


def test_short_rows_stay_whole() -> None:
    assert mlp_tokens_at_once(16384) == 0 and mlp_tokens_at_once(32768) == 8192


def test_positions_keep_the_sinks_and_move_the_rest_by_one_offset() -> None:
    positions = np.asarray(anchored_positions(jax.random.key(3), (2, 53), 11, max_offset=29))
    steps = np.diff(positions, axis=-1)
    assert positions.shape == (2, 53, 11) and positions.max() <= 10 + 29
    # A row is 0, 1, ..., then one jump, then 1 at a time again.
    assert np.all((steps != 1).sum(-1) <= 1) and np.all(steps >= 1)
    kept = (positions == np.arange(11)).sum(-1)
    moved = kept < 11
    assert set(kept[moved]) <= {0, 1, 2, 3, 4} and moved.any()
    assert len({tuple(row) for row in positions[0]}) > 1


def test_every_sink_count_and_both_ends_of_the_offset_occur() -> None:
    positions = np.asarray(anchored_positions(jax.random.key(0), (1, 2000), 7, max_offset=5))[0]
    offsets = positions[:, -1] - 6
    sinks = (positions == np.arange(7)).sum(-1)[offsets > 0]
    assert set(offsets) == {0, 1, 2, 3, 4, 5} and set(sinks) == {0, 1, 2, 3, 4}


def test_shifts_are_between_one_and_four() -> None:
    shifts = np.asarray(noisy_shifts(jax.random.key(5), (300, 3)))
    assert set(shifts.ravel()) == {1, 2, 3, 4}
    assert np.any(shifts != shifts[:, :1])


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
