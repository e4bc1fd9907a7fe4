"""DFlash drafts in training equal PyTorch's, on one device and on two; and they are exported.

Once as DFlash learns, once as JetSpec does: causal blocks, the target's distribution, slots alike.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.checkpoints.dflash import load, save_draft
from longspec_jax.drafters.dflash import Confidence, DFlashOptions, Markov
from longspec_jax.drafters.dflash2 import Convolution, Selector
from longspec_jax.drafters.draft import Target
from tests.drafters.dflash.toys import random_params
from tests.drafters.kit import without_tables
from train.config import StageConfig
from train.drafts.dflash import begin, fresh_config
from train.drafts.kinds import DFlashSettings
from train.step import Batch
from train.target import run_target
from train.views import Reads

from . import steps as tiny

pytestmark = pytest.mark.full
STAGE = StageConfig("short", 13, 4, 2, tiny.RATE, 4, 0, 0.0, 0)
SETTINGS = DFlashSettings("dflash", "", 2, "0,1", 4, -1, 3, 2.0)
JETSPEC = replace(SETTINGS, block=5, decay=1e6, causal=True, distillation=0.75)
"""Blocks of more slots than the places they share in attention."""
ROWS = 2, 2


def batch() -> Batch:
    return tiny.random_batch(ROWS, STAGE.seq_len)


@pytest.fixture(scope="module")
def one() -> tiny.Trained:
    return tiny.four_steps(SETTINGS, tiny.given(STAGE), batch(), 90)


@pytest.fixture(scope="module")
def jetspec() -> tiny.Trained:
    return tiny.four_steps(JETSPEC, tiny.given(STAGE), batch(), 90)


def views() -> Any:
    """The target's of both micro-batches."""
    positions = jnp.broadcast_to(jnp.arange(STAGE.seq_len), (2, STAGE.seq_len))
    run = jax.jit(partial(run_target, tiny.TARGET, keep=(0, 1)))
    return [jax.device_get(run(tiny.FROZEN, tokens, positions)) for tokens in batch().tokens]


def block_logits(oracle: Any, tokens: Any, view: Any, row: int, anchor: int) -> Any:
    from .plain_dflash import torch

    table, head = (torch.tensor(np.array(tiny.FROZEN[name])) for name in ("embedding", "head"))
    features = np.concatenate([view.kept[0][row, :anchor], view.kept[1][row, :anchor]], axis=-1)
    return oracle.logits(table, head, torch.tensor(features), anchor, int(tokens[row, anchor]))


@pytest.mark.parametrize("name", ["one", "jetspec"])
def test_four_steps_are_those_of_pytorch(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Loss, norm of the gradient, and parameters."""
    torch = pytest.importorskip("torch", reason="the oracle is PyTorch")
    from .plain_dflash import DFlashOracle

    learned: tiny.Trained = request.getfixturevalue(name)
    begun, first, metrics, last = learned
    settings, slots = begun.trainer.settings, begun.trainer.draft.tokens
    share = settings.distillation
    objective = begun.trainer.objective(STAGE, 90, 0)
    data, seen, root = batch(), views(), jax.random.key(tiny.SEED)
    stored = tiny.tensors(begun, first, tmp_path / "first")
    draft = {name: torch.tensor(value, requires_grad=True) for name, value in stored.items()}
    oracle = DFlashOracle(draft, begun.trainer.draft)
    decays = np.exp(-np.arange(slots) / settings.decay)
    decays = 3 * decays / decays.sum()
    head = torch.tensor(np.array(tiny.FROZEN["head"]))

    def loss(step: int) -> Any:
        anchors = objective.draw(jax.random.fold_in(root, step), ROWS, STAGE.seq_len)
        total = torch.zeros(())
        for (a, row, block), anchor in np.ndenumerate(np.asarray(anchors)):
            assert 3 * block <= anchor < 3 * block + 3
            tokens = data.tokens[a]
            logits = block_logits(oracle, tokens, seen[a], row, int(anchor))
            for slot in range(1, slots + 1):
                if (at := int(anchor) + slot) < STAGE.seq_len:
                    q = logits[slot - 1].log_softmax(-1)
                    p = (torch.tensor(seen[a].hidden[row, at - 1]) @ head.T).log_softmax(-1)
                    surprise = -q[int(tokens[row, at])]
                    divergence = (p.exp() * (p - q)).sum()
                    found = (1 - share) * surprise + share * divergence
                    total = total + decays[slot - 1] * data.weights[a, row, at] * found
        return total / float(data.weights[:, :, 1:].sum())

    tiny.assert_learns_as_pytorch(learned, draft, loss, tmp_path / "last")
    for values in metrics if share else ():
        mixed = (1 - share) * values["cross_entropy"] + share * values["divergence"]
        assert values["loss"] == pytest.approx(mixed, rel=1e-5)

    # What is measured: agreement with the target's choice, of blocks that are learned whole.
    report = objective.measure(last, begun.frozen, jax.tree.map(lambda part: part[0], data))
    hits = []
    with torch.no_grad():
        for row, anchor in np.ndindex(2, STAGE.seq_len):
            counts = data.weights[0, row, anchor + 1 : anchor + 1 + slots]
            if anchor % 3 == 0 and len(counts) == slots and counts.all():
                logits = block_logits(oracle, data.tokens[0], seen[0], row, anchor).numpy()
                wanted = seen[0].hidden[row, anchor : anchor + slots] @ tiny.FROZEN["head"].T
                hits.append(logits.argmax(-1) == wanted.argmax(-1))
    assert len(hits) > 1
    for slot, agreed in enumerate(np.mean(hits, axis=0)):
        assert report[f"agree_top1_shift{slot + 1}"] == pytest.approx(agreed, abs=1e-4)


@pytest.mark.parametrize("name", ["one", "jetspec"])
def test_devices_and_chunks_do_not_change_the_steps(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Few slots of the loss, the last of which are not a whole chunk."""
    learned: tiny.Trained = request.getfixturevalue(name)
    given = tiny.given(STAGE, fsdp=2)
    settings = learned.begun.trainer.settings
    tiny.assert_same_steps(learned, tiny.four_steps(settings, given, batch(), 10, 8))


def test_what_is_exported_is_a_published_file_that_goes_on_learning(
    one: tiny.Trained, tmp_path: Path
) -> None:
    begun, _, _, params = one
    begun.trainer.save(tmp_path, params)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"target_layer_ids": [0, 1], "mask_token_id": 47}
    assert config["max_position_embeddings"] == 13 and config["block_size"] == 4
    draft = load(tmp_path, Target(tiny.TARGET, tiny.FROZEN), DFlashOptions(window=40))
    assert draft.config == begun.trainer.draft and not draft.params.own_head
    jax.tree.map(np.testing.assert_array_equal, draft.params.layer, params)
    again = begin(replace(SETTINGS, init=str(tmp_path), features="", block=9), tiny.given(STAGE))
    assert again.trainer.draft == begun.trainer.draft
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_a_causal_draft_is_exported_as_jetspecs(jetspec: tiny.Trained, tmp_path: Path) -> None:
    """And goes on learning as it is, whatever the settings of a fresh draft say."""
    begun, _, _, params = jetspec
    assert begun.trainer.reads(STAGE) == Reads(hidden=True, kept=(0, 1))
    begun.trainer.save(tmp_path, params)
    own = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    assert own == {"target_layer_ids": [0, 1], "mask_token_id": 47, "causal_head": True}
    draft = load(tmp_path, Target(tiny.TARGET, tiny.FROZEN), DFlashOptions(window=40))
    assert draft.config == begun.trainer.draft and draft.config.causal == (True, True)
    again = begin(replace(SETTINGS, init=str(tmp_path)), tiny.given(STAGE))
    assert again.trainer.draft == begun.trainer.draft


def test_what_cannot_be_trained_is_refused(one: tiny.Trained, tmp_path: Path) -> None:
    begun, _, _, _ = one
    with pytest.raises(ValueError, match="stages.short.max_offset=0"):
        begun.trainer.objective(replace(STAGE, max_offset=5), 30, 0)
    for settings, said in (
        (replace(SETTINGS, mask_token=48), "mask_token=48 must be one of the target's 48 tokens"),
        (replace(SETTINGS, features=""), "3 layers, too few .*--config.draft.features=0,1"),
        (replace(SETTINGS, features="0,3"), "the target has 3 layers"),
    ):
        with pytest.raises(ValueError, match=said):
            begin(settings, tiny.given(STAGE))
    plain = begun.trainer.draft
    for config, tables, said in (
        (plain, True, "has tables of its own"),
        (replace(plain, windows=(5, None)), False, "has sliding windows"),
        (replace(plain, from_pending=True), False, "proposes from the pending"),
        (replace(plain, markov=Markov(6)), False, "has a Markov head"),
        (
            replace(plain, convolution=Convolution(2, 4), selector=Selector(5, 6)),
            False,
            "has convolutions",
        ),
        (replace(plain, confidence=Confidence(False)), False, "has a confidence head"),
    ):
        draft = random_params(config)
        save_draft(tmp_path, config, draft if tables else without_tables(draft))
        with pytest.raises(ValueError, match=said):
            begin(replace(SETTINGS, init=str(tmp_path)), tiny.given(STAGE))


def test_features_are_spread_over_a_deep_target() -> None:
    deep = replace(tiny.TARGET, num_layers=8)
    assert fresh_config(replace(SETTINGS, features=""), deep).features == (1, 5)
    assert fresh_config(replace(SETTINGS, mask_token=7), deep).mask_token == 7
