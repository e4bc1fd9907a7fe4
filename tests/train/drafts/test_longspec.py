"""What a LongSpec draft learns: four steps, the pass over long rows, shifts, and its measure."""

import dataclasses
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contrib.quantise import quantise
from longspec_jax.drafters.longspec import DraftConfig, LongSpecLayer
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.hf import load_target, save_target
from tests.kit import ALL_PASSES, in_tiers, random_target, relative_error, tiny_target_config
from tests.weights.quantised.test_load import dequantised, matrices
from train.config import StageConfig
from train.drafts import longspec as passes
from train.drafts.base import TrainContext
from train.drafts.kinds import LongSpecSettings
from train.drafts.longspec import (
    Draws,
    LongSpecObjective,
    noisy_shifts,
    run_draft,
    shifted_attention,
)
from train.step import Batch
from train.target import (
    TargetObjective,
    TargetView,
    anchored_positions,
    mlp_tokens_at_once,
    plain_positions,
    run_target,
)

from . import steps as tiny

WINDOW, OFFSET = 5, 40
STAGE = StageConfig("short", 13, 4, 2, tiny.RATE, 4, 0, 0.0, OFFSET)
SETTINGS = LongSpecSettings("longspec", "", WINDOW, True, 4, 4)
DATA = tiny.random_batch((2, 2), STAGE.seq_len)


@functools.cache
def whole(share: float) -> tiny.Trained:
    return tiny.four_steps(replace(SETTINGS, distillation=share), tiny.given(STAGE), DATA, 30)


@pytest.mark.parametrize("share", in_tiers([0.0, 0.7], 0.7), ids=["text", "distilled"])
def test_four_steps_are_those_of_pytorch(share: float, tmp_path: Path) -> None:
    """Loss, norm of the gradient, and parameters, at moved positions and with every shift."""
    from tests.models.parallel_oracle import DraftOracle, torch

    one = whole(share)
    objective = one.begun.trainer.objective(STAGE, 30, 0)
    assert isinstance(objective, LongSpecObjective)
    layer = objective.draft
    stored = tiny.tensors(one.begun, one.first, tmp_path / "first")
    draft = {
        name: torch.tensor(each).requires_grad_()
        for name, each in stored.items()
        if name not in tiny.UNREAD
    }
    oracle = DraftOracle(
        draft, layer.num_heads, layer.num_kv_heads, WINDOW, layer.norm_eps, layer.rope_theta
    )
    embedding, head = (torch.tensor(np.array(tiny.FROZEN[name])) for name in ("embedding", "head"))
    target = jax.jit(lambda tokens, at: run_target(tiny.TARGET, tiny.FROZEN, tokens, at))
    moved, shifts = [], set()

    def loss(step: int) -> Any:
        key = jax.random.fold_in(jax.random.key(tiny.SEED), step)
        draws = jax.device_get(objective.draw(key, (2, 2), STAGE.seq_len))
        total = torch.zeros(())
        for a, b in np.ndindex(2, 2):
            view = jax.device_get(target(DATA.tokens[a], draws.positions[a]))
            hidden, keys, values = (torch.tensor(np.array(each[b])) for each in view[:3])
            at, shift = draws.positions[a, b], int(draws.shift[a, b])
            moved.append(at.max() >= STAGE.seq_len)
            shifts.add(shift)
            tokens = torch.tensor(np.array(DATA.tokens[a, b])).long()
            rows = embedding[tokens], torch.tensor(np.array(at)), keys, values
            found = oracle.hidden(*rows, shift) @ head.T
            logs, aim = found[:-1].log_softmax(-1), (hidden[:-1] @ head.T).softmax(-1)
            text = -logs.gather(-1, tokens[1:, None])[:, 0]
            divergence = (aim * (aim.log() - logs)).sum(-1)
            counts = torch.tensor(DATA.weights[a, b, 1:])
            total = total + (counts * ((1 - share) * text + share * divergence)).sum()
        return total / DATA.weights[:, :, 1:].sum()

    tiny.assert_learns_as_pytorch(one, draft, loss, tmp_path / "last")
    assert any(moved) and shifts == {1, 2, 3, 4}


@pytest.mark.full
def test_devices_and_chunks_do_not_change_the_steps() -> None:
    """Few tokens of the loss, the last of which are not a whole chunk, and MLPs in pieces."""
    cut = tiny.four_steps(SETTINGS, tiny.given(STAGE, fsdp=2, tp=2), DATA, 10, 8)
    tiny.assert_same_steps(cut, whole(0.0))


PLAIN_STAGE = StageConfig("short", 13, 4, 2, tiny.RATE, 4, 0, 0.0, 0)
DISTILLED = LongSpecSettings("longspec", "", 5, True, 4, 3, distillation=0.7)
WHOLE = tiny_target_config(
    vocab_size=48, model_width=128, mlp_width=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_width=32, max_positions=64,
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("form", ["fp8", "w4a16"])
def test_the_steps_are_those_of_the_dequantised_weights(form: str, tmp_path: Path) -> None:
    """On one device and, with the codes spread, on two."""
    original = random_target(WHOLE)
    save_target(tmp_path / "whole", WHOLE, original)
    quantise(tmp_path / "whole", form, tmp_path / form)
    data = tiny.random_batch((2, 2), PLAIN_STAGE.seq_len)

    def trained(params: object = None, **axes: int) -> tiny.Trained:
        mesh = make_mesh(**axes)
        config, stored = load_target(tmp_path / form, dtype="float32", mesh=mesh)
        assert len(matrices(stored)) == 4 * WHOLE.num_layers
        params = stored if params is None else params
        given = TrainContext(config, params, (PLAIN_STAGE,), 3, "float32", mesh, pytest.fail)
        return tiny.four_steps(DISTILLED, given, data, 90)

    quantised = trained()
    exact = dequantised(load_target(tmp_path / form, dtype="float32")[1])
    exact = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), exact, original)
    tiny.assert_same_steps(quantised, trained(exact))
    tiny.assert_same_steps(quantised, trained(fsdp=2))
    losses = [each.metrics[-1]["loss"] for each in (quantised, trained(original))]
    assert relative_error(*losses) > 1e-4


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


TARGET = dataclasses.replace(
    tiny_target_config(
        vocab_size=13, model_width=8, mlp_width=6, num_layers=1, num_heads=2, head_width=4,
        max_positions=16,
    ),
    dtype="float32",
)  # fmt: skip
DRAFT = dataclasses.replace(DraftConfig.for_target(TARGET), window=5)
MEASURED = LongSpecSettings("longspec", "", 5, False, 0, 2)
OBJECTIVE = LongSpecObjective(TARGET, DRAFT, MEASURED, 0, 8)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Parameters of draft and target."""
    both = OBJECTIVE, TargetObjective(TARGET, 8)
    return tuple(jax.jit(each.initialize)(jax.random.key(1)) for each in both)


def measured(models: tuple[Any, Any], weights: np.ndarray) -> dict[str, float]:
    tokens = jax.random.randint(jax.random.key(3), weights.shape, 0, TARGET.vocab_size)
    return OBJECTIVE.measure(*models, Batch(tokens, jnp.asarray(weights, jnp.float32)))


def spoiled(params: Any) -> Any:
    """Parameters, one of which is NaN."""
    leaves, tree = jax.tree.flatten(params)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(jnp.nan)
    return jax.tree.unflatten(tree, leaves)


def test_scores_that_are_no_numbers_agree_with_nothing(models: tuple[Any, Any]) -> None:
    """They beat nothing and nothing beats them: five tokens per pass of five."""
    draft, target = models
    weights = np.ones((2, 8))
    with pytest.raises(FloatingPointError, match="the draft's scores are not finite for 1[0-6] "):
        measured((spoiled(draft), target), weights)
    table = {**target, "embedding": target["embedding"].at[0, 0].set(jnp.inf)}
    with pytest.raises(FloatingPointError, match="the target's scores are not finite for 14 held"):
        measured((draft, table), weights)


def test_the_targets_loss_is_that_of_the_target_alone(models: tuple[Any, Any]) -> None:
    weights = jnp.asarray([8 * [1.0], 4 * [1.0, 0.0]])
    tokens = jax.random.randint(jax.random.key(3), weights.shape, 0, TARGET.vocab_size)
    alone = TargetObjective(TARGET, 8).measure(models[1], (), Batch(tokens, weights))
    found = measured(models, np.asarray(weights))["target_loss"]
    assert found == pytest.approx(alone["heldout_loss"], rel=1e-5)


def test_the_token_that_is_predicted_counts_and_not_the_one_that_is_read(
    models: tuple[Any, Any],
) -> None:
    """At the borders of a masked prompt these differ: at the answer's first token and after it."""
    weights, found = jnp.zeros((1, 8)).at[0, 4].set(1.0), set()
    tokens = jax.random.randint(jax.random.key(3), (1, 8), 0, TARGET.vocab_size)
    for token in range(TARGET.vocab_size):  # Nobody reads it to predict it.
        report = OBJECTIVE.measure(*models, Batch(tokens.at[0, 4].set(token), weights))
        del report["target_loss"]
        found.add(tuple(report.items()))
    assert len(found) == 1 and found != {()}
    nobody = jnp.zeros((1, 8)).at[0, 0].set(1.0)  # Of the first token nothing precedes.
    assert OBJECTIVE.measure(*models, Batch(tokens, nobody)) == {}


def test_what_no_token_counts_for_is_left_out(models: tuple[Any, Any]) -> None:
    full = measured(models, np.ones((2, 8)))
    assert list(full) == [
        "agree_top1_shift1", "agree_top4_shift1", "agree_top1_shift2", "agree_top4_shift2",
        "tau_chain", "tau_chain_far", "tau_top4", "target_loss",
    ]  # fmt: skip
    short = measured(models, np.repeat([[1.0, 0.0]], 4, 1).reshape(1, 8).repeat(2, 0))
    assert list(short) == [name for name in full if name != "tau_chain_far"]
    assert measured(models, np.zeros((2, 8))) == {}
