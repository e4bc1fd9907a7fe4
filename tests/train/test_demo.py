"""The demo's whole pipeline from nothing, at miniature scale."""

import json
from pathlib import Path

import jax
import numpy as np

from configs import demo
from longspec_jax.weights.hf import load_draft, load_target
from tests.train.tiny import records
from train import pipeline
from train.config import from_config


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
    card = (tmp_path / "README.md").read_text()
    assert all(f"| {source['name']} |" in card for source in sources)

    stages = [record["stage"] for record in records(tmp_path)]
    assert list(dict.fromkeys(stages)) == [
        "corpus", "target_short", "target_long", "draft_short", "draft_long",
    ]  # fmt: skip
    last, shifts = records(tmp_path)[-1], config.draft.max_shift
    assert 1 <= last["tau_chain"] <= 1 + shifts and 0 <= last[f"agree_top4_shift{shifts}"] <= 1

    # What is there is not made again.
    count = len(records(tmp_path))
    pipeline.train(config, tmp_path)
    assert len(records(tmp_path)) == count
    again = load_target(tmp_path / "target")[1]
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(again)))
