"""Whole runs at miniature scale: the demo from nothing, exact resume, signals, errors."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import demo
from longspec_jax.weights.hf import load_draft, load_target, save_target
from tests.kit import random_target, tiny_target_config
from train import loop, pipeline
from train.config import RunConfig, from_config
from train.metrics import Metrics


def records(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


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
    last = records(tmp_path)[-1]
    assert 1 <= last["tau_chain"] <= 5 and 0 <= last["agree_top4_shift4"] <= 1

    # What is there is not made again.
    pipeline.train(config, tmp_path)
    again = load_target(tmp_path / "target")[1]
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(again)))


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = tiny_target_config(max_positions=64)
    save_target(folder, config, random_target(config))
    return folder


def small_run(target: Path, rows: int = 17) -> RunConfig:
    """A draft for a saved target on synthetic rows: two epochs of four steps."""
    config: ConfigDict = demo.get_config("tiny")
    del config.pretraining, config.data.corpus
    config.target, config.accept_seq_len = str(target), 0
    config.data.synthetic_rows = rows
    config.stages.short.update(seq_len=16, batch=4, steps=0, epochs=2, accumulation=2, max_offset=9)
    del config.stages["long"]
    return from_config(config.to_dict())


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a SIGTERM when a step's metrics are written."""
    write = Metrics.write

    def writing(self: Metrics, stage: str, at: int, values: dict[str, float]) -> None:
        write(self, stage, at, values)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Metrics, "write", writing)


def test_an_interrupted_run_resumes_exactly(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(target_folder)
    pipeline.train(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        with pytest.raises(loop.Interrupted, match="stage draft_short"):
            pipeline.train(config, tmp_path / "halved")
    assert not (tmp_path / "halved" / "draft").exists()
    pipeline.train(config, tmp_path / "halved")

    weights = [tmp_path / name / "draft" / "model.safetensors" for name in ("straight", "halved")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    losses = [
        [record["loss"] for record in records(tmp_path / name) if "loss" in record]
        for name in ("straight", "halved")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_data_are_refused_on_resume(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        with pytest.raises(loop.Interrupted):
            pipeline.train(small_run(target_folder), tmp_path)
    config = small_run(target_folder, rows=40)
    with pytest.raises(ValueError, match="data or batch changed"):
        pipeline.train(config, tmp_path)
