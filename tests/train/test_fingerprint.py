"""What makes data and runs the same."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import demo, vicuna7b
from tests.kit import each_row
from tests.train.tiny import run_of, write_documents
from train import fingerprint
from train.arguments import from_config
from train.config import RunConfig
from train.data.source import Source
from train.fingerprint import check_same_run, model_digest


def of(target: Path, files: str, workdir: Path = Path("absent"), **options: Any) -> str:
    return Source(run_of(files=files, **options), workdir, str(target), 304).fingerprint()


def test_moved_data_are_the_same_and_changed_data_are_not(target: Path, tmp_path: Path) -> None:
    first = write_documents(tmp_path / "a.jsonl", 5)
    second = write_documents(tmp_path / "b.jsonl", 7)
    before = of(target, f"{first},{second}")
    assert len(before) == 16 and int(before, 16)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (first, second):
        shutil.copy(file, moved)
    assert of(target, f"{moved}/*.jsonl", tmp_path) == before
    assert of(target, f"{second},{first}") != before
    text = first.read_text()
    for changed in (text + "\n", text.replace("a", "b", 1)):
        (moved / "a.jsonl").write_text(changed)
        assert of(target, f"{moved}/*.jsonl") != before


def test_options_and_the_tokenizer_count(target: Path, tmp_path: Path) -> None:
    files = str(write_documents(tmp_path / "a.jsonl", 5))
    seen = {
        of(target, files),
        of(target, files, pack=True),
        of(target, files, mask_prompts=True, answer_room=16),
        of(target, files, turn="{role}: {content}"),
        of(target, files, answer_room=7),
    }
    assert len(seen) == 5 and of(target, files, max_bad_rows=3) in seen
    other = Path(shutil.copytree(target, tmp_path / "other"))
    assert of(other, files) in seen
    weights = other / "model.safetensors"
    os.utime(weights)
    assert of(other, files) in seen
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"id": 2', '"id": 3', 1))
    assert of(other, files) not in seen


def test_every_byte_of_a_small_file_counts_and_the_ends_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "BLOCK", 3)
    monkeypatch.setattr(fingerprint, "BLOCKS", 4)

    def changed(size: int) -> set[int]:
        """Places where another byte gives another digest."""
        data = bytes(size)
        (tmp_path / "x").write_bytes(data)
        before = fingerprint.content_digest(tmp_path / "x")
        found = set()
        for index in range(size):
            (tmp_path / "x").write_bytes(data[:index] + b"1" + data[index + 1 :])
            if fingerprint.content_digest(tmp_path / "x") != before:
                found.add(index)
        return found

    for size in range(13):
        assert changed(size) == set(range(size)), size
    large = changed(40)
    assert len(large) == 12 and {0, 1, 2, 37, 38, 39} <= large


def run_with(**changes: Any) -> RunConfig:
    config = vicuna7b.get_config("short")
    for path, value in changes.items():
        node = config
        *parents, last = path.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    return from_config(config.to_dict())


def settings(**changes: Any) -> dict[str, Any]:
    run = run_with(**changes)
    return run.identity(run.stages[0])


@each_row(
    ("field", "value"),
    [
        ("seed", 7),
        ("dtype", "float32"),
        ("optimizer__clip", 2.0),
        ("draft__max_shift", 2),
        ("data__answer_room", 8),
        ("stages__short__learning_rate", 0.1),
        ("stages__short__seq_len", 2048),
        ("stages__short__epochs", 2),
    ],
)
def test_what_changes_training_is_named_as_it_is_typed(field: str, value: Any) -> None:
    before, after = settings(), settings(**{field: value})
    name = f"--config.{field.replace('__', '.')}"
    assert [key for key in before if before[key] != after[key]] == [name]
    saved = json.loads(json.dumps(before))
    with pytest.raises(ValueError, match=f"{name}={value} [(]was {before[name]}[)]; restore"):
        check_same_run(saved, after, Path("checkpoints/short/4"))
    check_same_run(saved, before, Path())


@each_row(
    ("field", "value"),
    [
        ("mesh__tp", 2),
        ("loss_chunk", 64),
        ("mlp_chunk", 64),
        ("save_every", 1),
        ("log_every", 5),
        ("log__wandb", "drafts"),
        ("max_to_keep", 9),
        ("export", "x"),
        ("data__files", "elsewhere.jsonl"),
        ("draft__init", "elsewhere"),
        ("target", "elsewhere"),
        ("stages__short__accumulation", 32),
    ],
)
def test_where_things_lie_and_how_work_is_cut_is_free(field: str, value: Any) -> None:
    assert settings(**{field: value}) == settings()


def test_a_target_that_is_trained_counts_its_shape_and_no_draft() -> None:
    run = from_config(demo.get_config("tiny").to_dict())
    assert run.pretraining is not None
    stage, shape = run.pretraining.stages[0], run.pretraining.shape
    before = run.identity(stage, shape)
    other = dataclasses.replace(run, draft=dataclasses.replace(run.draft, window=3))
    assert before == other.identity(stage, shape)
    after = run.identity(stage, dataclasses.replace(shape, num_layers=7))
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["--config.pretraining.shape.num_layers"]
    assert "--config.pretraining.stages.short.learning_rate" in before


def test_a_model_is_what_its_files_hold(tmp_path: Path) -> None:
    def model(name: str, value: float, width: int = 3) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"width": width}))
        save_file({"w": np.full(5, value, np.float32)}, folder / "model.safetensors")
        return model_digest(folder)

    first = model("first", 1.0)
    assert first == model("copy", 1.0)
    assert len({first, model("weights", 2.0), model("width", 1.0, width=4)}) == 3
