"""The table beside a draft's weights: there and back, and refused where it does not fit."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from longspec_jax.drafters.vocabulary import (
    FILE,
    load_draft_vocabulary,
    save_draft_vocabulary,
)

TOKENS = np.array([5, 0, 12, 3])


def test_round_trip(tmp_path: Path) -> None:
    assert save_draft_vocabulary(tmp_path / "draft", TOKENS, 13) == tmp_path / "draft" / FILE
    for size in (1, 3, 4):
        found = load_draft_vocabulary(tmp_path / "draft", 13, size)
        np.testing.assert_array_equal(found, TOKENS[:size])
        assert found.dtype == np.int32


def test_it_is_checked_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token 12, outside the target's 12 tokens"):
        save_draft_vocabulary(tmp_path, TOKENS, 12)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 5])
def test_a_size_the_table_does_not_have(tmp_path: Path, size: int) -> None:
    save_draft_vocabulary(tmp_path, TOKENS, 13)
    with pytest.raises(ValueError, match=f"vocabulary={size} must be 1 to 4"):
        load_draft_vocabulary(tmp_path, 13, size)


def test_another_targets_table(tmp_path: Path) -> None:
    save_draft_vocabulary(tmp_path, TOKENS, 13)
    with pytest.raises(ValueError, match="a vocabulary of 13 tokens, the target has 17"):
        load_draft_vocabulary(tmp_path, 17, 2)


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="comes without .*train.vocabulary --help"):
        load_draft_vocabulary(tmp_path, 13, 2)


DAMAGED = {
    "no safetensors": lambda file: file.write_bytes(b"version https://git-lfs"),
    "other tensor": lambda file: save_file({"d2t": TOKENS}, file, {"vocab_size": "13"}),
    "no vocabulary size": lambda file: save_file({"tokens": TOKENS}, file),
    "out of range": lambda file: save_file({"tokens": TOKENS + 9}, file, {"vocab_size": "13"}),
    "twice": lambda file: save_file({"tokens": TOKENS // 4}, file, {"vocab_size": "13"}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tables_name_their_file(tmp_path: Path, case: str) -> None:
    DAMAGED[case](tmp_path / FILE)
    with pytest.raises(ValueError, match=FILE):
        load_draft_vocabulary(tmp_path, 13, 2)
