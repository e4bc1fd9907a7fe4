"""The training command with the kind ``dflash``, end to end at toy scale."""

from pathlib import Path

import pytest

from longspec_jax import LongSpec
from tests.train.drafts.eagle3.test_run import conversations
from tests.train.tiny import ROOT, command, flip_a_bit, interrupt_at, records, save_tiny_target
from train.checkpoint import _named
from train.loop import TRY_AGAIN


def test_a_run_resumes_exactly_behind_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, and a bit of its newest checkpoint flipped: it learns the same bits all the same."""
    target = save_tiny_target(tmp_path / "target")
    files = conversations(tmp_path / "chats.jsonl", 34)
    given = [
        f"--config={ROOT}/configs/vicuna7b.py:dflash",
        f"--config.target={target}",
        f"--config.data.files={files}",
        *("--config.data.answer_room=16", "--config.data.buckets=1"),
        *("--config.draft.features=-1", "--config.draft.layers=2", "--config.draft.block=4"),
        *("--config.stages.chat.seq_len=40", "--config.stages.chat.batch=8"),
        *("--config.stages.chat.accumulation=2", "--config.stages.chat.epochs=2"),
        *("--config.accept_rows=2", "--config.save_every=2", "--config.accept_every=0"),
        *("--config.dtype=float32", "--config.mesh.fsdp=2"),
    ]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert command(*given, f"--workdir={straight}") == 2
    assert "numbers of layers with commas between" in capsys.readouterr().err
    given.append("--config.draft.features=0")
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
    assert len(learned[0]) == 8
    last = records(straight)[-1]
    assert 1 <= last["tau_chain"] <= 4 and "agree_top4_shift3" in last
    assert "`draft/`: the draft, of the kind dflash" in (straight / "README.md").read_text()

    # The text is the target's own.
    with pytest.warns(UserWarning, match="made for 40 positions"):
        model = LongSpec.from_pretrained(target, straight / "draft", dtype="float32")
    for temperature in (0.0, 1.0):
        compared = model.compare(
            "the draft proposes", tree="2,2", max_new_tokens=12, temperature=temperature
        )
        assert compared.identical
