"""A tiny Llama checkpoint with a tokenizer, documents, and the training command in-process."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.vicuna7b import get_config
from longspec_jax.weights.hf import save_target
from tests.kit import tiny_target_config
from train import features, prepare, run
from train.arguments import from_config
from train.config import RunConfig
from train.data.rows import Row, full_row
from train.data.source import Source
from train.data.tokens import train_tokenizer
from train.loop import TRY_AGAIN
from train.metrics import Metrics
from train.target import TargetObjective, run_target

ROOT = Path(__file__).parents[2]
WORDS = "the draft proposes a tree of tokens and the target checks it in one pass".split()


@dataclass(frozen=True)
class SyntheticRows:
    """Random tokens, full rows."""

    count: int
    seq_len: int
    vocab_size: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        tokens = np.random.default_rng(index).integers(0, self.vocab_size, self.seq_len)
        return full_row(tokens.astype(np.int32))

    def lengths(self) -> np.ndarray:
        return np.full(len(self), self.seq_len)


def save_tiny_target(folder: Path, **shape: Any) -> Path:
    """A one-layer target in Hugging Face format, its tokenizer next to it."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 9, 300)
    sizes: dict[str, Any] = dict(
        vocab_size=304, model_width=32, mlp_width=40, num_layers=1, num_heads=4, head_width=8,
        max_positions=96,
    )  # fmt: skip
    config = tiny_target_config(**{**sizes, **shape})
    params = jax.jit(TargetObjective(config, 16).initialize)(jax.random.key(0))
    save_target(folder, config, params, stop_tokens=(tokenizer.eos_token_id,))
    tokenizer.save_pretrained(folder)
    return folder


def write_documents(path: Path, count: int) -> Path:
    """Documents of two formats and of many lengths, one a line."""
    rng = np.random.default_rng(0)
    lines = []
    for index in range(count):
        text = " ".join(rng.choice(WORDS, rng.integers(3, 25)))
        row = {"problem": text, "qwq": text[::-1]} if index % 3 == 0 else {"target": text}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


def conversations(path: Path, count: int) -> Path:
    """Conversations of two turns, one a line."""
    rng = np.random.default_rng(0)

    def turn(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choice(WORDS, rng.integers(3, most)))}

    rows = ({"messages": [turn("user", 9), turn("assistant", 20)]} for _ in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_of(accept_rows: int = 3, seq_len: int = 24, **data: Any) -> RunConfig:
    """Vicuna's short stage with rows and batches of a toy, and these fields of its data."""
    config = get_config("short")
    config.data.update(**data)
    config.accept_rows = accept_rows
    config.stages.short.update(seq_len=seq_len, batch=4, accumulation=1)
    return from_config(config.to_dict())


def source_of(config: RunConfig, target: Path, workdir: Path) -> Source:
    """The data of a run whose target has 304 tokens."""
    workdir.mkdir(exist_ok=True)
    return Source(config, workdir, str(target), 304)


def arguments(target: Path, files: Path, workdir: Path, variant: str = "short") -> list[str]:
    """Vicuna's configuration, shrunk to rows and batches of a toy."""
    small = dict(batch=8, seq_len=40, accumulation=2)
    return [
        f"--config={ROOT}/configs/vicuna7b.py:{variant}",
        f"--config.target={target}",
        f"--config.data.files={files}",
        *(f"--config.stages.{variant}.{name}={value}" for name, value in small.items()),
        "--config.data.answer_room=16",
        "--config.accept_rows=2",
        "--config.draft.window=7",
        "--config.dtype=float32",
        "--config.mesh.fsdp=2",
        f"--workdir={workdir}",
    ]


def command(*given: str) -> int:
    """``python -m train.run`` in this process; the exit status."""
    return run.main(given)


def records(workdir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def interrupted(at: int, patch: pytest.MonkeyPatch, *given: str) -> None:
    """The training command, sent a SIGTERM when a step's metrics are written."""
    write = Metrics.write

    def writing(self: Metrics, stage: str, step: int, values: dict[str, float]) -> None:
        write(self, stage, step, values)
        if step == at and "loss" in values:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch.context() as here:
        here.setattr(Metrics, "write", writing)
        assert command(*given) == TRY_AGAIN


def assert_same_run(one: Path, other: Path) -> list[float]:
    """Two runs learned the same bits; their losses."""
    weights = [(each / "draft" / "model.safetensors").read_bytes() for each in (one, other)]
    assert weights[0] == weights[1]
    steps = [[r for r in records(each) if "loss" in r] for each in (one, other)]
    losses, norms = ([[r[name] for r in run] for run in steps] for name in ("loss", "grad_norm"))
    assert losses[0] == losses[1] and norms[0] == norms[1]
    return losses[0]


def assert_learns_of_stored_features(
    online: Path, run: list[str], folder: Path, patch: pytest.MonkeyPatch
) -> None:
    """A run learns the same bits of what is stored as it did next to the target's forward."""
    stored = [*run, f"--config.features.folder={folder / 'features'}"]
    workdir = f"--workdir={folder / 'stored'}"
    with patch.context() as here:
        here.setattr(features, "SHARD", 20_000)
        assert prepare.main([*stored, workdir]) == 0
        assert len([*folder.glob("features/*/*.bin")]) > 1
        # No step traces the target; measurements of held-out rows do.
        here.setattr("train.views.run_target", _only_measures)
        assert command(*stored, workdir) == 0
    assert len(assert_same_run(online, folder / "stored")) == 8


def _only_measures(config: Any, params: Any, tokens: Any, *args: Any) -> Any:
    assert len(tokens) == 2, "a step of 4 rows ran the target"
    return run_target(config, params, tokens, *args)


def flip_a_bit(file: Path) -> None:
    """Damage a file in its middle, in place."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
