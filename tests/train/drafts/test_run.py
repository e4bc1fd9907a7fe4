"""The training command with every kind of draft but the usual one, end to end at toy scale."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspec_jax import LongSpec
from longspec_jax.drafters.checkpoints import eagle3
from longspec_jax.drafters.draft import Target
from longspec_jax.weights.hf import load_target
from tests.drafters.eagle3.toys import config_for, random_params
from tests.train.tiny import (
    ROOT,
    assert_learns_of_stored_features,
    assert_same_run,
    command,
    conversations,
    flip_a_bit,
    interrupted,
    records,
)
from train.checkpoint import _named


@dataclass(frozen=True)
class Case:
    """A kind of draft, and what its run shows."""

    options: tuple[str, ...]
    """Its shape, without ``--config.draft.``."""
    shifts: int
    """Distances at which acceptance is measured."""
    reported: str = ""
    """A metric of its own, a share; empty for none."""
    warning: str = ""
    """Of its drafter, about the target's range; empty for none."""
    stages: tuple[str, ...] = ("chat",)
    """The ones before the last take a step."""
    stores: bool = False
    """Whether what it reads of the target may be stored."""


SHORT = "made for 40 positions"
CASES = {
    "eagle3": Case(
        ("layers=0", "vocabulary=64", "steps=2"), 2, "in_vocabulary", SHORT, stores=True
    ),
    "dflash": Case(
        ("features=0", "layers=2", "block=4", "causal=true", "distillation=0.5"),
        3,
        "divergence",
        SHORT,
        stores=True,
    ),
    "small_lm": Case(
        ("layers=1", "width=16", "mlp_width=24", "heads=2", "kv_heads=2"),
        3,
        "divergence",
        stages=("text", "chat"),
    ),
    "parallel": Case(
        ("layers=1", "window=7", "block=4", "markov_rank=8"), 4, stages=("short", "long", "sft")
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", CASES)
def test_a_run_resumes_exactly_behind_a_damaged_checkpoint(
    kind: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped, and a bit of its newest checkpoint flipped: it learns the same bits all the same."""
    case = CASES[kind]
    files = conversations(tmp_path / "chats.jsonl", 34)
    *earlier, last = case.stages
    of_stages = [f"stages.{each}.data" for each in case.stages] if earlier else ["data"]
    given = [
        f"--config={ROOT}/configs/vicuna7b.py:{kind}",
        f"--config.target={target}",
        *(f"--config.{section}.files={files}" for section in of_stages),
        *(f"--config.{of_stages[-1]}.{each}" for each in ("answer_room=16", "buckets=1")),
        *(f"--config.draft.{each}" for each in case.options),
        *(
            f"--config.stages.{last}.{each}"
            for each in ("seq_len=40", "batch=8", "accumulation=2", "epochs=2")
        ),
        *(
            f"--config.stages.{stage}.{each}"
            for stage in earlier
            for each in ("seq_len=32", "batch=4", "accumulation=2", "steps=1", "epochs=0")
        ),
        *("--config.accept_rows=2", "--config.save_every=2", "--config.accept_every=0"),
        *("--config.dtype=float32", "--config.mesh.fsdp=2"),
        *(["--config.stages.short.max_offset=40"] if "short" in earlier else ()),
    ]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert command(*given, f"--workdir={straight}") == 0
    interrupted(4, monkeypatch, *given, f"--workdir={halved}")
    newest = _named(halved / "checkpoints" / f"draft_{last}")[-1]
    largest = max(newest.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    flip_a_bit(largest)
    capsys.readouterr()
    assert command(*given, f"--workdir={halved}") == 0
    assert f"checkpoint {newest} is skipped" in capsys.readouterr().err

    assert len(assert_same_run(straight, halved)) == 8 + len(earlier)
    if case.stores:
        assert_learns_of_stored_features(straight, given, tmp_path, monkeypatch)
    if case.reported:
        assert all(r[case.reported] > 0 for r in records(straight) if "loss" in r)
    last = records(straight)[-1]
    assert 1 <= last["tau_chain"] <= 1 + case.shifts
    assert f"agree_top4_shift{case.shifts}" in last

    # Its drafter loads it, and the text is the target's own.
    options = {"context": 40} if kind == "small_lm" else {}
    with nullcontext() if not case.warning else pytest.warns(UserWarning, match=case.warning):
        model = LongSpec.from_pretrained(
            target, straight / "draft", dtype="float32", draft_options=options
        )
    compared = model.compare(
        ["the draft proposes"] * 2, tree="2,2", max_new_tokens=12, temperature=[0.0, 1.0]
    )
    assert compared.identical


def test_an_eagle3_draft_that_learns_answers_keeps_its_tables(target: Path, tmp_path: Path) -> None:
    """Its tokens and layers are those of its folder, not those that a fresh draft would have."""
    given, text = Target(*load_target(target)), tmp_path / "text"
    config = config_for(given.config, proposable=64, features=(0, -1, 0))
    known = np.arange(230, 294)  # Few of them occur in the answers.
    own = random_params(config, known)
    eagle3.save_draft(text, config, replace(own, stores_embedding=False))
    options = (
        f"target={target}", f"data.files={conversations(tmp_path / 'answers.jsonl', 34)}",
        f"draft.init={text}", "draft.steps=2", "stages.answers.seq_len=40", "dtype=float32",
        "stages.answers.batch=8", "stages.answers.steps=2", "stages.answers.max_seconds=0",
        "accept_rows=2",
    )  # fmt: skip
    named = f"--config={ROOT}/configs/smollm2.py:eagle3_answers", f"--workdir={tmp_path}"
    assert command(*named, *(f"--config.{each}" for each in options)) == 0
    after = eagle3.load(tmp_path / "draft", given)
    assert after.config == config
    np.testing.assert_array_equal(after.params.vocabulary, known)
    assert np.any(after.params.head != own.head)


def test_layers_that_are_no_numbers_are_refused(tmp_path: Path, refused: Any) -> None:
    given = f"--config={ROOT}/configs/vicuna7b.py:dflash", f"--workdir={tmp_path / 'x'}"
    said = refused(*given, "--config.draft.features=-1")
    assert "numbers of layers with commas between" in said
