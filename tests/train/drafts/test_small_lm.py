"""A small model in training equals transformers' in PyTorch, on one device and on two."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contrib.quantise import main as quantise
from longspec_jax.config.layers import LayerConfig, Rotary
from longspec_jax.drafters.checkpoints.small_lm import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.small_lm import SmallLMOptions
from longspec_jax.weights.hf import save_target
from tests.kit import random_target, tiny_target_config
from train.config import StageConfig
from train.drafts.kinds import SmallLMSettings
from train.drafts.small_lm import begin

from . import steps as tiny

pytestmark = pytest.mark.full
STAGE = StageConfig("text", 13, 4, 2, tiny.RATE, 4, 0, 0.0, 0)
SETTINGS = SmallLMSettings("small_lm", "", 2, 16, 20, 4, 2, 0.7)
DATA = tiny.random_batch((2, 2), STAGE.seq_len)


@pytest.fixture(scope="module", params=[0.7, 0.0], ids=["distilled", "text"])
def one(request: pytest.FixtureRequest) -> tiny.Trained:
    return tiny.four_steps(
        replace(SETTINGS, distillation=request.param), tiny.given(STAGE), DATA, 90
    )


def test_four_steps_are_those_of_pytorch(one: tiny.Trained, tmp_path: Path) -> None:
    """Loss, norm of the gradient, and parameters; both models are transformers'."""
    torch = pytest.importorskip("torch", reason="the oracle is PyTorch")
    from transformers import AutoModelForCausalLM

    begun, share = one.begun, one.begun.trainer.settings.distillation
    tiny.tensors(begun, one.first, tmp_path / "first")
    save_target(tmp_path / "target", tiny.TARGET, tiny.FROZEN)
    draft, target = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        for name in ("first", "target")
    )
    tokens, weights = (torch.tensor(part).flatten(0, 1) for part in DATA[:2])
    tokens = tokens.long()
    with torch.no_grad():
        aim = target(tokens).logits[:, :-1].softmax(-1)

    def loss(step: int) -> Any:
        logs = draft(tokens).logits[:, :-1].log_softmax(-1)
        text = -logs.gather(-1, tokens[:, 1:, None])[..., 0]
        divergence = (aim * (aim.log() - logs)).sum(-1)
        per_token = (1 - share) * text + share * divergence
        return (weights[:, 1:] * per_token).sum() / weights[:, 1:].sum()

    tiny.assert_learns_as_pytorch(one, dict(draft.named_parameters()), loss, tmp_path / "last")
    assert all(("divergence" in values) == bool(share) for values in one.metrics)

    # What is measured: agreement with the target's choice, which is one for all distances.
    objective = begun.trainer.objective(STAGE, 90, 0)
    more = jax.tree.map(lambda part: part[0], tiny.random_batch((1, 8), 50))
    report = objective.measure(one.last, begun.frozen, more)
    with torch.no_grad():
        choices = [model(torch.tensor(more.tokens).long()).logits for model in (draft, target)]
    # A position predicts the token after it.
    hits = (choices[0].argmax(-1) == choices[1].argmax(-1)).numpy()[:, :-1] * more.weights[:, 1:]
    agreed = float(hits.sum() / more.weights[:, 1:].sum())
    assert report["agree_top1_shift1"] == pytest.approx(agreed, abs=1e-4)
    chain = 1 + agreed + agreed**2 + agreed**3
    assert report["tau_chain"] == pytest.approx(chain, abs=1e-3) and 0 < agreed < 1


def test_devices_and_chunks_do_not_change_the_steps() -> None:
    """Few tokens of the loss, the last of which are not a whole chunk, and MLPs in pieces."""
    whole, cut = tiny.given(STAGE), tiny.given(STAGE, fsdp=2, tp=2)
    tiny.assert_same_steps(
        tiny.four_steps(SETTINGS, whole, DATA, 90), tiny.four_steps(SETTINGS, cut, DATA, 10, 8)
    )


def test_what_is_exported_is_a_plain_model_that_goes_on_learning(
    one: tiny.Trained, tmp_path: Path
) -> None:
    begun = one.begun
    begun.trainer.save(tmp_path, one.last)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert config["max_position_embeddings"] == 13
    target = Target(tiny.TARGET, tiny.FROZEN)
    with pytest.raises(ValueError, match="was made for 13 positions .* set context=13"):
        load(tmp_path, target)
    draft = load(tmp_path, target, SmallLMOptions(context=13))
    assert draft.config == begun.trainer.draft
    jax.tree.map(np.testing.assert_array_equal, draft.params, one.last)
    again = begin(replace(SETTINGS, init=str(tmp_path), layers=9), tiny.given(STAGE))
    assert again.trainer.draft == begun.trainer.draft
    jax.tree.map(np.testing.assert_array_equal, again.params, one.last)


def test_the_target_runs_only_for_its_distribution() -> None:
    """What is stored of it, too."""
    text = replace(SETTINGS, distillation=0.0)
    for settings, reads in ((SETTINGS, True), (text, False)):
        trainer = begin(settings, tiny.given(STAGE)).trainer
        assert bool(trainer.reads(STAGE)) == reads
        objective = trainer.objective(STAGE, 90, 0)
        params = jax.eval_shape(objective.initialize, jax.random.key(0))
        data = jax.tree.map(lambda part: jnp.asarray(part[0]), DATA)
        made: Any = jax.make_jaxpr(objective.sums)(params, tiny.FROZEN, data, ())
        leaves = len(jax.tree.leaves(tiny.FROZEN))
        frozen = made.jaxpr.invars[len(jax.tree.leaves(params)) :][:leaves]
        used = {id(v) for equation in made.jaxpr.eqns for v in equation.invars}
        assert any(id(each) in used for each in frozen) == reads


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    trainer = begin(SETTINGS, tiny.given(STAGE)).trainer
    with pytest.raises(ValueError, match="stages.text.max_offset=0"):
        trainer.objective(replace(STAGE, max_offset=5), 30, 0)
    for change in (dict(width=12), dict(heads=2, kv_heads=4)):
        with pytest.raises(ValueError, match="do not fit each other: width must be a multiple"):
            begin(replace(SETTINGS, **change), tiny.given(STAGE))
    plain = tiny_target_config(vocab_size=48, model_width=64, mlp_width=96, head_width=16)
    windows = dict(kinds=(LayerConfig(Rotary(), window=5),), pattern=(0, 0))
    for name, config, said in (
        (
            "vocabulary",
            replace(plain, vocab_size=47),
            "vocab_size=47, the target 48, and .* without a tokenizer",
        ),
        (
            "window",
            replace(plain, architecture="MistralForCausalLM", **windows),
            "layers with a window .* cannot be a small_lm draft",
        ),
        ("codes", plain, "the weights are quantised, and codes are not trained"),
    ):
        folder = tmp_path / name
        save_target(folder, config, random_target(config))
        if name == "codes":
            assert quantise([str(folder), "--format=fp8", f"--out={tmp_path / 'fp8'}"]) == 0
            folder = tmp_path / "fp8"
        with pytest.raises(ValueError, match=said):
            begin(replace(SETTINGS, init=str(folder)), tiny.given(STAGE))
