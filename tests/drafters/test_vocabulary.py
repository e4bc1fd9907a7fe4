"""Reduced vocabularies: which tokens they hold, their table on disk, and what is refused."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from longspec_jax.drafters import vocabulary
from longspec_jax.drafters.base import Committed
from longspec_jax.drafters.checkpoints.vocabulary import (
    FILE,
    load_draft_vocabulary,
    save_draft_vocabulary,
)
from longspec_jax.drafters.vocabulary import (
    OwnTokens,
    check_vocabulary,
    first_merged,
    most_frequent,
)
from tests.kit import each_row
from train.data.tokens import train_tokenizer

COUNTS = np.array([0, 5, 0, 9, 5, 2, 0])


def test_kept_tokens_then_the_most_frequent() -> None:
    assert most_frequent(COUNTS).tolist() == [3, 1, 4, 5, 0, 2, 6]
    assert most_frequent(COUNTS, 3).tolist() == [3, 1, 4]
    assert most_frequent(COUNTS, 4, always=[6, 1, 6]).tolist() == [1, 6, 3, 4]
    assert most_frequent(COUNTS).dtype == np.int32


def test_a_shorter_vocabulary_is_the_beginning_of_a_longer_one() -> None:
    counts = np.random.default_rng(0).integers(0, 4, 101)
    whole = most_frequent(counts, always=[7, 50])
    assert sorted(whole.tolist()) == list(range(101))
    for size in (2, 3, 59, 101):
        np.testing.assert_array_equal(most_frequent(counts, size, [7, 50]), whole[:size])


@each_row("size, always", [(0, []), (8, []), (2, [0, 1, 2]), (-1, [])])
def test_sizes_out_of_range(size: int, always: list[int]) -> None:
    with pytest.raises(ValueError, match=f"of {size} tokens is out of range"):
        most_frequent(COUNTS, size, always)


BAD = {
    "negative": ([1, -2], "token -2, outside the target's 7 tokens"),
    "too large": ([7], "token 7, outside the target's 7 tokens"),
    "twice": ([3, 1, 3, 3], "token 3 3 times"),
    "empty": ([], "list of token ids, got shape \\(0,\\)"),
    "nested": ([[1], [2]], "list of token ids, got shape \\(2, 1\\)"),
    "real": ([1.0, 2.0], "of float64"),
}


@each_row("case", BAD)
def test_what_is_no_vocabulary(case: str) -> None:
    tokens, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        check_vocabulary(tokens, 7)
    with pytest.raises(ValueError, match="outside"):
        most_frequent(COUNTS, always=[7])


TOKENS = np.array([5, 0, 12, 3])


def test_a_table_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "draft" / FILE
    assert save_draft_vocabulary(tmp_path / "draft", TOKENS, 13) == file
    (tmp_path / "any").touch()
    assert file.stat().st_mode == (tmp_path / "any").stat().st_mode, "others may read it, too"
    for size in (1, 3, 4):
        found = load_draft_vocabulary(tmp_path / "draft", 13, size)
        np.testing.assert_array_equal(found, TOKENS[:size])
        assert found.dtype == np.int32


def test_it_is_checked_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token 12, outside the target's 12 tokens"):
        save_draft_vocabulary(tmp_path, TOKENS, 12)
    assert not any(tmp_path.iterdir())


@each_row("size", [0, 5])
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


@each_row("case", DAMAGED)
def test_damaged_tables_name_their_file(tmp_path: Path, case: str) -> None:
    DAMAGED[case](tmp_path / FILE)
    with pytest.raises(ValueError, match=FILE):
        load_draft_vocabulary(tmp_path, 13, 2)


def test_tokens_that_a_tokenizer_merged_first_need_no_corpus() -> None:
    """Beside its bytes and special tokens, whose ids may be the highest."""
    tokenizer = train_tokenizer(["the cat sat on the mat", "the dog sat"] * 3, 270)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<late>"]})
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    merged = [model["vocab"]["".join(pair)] for pair in model["merges"]]
    others = set(range(len(tokenizer))) - set(merged)
    assert tokenizer.convert_tokens_to_ids("<late>") in others and len(merged) > 4
    assert first_merged(tokenizer, 2 * len(others)) is None, "more than it has"
    assert first_merged(tokenizer, len(others) + 4) is None, "most of them were not merged"
    assert first_merged(object(), 4) is None, "nothing is known of merges"


def test_first_merges_win() -> None:
    """In the order of merges, whatever their ids; forms of files with one text a merge, too."""

    class Backend:
        def __init__(self, merges: list) -> None:
            self.merges = merges

        def to_str(self) -> str:
            vocab = {"a": 0, "b": 1, "abab": 2, "ab": 3, "ba": 4, "bab": 5}
            return json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": self.merges}})

    class Tokenizer:
        def __init__(self, merges: list) -> None:
            self.backend_tokenizer = Backend(merges)

        def __len__(self) -> int:
            return 6

    pairs = [["a", "b"], ["b", "a"], ["b", "ab"], ["ab", "ab"], ["ba", "b"]]
    for merges in (pairs, [" ".join(pair) for pair in pairs]):
        found = [first_merged(Tokenizer(merges), size) for size in (5, 4)]
        assert [tokens is not None and tokens.tolist() for tokens in found] == [
            [0, 1, 3, 4, 5],
            [0, 1, 3, 4],
        ]


def test_own_tokens_are_a_ring_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not listed, the latest, each once; what is after the count is nobody's."""
    monkeypatch.setattr(vocabulary, "OWN_TOKENS", 4)
    listed = jnp.arange(20) < 10
    own = OwnTokens.begin(2)
    assert not own.distinct().any()

    def said(tokens: list[list[int]], counts: list[int]) -> Committed:
        return Committed(jnp.asarray(tokens), jnp.zeros(2, jnp.int32), jnp.asarray(counts))

    def held(own: OwnTokens) -> list[set[int]]:
        rows = zip(np.asarray(own.tokens), np.asarray(own.distinct()), strict=True)
        found = [tokens[there].tolist() for tokens, there in rows]
        assert all(len(row) == len({*row}) for row in found)
        return [{*row} for row in found]

    own = own.extended(said([[3, 12, 4, 12], [11, 19, 19, 5]], [4, 2]), listed)
    assert held(own) == [{12}, {11, 19}]
    own = own.extended(said([[13, 14, 1, 2], [17, 17, 18, 9]], [3, 0]), listed)
    assert held(own) == [{12, 13, 14}, {11, 19}]
    own = own.extended(said([[10, 11, 12, 13, 14, 15], [16, 1, 1, 1, 1, 1]], [6, 1]), listed)
    assert held(own) == [{12, 13, 14, 15}, {11, 16, 19}]
