"""Scores and attention against dense computations, and the command on a toy."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.longspec.checkpoint import save_draft
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.models.target import head_logits, head_of
from longspec_jax.weights.hf import load_target
from tests.train.tiny import save_tiny_target
from train import reproduce
from train.acceptance import Pair, implied_length, simulated_acceptance
from train.config import DraftSettings
from train.data.corpus import tokens_file
from train.objectives import DraftObjective
from train.passes import run_target
from train.study.anchors import attention_to_anchors, losses_at_offset
from train.study.scores import score_draft

SETTINGS = DraftSettings(
    window=7, init="", anchor_offset=False, max_sinks=4, max_shift=3, per_row=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What runs of ``small_scale`` leave: a target, held-out tokens, and drafts of two seeds."""
    folder = tmp_path_factory.mktemp("small")
    save_tiny_target(folder / "target" / "target")
    (folder / "corpus").mkdir()
    tokens = np.random.default_rng(0).integers(3, 300, 400)
    (folder / "corpus" / "heldout.jsonl").write_text("")  # The tokens' file is named after it.
    path = tokens_file(folder / "corpus", "heldout", folder / "target" / "target")
    np.save(path, tokens.astype(np.uint16))
    config, _ = load_target(folder / "target" / "target", dtype="float32")
    draft = DraftConfig.for_target(config, window=7)
    initialize = jax.jit(DraftObjective(config, draft, SETTINGS, 0, 64).initialize)
    for index, name in enumerate(("plain-1", "plain-2", "offset-1", "offset-2")):
        params = initialize(jax.random.key(index))
        save_draft(folder / name / "draft", draft, params, target=config)
        losses = [4.0 - 0.1 * step - 0.2 * name.startswith("offset") for step in range(12)]
        (folder / name / "metrics.jsonl").write_text(
            "".join(
                json.dumps({"stage": "draft_long", "step": s, "loss": v, "target_loss": 1.0}) + "\n"
                for s, v in enumerate(losses)
            )
        )
    return folder


def test_scores_are_those_of_simulated_acceptance(folder: Path) -> None:
    config, frozen = load_target(folder / "target" / "target", dtype="float32")
    draft = DraftConfig.for_target(config, window=7)
    params = jax.jit(DraftObjective(config, draft, SETTINGS, 0, 64).initialize)(jax.random.key(5))
    rows = np.random.default_rng(1).integers(3, 300, (3, 24)).astype(np.int32)
    bound = LongSpecDraft.bind(draft, params, frozen)
    found = score_draft(Target(config, frozen), bound, rows, last=10, shifts=3)
    # There the weight of a position is that of the predictions made at it.
    weights = np.zeros((3, 24), np.float32)
    weights[:, 13:23] = 1.0
    pair = Pair(config, draft, 3, 64)
    expected = simulated_acceptance(pair, params, frozen, jnp.asarray(rows), jnp.asarray(weights))
    agreement = found.agrees.mean(axis=(1, 2))
    for shift in range(3):
        assert agreement[shift] == pytest.approx(expected[f"agree_top1_shift{shift + 1}"], abs=1e-4)
    assert implied_length(agreement) == pytest.approx(expected["tau_chain"], abs=1e-4)
    positions = jnp.broadcast_to(jnp.arange(24), (3, 24))
    logits = head_logits(
        head_of(frozen), run_target(config, frozen, jnp.asarray(rows), positions).hidden
    )
    dense = -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits))[:, :-1], rows[:, 1:, None], axis=2
    )[..., 0]
    np.testing.assert_allclose(found.target_loss, dense[:, -10:], rtol=1e-5)


def test_a_target_without_attention_weights_attends_evenly(folder: Path) -> None:
    """All queries zero: the share of the first four positions is 4 / (keys that are seen)."""
    config, frozen = load_target(folder / "target" / "target", dtype="float32")
    flat = _scaled(frozen, "qkv", 0.0)
    rows = np.full((2, 16), 5, np.int32)
    [share] = attention_to_anchors(config, flat, rows)
    seen = np.linspace(4, 15, 16).astype(int) + 1
    assert share == pytest.approx(float(np.mean(4 / seen)), rel=1e-5)


def test_one_offset_for_all_changes_nothing(folder: Path) -> None:
    """Rotary attention is relative: the negative control of anchor-offset."""
    config, frozen = load_target(folder / "target" / "target", dtype="float32")
    rows = np.random.default_rng(2).integers(3, 300, (2, 32)).astype(np.int32)
    # Random weights attend evenly; larger ones tell near from far.
    sharp = _scaled(_scaled(frozen, "qkv", 20.0), "out", 20.0)
    losses = losses_at_offset(config, sharp, rows, offset=40)
    np.testing.assert_allclose(losses["offset_0_sinks"], losses["plain"], rtol=1e-4)
    assert not np.allclose(losses["offset_4_sinks"], losses["plain"], rtol=1e-3)


def _scaled(params: Any, name: str, factor: float) -> Any:
    """Parameters, those whose path holds a name multiplied by a factor."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * factor if name in jax.tree_util.keystr(path) else leaf, params
    )


def test_the_command_compares_drafts_and_measures_none_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["--rows=3", "--contexts=16,32", "--last=4", "--short=16", "--tree=2,1",
             "--new_tokens=5", "--near=8"]  # fmt: skip
    some = [str(folder), *small, "--dtype=float32", "--drafts=offset-1,plain-*"]
    assert reproduce.main(some) == 0
    measured = {path.parent.name for path in folder.glob("*-*/study.json")}
    assert measured == {"offset-1", "plain-1", "plain-2"}
    capsys.readouterr()
    output = tmp_path / "study.json"
    assert reproduce.main([str(folder), *small, f"--json={output}", "--dtype=float32"]) == 0
    said = capsys.readouterr().out
    assert "offset_4_sinks" in said and "decoding, T=1.0, acceptance at depth 2" in said
    training = said.split("training loss, mean over the long stage")[1].split("\n\n")[0]
    assert "-0.2000 +- 0.0000" in training
    study = json.loads(output.read_text())
    assert set(study["drafts"]) == {"plain-1", "plain-2", "offset-1", "offset-2"}
    decoded = study["drafts"]["plain-1"]["decoding"]["0.0"]["32"]
    assert decoded["tokens"] == 3 * 4 and sum(decoded["histogram"]) == decoded["target_passes"]
    written = (folder / "plain-1" / "study.json").stat().st_mtime_ns
    assert reproduce.main([str(folder), *small, "--dtype=float32"]) == 0
    assert (folder / "plain-1" / "study.json").stat().st_mtime_ns == written


def test_finished_studies_are_compared_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafts are paired with those of the same target and seed, not of another target."""

    def study(name: str, losses: dict[str, float]) -> str:
        drafts = {
            draft: {
                "curve": {"draft_long": {"loss": [loss] * 12}},
                "scores": {
                    "contexts": {"16": {"loss": [[loss]], "agreement": [[0.5]]}},
                    "copies": {k: {"loss": [1.0], "tokens": 1} for k in ("new", "near", "far")},
                },
            }
            for draft, loss in losses.items()
        }
        target = {"attention_to_anchors": [0.1], "losses": {"plain": [2.0]}}
        path = tmp_path / name
        path.write_text(json.dumps({"target": target, "drafts": drafts}))
        return str(path)

    first = study("first.json", {"plain-1": 3.0, "offset-1": 2.5})
    second = study("second.json", {"plain-1": 7.0, "offset-1": 6.75, "offset-2": 1.0})
    assert reproduce.main([first, second]) == 0
    training = capsys.readouterr().out.split("mean over the long stage")[1].split("\n\n")[0]
    assert "offset       3.4167" in training and "-0.3750 +- 0.1250" in training
    assert reproduce.main([first, "--json=x.json"]) == 2
    assert "is finished" in capsys.readouterr().err
    (tmp_path / "rows.json").write_text("[]")
    assert reproduce.main([first, str(tmp_path / "rows.json")]) == 2
    assert "holds no study" in capsys.readouterr().err
    assert reproduce.main([first, str(tmp_path)]) == 2
    assert "one folder" in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce.main([str(tmp_path)]) == 2
    assert "its runs are none" in capsys.readouterr().err
