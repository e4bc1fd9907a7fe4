"""The demo's whole pipeline from nothing, at miniature scale."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import demo
from longspec_jax.drafters.checkpoints.longspec import load_draft
from longspec_jax.drafters.checkpoints.small_lm import load
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.small_lm import SmallLMOptions
from longspec_jax.embedded import DEMO
from longspec_jax.loading import load_tokenizer
from longspec_jax.weights import hub
from longspec_jax.weights.hf import load_target
from tests.train.tiny import ROOT, records
from train import pipeline
from train.arguments import from_config
from train.data.corpus import prepare_corpus, tokens_file
from train.drafts.kinds import LongSpecSettings
from train.metrics import Metrics

pytestmark = pytest.mark.full


def test_the_demo_from_nothing(tmp_path: Path) -> None:
    config = from_config(demo.get_config("tiny").to_dict())
    pipeline.train(config, tmp_path)
    target, params = load_target(tmp_path / "target")
    draft, _ = load_draft(tmp_path / "draft", target)
    assert target.tied_embeddings and draft.window == 16
    assert (tmp_path / "target" / "tokenizer.json").is_file()

    sources = json.loads((tmp_path / "sources.json").read_text())
    held = {source["name"] for source in sources if source["held_out"]}
    trained = {source["name"] for source in sources if not source["held_out"]}
    assert held == {"attrs", "jinja2"} and trained and not held & trained
    assert all(source["licence"] and source["version"] for source in sources)

    stages = [record["stage"] for record in records(tmp_path)]
    assert list(dict.fromkeys(stages)) == [
        "corpus", "target_short", "target_long", "draft_short", "draft_long",
    ]  # fmt: skip
    assert isinstance(config.draft, LongSpecSettings)
    last, shifts = records(tmp_path)[-1], config.draft.max_shift
    assert 1 <= last["tau_chain"] <= 1 + shifts and 0 <= last[f"agree_top4_shift{shifts}"] <= 1

    # What is there is not made again.
    count = len(records(tmp_path))
    pipeline.train(config, tmp_path)
    assert len(records(tmp_path)) == count
    again = load_target(tmp_path / "target")[1]
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(again)))

    # Another target is not what was asked for.
    values = demo.get_config("tiny")
    values.pretraining.shape.num_layers = 3
    with pytest.raises(ValueError, match=r"target_short/3 is of another run: .*num_layers=3 \(was"):
        pipeline.train(from_config(values.to_dict()), tmp_path)

    # Another text in the place of the one before has tokens of its own.
    held = tmp_path / "corpus" / "heldout.jsonl"
    where = tmp_path / "corpus", "heldout", tmp_path / "tokenizer"
    before, corpus = tokens_file(*where), config.data.corpus
    assert before.is_file() and corpus is not None
    held.write_text(held.read_text().splitlines()[0] + "\n")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    target = tmp_path / "target"
    prepare_corpus(corpus, tmp_path, target, lambda values: metrics.write("corpus", 0, values))
    metrics.close()
    after = tokens_file(*where)
    assert len(np.load(after)) < len(np.load(before))
    assert len(records(tmp_path)) == count + 1


def test_a_small_model_for_the_demos_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``demo.py:small_lm`` does, with a few steps of short rows."""
    monkeypatch.chdir(ROOT)
    values = demo.get_config("small_lm")
    tiny = demo.get_config("tiny")
    values.update(dtype="float32", log_every=1, accept_rows=2, accept_seq_len=64)
    values.data.corpus.update(tiny.data.corpus, tokenizer=values.data.corpus.tokenizer)
    values.stages = dict(short=tiny.pretraining.stages.short)
    values.stages.short.steps = 16
    pipeline.train(from_config(values.to_dict()), tmp_path)
    target, _ = load_target(DEMO / "target")
    tokenizer = load_tokenizer(DEMO / "target")
    draft = load(tmp_path / "draft", Target(target, None, tokenizer), SmallLMOptions(context=32))
    assert draft.config.num_layers == 2 and not draft.narrower
    found = [record for record in records(tmp_path) if "loss" in record]
    for name in ("loss", "divergence", "cross_entropy"):
        values = [record[name] for record in found]
        assert len(values) == 16 and np.mean(values[-4:]) < np.mean(values[:2])
    assert 1 <= records(tmp_path)[-1]["tau_chain"] <= 4


@pytest.mark.parametrize("is_target", [True, False])
def test_what_is_not_there_is_said_before_the_corpus_is_built(
    is_target: bool, tmp_path: Path
) -> None:
    """A target's tokenizer too: one of the run's own was trained in place of it, and kept."""
    values = demo.get_config("draft" if is_target else "tiny")
    values.data.corpus.tokenizer = "" if is_target else "runs/absent/target"
    values.target = "runs/absent/target" if is_target else ""
    with pytest.raises(FileNotFoundError, match="runs/absent/target is not a folder"):
        pipeline.train(from_config(values.to_dict()), tmp_path)
    assert not (tmp_path / "corpus").exists() and not (tmp_path / "tokenizer").exists()


def test_a_target_of_another_place_brings_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id is no path: its drafts were trained on the tokens of another tokenizer."""
    values = demo.get_config("draft").to_dict() | {"target": "owner/model", "revision": "main"}
    monkeypatch.setattr(hub, "local_model", lambda name, revision: tmp_path / name / revision)
    found = from_config(values).found_target(tmp_path)
    assert found == tmp_path / "owner/model/main"
