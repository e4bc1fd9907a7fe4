"""What a draft's pass over long rows keeps for its backward pass, and what it makes again."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.model import LongSpecLayer
from tests.kit import tiny_target_config
from train import passes
from train.passes import Draws, TargetView, mlp_tokens_at_once, run_draft
from train.transforms import shifted_attention

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
        return jax.jit(function).lower(params).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(CHUNK) < temporary_bytes(0) / 2


def test_short_rows_stay_whole() -> None:
    assert mlp_tokens_at_once(16384) == 0 and mlp_tokens_at_once(32768) == 8192
