"""The training command with the kind ``eagle3``, end to end at toy scale."""

import json
from pathlib import Path

import numpy as np
import pytest

from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.eagle3.load import Eagle3Options, load
from longspec_jax.weights.hf import load_target
from tests.train.tiny import ROOT, command, flip_a_bit, interrupt_at, records, save_tiny_target
from train.checkpoint import _named
from train.loop import TRY_AGAIN

WORDS = "the draft proposes a tree of tokens and the target checks it in one pass".split()


def conversations(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)

    def turn(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choice(WORDS, rng.integers(3, most)))}

    rows = ({"messages": [turn("user", 9), turn("assistant", 20)]} for _ in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_resumes_exactly_behind_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, and a bit of its newest checkpoint flipped: it learns the same bits all the same."""
    target = save_tiny_target(tmp_path / "target")
    files = conversations(tmp_path / "chats.jsonl", 34)
    given = [
        f"--config={ROOT}/configs/vicuna7b.py:eagle3",
        f"--config.target={target}",
        f"--config.data.files={files}",
        "--config.data.answer_room=16",
        "--config.data.buckets=1",
        *("--config.draft.layers=0", "--config.draft.vocabulary=64", "--config.draft.steps=2"),
        *("--config.stages.chat.seq_len=40", "--config.stages.chat.batch=8"),
        "--config.stages.chat.accumulation=2",
        *("--config.accept_rows=2", "--config.save_every=2", "--config.accept_every=0"),
        *("--config.dtype=float32", "--config.mesh.fsdp=2"),
    ]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert command(*given, f"--workdir={straight}") == 0
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        assert command(*given, f"--workdir={halved}") == TRY_AGAIN
    newest = _named(halved / "checkpoints" / "draft_chat")[-1]
    largest = max(newest.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    flip_a_bit(largest)
    capsys.readouterr()
    assert command(*given, f"--workdir={halved}") == 0
    assert f"checkpoint {newest} is skipped" in capsys.readouterr().err

    weights = [(each / "draft" / "model.safetensors").read_bytes() for each in (straight, halved)]
    assert weights[0] == weights[1]
    learned = [[r for r in records(each) if "loss" in r] for each in (straight, halved)]
    assert [r["loss"] for r in learned[0]] == [r["loss"] for r in learned[1]]
    assert len(learned[0]) == 8 and all(0 < r["in_vocabulary"] <= 1 for r in learned[0])
    last = records(straight)[-1]
    assert 1 <= last["tau_chain"] <= 3 and "agree_top4_shift2" in last
    config, params = load_target(target)
    draft = load(straight / "draft", Target(config, params), Eagle3Options(window=20))
    assert draft.config.proposable == 64 and draft.config.features == (0,)
    assert "`draft/`: the draft, of the kind eagle3" in (straight / "README.md").read_text()
