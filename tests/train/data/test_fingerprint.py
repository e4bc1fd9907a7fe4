"""What the fingerprint of the data sees: content and options, never places."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.vicuna7b import get_config
from tests.train.tiny import save_tiny_target, write_documents
from train.config import from_config
from train.data import fingerprint
from train.data.rows import Source


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def of(target: Path, files: str, workdir: Path = Path("absent"), **options: Any) -> str:
    config = get_config("short")
    config.data.update(files=files, **options)
    return Source(from_config(config.to_dict()), workdir, str(target), 304).fingerprint()


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


def test_chance_needs_no_files(target: Path) -> None:
    chance = {"files": "", "hub": "", "synthetic_rows": 9}
    assert of(Path("absent"), **chance) == of(target, **chance)
    assert of(target, **{**chance, "synthetic_rows": 8}) != of(target, **chance)


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
