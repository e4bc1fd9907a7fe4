"""An EAGLE-3 draft in training equals PyTorch's and speculators', on one device and on two."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from longspec_jax import LongSpec
from longspec_jax.drafters.checkpoints.eagle3 import load, save_draft
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle3 import Eagle3Options
from tests.drafters.eagle3.toys import random_params
from tests.kit import random_target, relative_error, tiny_target_config
from train.config import StageConfig
from train.drafts.base import TrainContext
from train.drafts.eagle3 import attention_with_own, begin, run_draft
from train.drafts.kinds import Eagle3Settings
from train.step import Batch
from train.target import TargetView, run_target

from . import steps as tiny

SPECULATORS = Path(__file__).parents[2] / "drafters" / "eagle3" / "speculators"
VARIANTS = sorted(path.name for path in SPECULATORS.iterdir())
STAGE = StageConfig("short", 11, 4, 1, tiny.RATE, 4, 0, 0.0, 0)
SETTINGS = Eagle3Settings("eagle3", "", "0,1,2", 20, 3, 0.5)
SHARED = replace(SETTINGS, vocabulary=0, own_head=False, mlp_width=12)
COUNTS = np.random.default_rng(4).permutation(tiny.TARGET.vocab_size)
KNOWN = np.sort(np.argsort(-COUNTS)[:20])


def counted(**axes: int) -> TrainContext:
    return tiny.given(STAGE, lambda: COUNTS, **axes)


def batch() -> Batch:
    return tiny.random_batch((1, 4), STAGE.seq_len)


@pytest.fixture(scope="module")
def one() -> tiny.Trained:
    return tiny.four_steps(SETTINGS, counted(), batch(), 30)


def test_four_steps_are_those_of_pytorch(one: tiny.Trained, tmp_path: Path) -> None:
    """Loss, norm of the gradient, and parameters."""
    torch = pytest.importorskip("torch", reason="the oracle is PyTorch")
    from . import plain_eagle3 as plain

    begun, (tokens, weights, _) = one.begun, batch()
    positions = jnp.broadcast_to(jnp.arange(STAGE.seq_len), tokens[0].shape)
    run = jax.jit(partial(run_target, tiny.TARGET, keep=(-1, 0, 1, 2)))
    view = jax.device_get(run(tiny.FROZEN, tokens[0], positions))
    embedded, *states = (torch.tensor(view.kept[layer]) for layer in (-1, 0, 1, 2))
    hidden, wanted = torch.cat(states, -1), torch.tensor(view.hidden @ tiny.FROZEN["head"].T)
    weights = torch.tensor(weights[0])
    stored = tiny.tensors(begun, begun.params, tmp_path / "first")
    known = torch.tensor(stored.pop("d2t")) + torch.arange(len(KNOWN))
    np.testing.assert_array_equal(known, KNOWN)
    del stored["t2d"]
    draft = {name: torch.tensor(value, requires_grad=True) for name, value in stored.items()}
    config = begun.trainer.draft

    def loss(step: int) -> Any:
        logits = plain.logits_of_steps(draft, config, embedded, hidden, SETTINGS.steps)
        total = plain.loss_sum(logits, wanted, weights, known, SETTINGS.decay)
        return total / weights[:, 1:].sum()

    tiny.assert_learns_as_pytorch(one, draft, loss, tmp_path / "last")


@pytest.mark.full
def test_two_devices_learn_the_same(one: tiny.Trained) -> None:
    tiny.assert_same_steps(one, tiny.four_steps(SETTINGS, counted(fsdp=2), batch(), 30))
    shared, halved = (
        tiny.four_steps(SHARED, tiny.given(STAGE, **axes), batch(), 30)
        for axes in ({}, {"fsdp": 1, "tp": 2})
    )
    tiny.assert_same_steps(shared, halved)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
def test_own_keys_share_the_softmax(dtype: Any, bound: float) -> None:
    """Values and gradients, where the own keys weigh nearly nothing and nearly all."""
    keys = jax.random.split(jax.random.key(0), 6)
    batch, length, heads, kv, width, own = 2, 9, 6, 2, 8, 3
    q = jax.random.normal(keys[0], (batch, length, heads, width)).astype(dtype)
    k, v = (jax.random.normal(key, (batch, length, kv, width)).astype(dtype) for key in keys[1:3])
    own_k, own_v = (
        jax.random.normal(key, (batch, length, own, kv, width)).astype(dtype) for key in keys[3:5]
    )
    own_k = own_k * jnp.asarray([0.0, 9.0])[:, None, None, None, None].astype(dtype)
    cotangent = jax.random.normal(keys[5], q.shape).at[:, -1].set(0)

    def dense(q: Any, k: Any, v: Any, own_k: Any, own_v: Any) -> jax.Array:
        q, k, v, own_k, own_v = (part.astype(jnp.float32) for part in (q, k, v, own_k, own_v))
        k, v = (jnp.repeat(part, heads // kv, 2) for part in (k, v))
        own_k, own_v = (jnp.repeat(part, heads // kv, 3) for part in (own_k, own_v))
        scores = jnp.einsum("BTNH,BSNH->BTNS", q, k)
        index = jnp.arange(length)
        scores = jnp.where(index[:, None, None] >= index, scores, -jnp.inf)
        mine = jnp.einsum("BTNH,BTRNH->BTNR", q, own_k)
        weights = jax.nn.softmax(jnp.concatenate([scores, mine], -1) * width**-0.5)
        out = jnp.einsum("BTNS,BSNH->BTNH", weights[..., :length], v)
        out += jnp.einsum("BTNR,BTRNH->BTNH", weights[..., length:], own_v)
        return jnp.sum(out * cotangent), out

    def fused(*operands: Any) -> Any:
        out = attention_with_own(*operands)
        return jnp.sum(out.astype(jnp.float32) * cotangent), out

    operands, each = (q, k, v, own_k, own_v), (0, 1, 2, 3, 4)
    found, out = jax.jit(jax.grad(fused, each, has_aux=True))(*operands)
    wanted, expected = jax.jit(jax.grad(dense, each, has_aux=True))(*operands)
    assert out.dtype == dtype and not jnp.any(out[:, -1])
    assert relative_error(out[:, :-1].astype(jnp.float32), expected[:, :-1]) < bound
    for gradient, dense_gradient in zip(found, wanted, strict=True):
        part = gradient.astype(jnp.float32), dense_gradient.astype(jnp.float32)
        assert relative_error(*part) < 2 * bound


@pytest.mark.full
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "qwen3"])
def test_steps_are_those_of_speculators(variant: str) -> None:
    """Its training forward over three steps, with all flags but the window, which is refused."""
    shape = tiny_target_config(vocab_size=37, model_width=16, num_layers=2, max_positions=64)
    target = Target(shape, random_target(shape))
    draft, steps = (
        load(SPECULATORS / variant, target),
        load_file(SPECULATORS / variant / "steps.safetensors"),
    )
    # The steps' inputs are tokens 1 to T, and the states of tokens 0 to T - 1.
    tokens = jnp.pad(jnp.asarray(steps["tokens"], jnp.int32), (1, 0))[None, :-1]
    parts = jnp.split(jnp.asarray(steps["hidden"])[None], 3, axis=-1)
    some = jnp.zeros(())
    view = TargetView(some, some, some, dict(zip(draft.config.features, parts, strict=True)))
    positions = jnp.arange(tokens.shape[1])[None]
    table = draft.params.embedding

    @jax.jit
    def logits_of(layer: Any) -> jax.Array:
        hidden = run_draft(draft.config, layer, table, tokens, positions, view, steps=3)
        return draft.params.logits(hidden)[0]

    logits = logits_of(draft.params.layer)
    for step, expected in enumerate(steps["logits"]):
        reached = logits[1 + step :, step]
        np.testing.assert_allclose(reached, expected[: len(reached)], atol=3e-4, rtol=1e-4)


def test_what_is_exported_is_a_published_file_that_goes_on_learning(
    one: tiny.Trained, tmp_path: Path
) -> None:
    """The drafter loads it, and training from it begins where it ended."""
    begun, _, _, params = one
    begun.trainer.save(tmp_path, params)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 20 and config["max_position_embeddings"] == 11
    draft = load(tmp_path, Target(tiny.TARGET, tiny.FROZEN), Eagle3Options(window=40))
    assert draft.config == begun.trainer.draft and not draft.params.own_embedding
    np.testing.assert_array_equal(draft.params.vocabulary, KNOWN)
    np.testing.assert_array_equal(draft.params.head, params["head"])
    again = begin(replace(SETTINGS, init=str(tmp_path), vocabulary=0, layers=""), counted())
    assert again.trainer.draft == begun.trainer.draft
    jax.tree.map(np.testing.assert_array_equal, again.params, dict(params))
    jax.tree.map(np.testing.assert_array_equal, again.frozen, begun.frozen)


def test_a_fresh_head_is_the_targets(one: tiny.Trained) -> None:
    begun = one.begun
    np.testing.assert_array_equal(begun.params["head"], tiny.FROZEN["head"][KNOWN])
    whole = begin(replace(SETTINGS, vocabulary=0), tiny.given(STAGE))
    assert whole.frozen.places is None and whole.trainer.draft.proposable == tiny.TARGET.vocab_size
    np.testing.assert_array_equal(whole.params["head"], tiny.FROZEN["head"])


def test_a_draft_without_a_head_learns_and_drafts_with_the_targets(tmp_path: Path) -> None:
    """Nothing of the head is in its parameters or in its file, and no token of the text changes."""
    begun, first, metrics, params = tiny.four_steps(SHARED, tiny.given(STAGE), batch(), 30)
    assert float(metrics[3]["loss"]) < float(metrics[0]["loss"])
    assert first.keys() == params.keys() and "head" not in params
    stored = tiny.tensors(begun, params, tmp_path)
    assert not stored.keys() & {"lm_head.weight", "embed_tokens.weight", "d2t"}
    assert stored["midlayer.mlp.up_proj.weight"].shape == (12, 16)
    draft = load(tmp_path, Target(tiny.TARGET, tiny.FROZEN), Eagle3Options(window=40))
    assert draft.config == begun.trainer.draft and draft.params.head is tiny.FROZEN["head"]
    jax.tree.map(np.testing.assert_array_equal, draft.params.layer, dict(params))
    # What a fresh draft would have does not matter.
    again = begin(replace(SETTINGS, init=str(tmp_path)), tiny.given(STAGE))
    jax.tree.map(np.testing.assert_array_equal, again.params, dict(params))
    assert again.trainer.draft == begun.trainer.draft and not again.trainer.own_head
    compared = LongSpec(tiny.TARGET, tiny.FROZEN, draft, tree=(2, 2)).compare(
        [[3, 5, 7], [2] * 6], max_new_tokens=9, temperature=[0.0, 1.0]
    )
    assert compared.identical and sum(compared.speculative.stats.acceptance_histogram) > 0


def test_the_targets_head_is_learned_for_as_it_is_drafted_with(tmp_path: Path) -> None:
    """With its factors: the loss is that of the loaded draft's own logits."""
    target = replace(tiny.TARGET, logits_divisor=0.25, logit_cap=2.0)
    begun = begin(SHARED, replace(tiny.given(STAGE), target=target))
    begun.trainer.save(tmp_path, begun.params)
    draft = load(tmp_path, Target(target, tiny.FROZEN), Eagle3Options(window=40))
    objective = begun.trainer.objective(STAGE, 30, 0)
    micro = jax.tree.map(lambda part: jnp.asarray(part[0]), batch())

    @jax.jit
    def both(params: Any) -> Any:
        hidden, view = objective._passes(params, begun.frozen, micro)
        logits = draft.params.logits(hidden * target.logits_divisor)
        scores = target.logit_cap * jnp.tanh(view.hidden @ tiny.FROZEN["head"].T / target.logit_cap)
        surprise = -jax.nn.softmax(scores)[:, :, None] * jax.nn.log_softmax(logits)
        loss = objective.sums(params, begun.frozen, micro, ())["loss"]
        return loss, jnp.sum(surprise, -1), jnp.max(jnp.abs(logits))

    loss, surprise, largest = both(begun.params)
    assert 1.5 < largest < 2.0
    weights = np.asarray(micro.weights)
    expected = sum(
        0.5**step * np.sum(weights[:, step + 2 :] * surprise[:, step + 1 : -1, step])
        for step in range(3)
    )
    assert relative_error(loss, expected) < 1e-5


def test_acceptance_is_that_of_the_logits(one: tiny.Trained) -> None:
    """Counted one by one, over tokens that every step reaches."""
    begun, _, _, params = one
    objective = begun.trainer.objective(STAGE, 30, 0)
    micro = jax.tree.map(lambda part: jnp.asarray(part[0]), batch())
    report = objective.measure(params, begun.frozen, micro)
    hidden, view = jax.jit(objective._passes)(params, begun.frozen, micro)
    choice = np.asarray(view.hidden @ tiny.FROZEN["head"].T).argmax(-1)
    # A position predicts the token after it.
    counted = np.asarray(micro.weights)[:, SETTINGS.steps + 1 :]
    length = 1.0
    for step in range(SETTINGS.steps):
        logits = np.asarray(hidden[:, :, step] @ params["head"].T)
        hits = KNOWN[logits.argmax(-1)] == choice
        share = (hits[:, SETTINGS.steps : -1] * counted).sum() / counted.sum()
        assert report[f"agree_top1_shift{step + 1}"] == pytest.approx(share, abs=1e-4)
        length *= share
    assert 1 <= report["tau_chain"] <= 1 + SETTINGS.steps
    assert report["agree_top4_shift1"] >= report["agree_top1_shift1"]


def test_what_cannot_be_trained_is_refused(one: tiny.Trained, tmp_path: Path) -> None:
    begun = one.begun
    with pytest.raises(ValueError, match="stages.short.max_offset=0"):
        begun.trainer.objective(replace(STAGE, max_offset=5), 30, 0)
    for settings, said in (
        (replace(SETTINGS, vocabulary=49), "vocabulary=49 is above the target's 48 tokens"),
        (replace(SETTINGS, layers=""), "3 layers, too few .*--config.draft.layers=0,1"),
        (replace(SETTINGS, layers="0,3"), "the target has 3 layers"),
    ):
        with pytest.raises(ValueError, match=said):
            begin(settings, counted())
    with pytest.raises(ValueError, match="own_head=False .* vocabulary=20 .*draft.vocabulary=0"):
        replace(SETTINGS, own_head=False)
    own = random_params(begun.trainer.draft, KNOWN)
    for draft, embedding, said in (
        (begun.trainer.draft, True, "has an embedding of its own"),
        (replace(begun.trainer.draft, window=5), False, "has a sliding window of 5, which is not"),
    ):
        save_draft(tmp_path, draft, replace(own, stores_embedding=embedding))
        with pytest.raises(ValueError, match=said):
            begin(replace(SETTINGS, init=str(tmp_path)), counted())
