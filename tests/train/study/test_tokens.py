"""Held-out rows and their copies, against what is written out by hand."""

from pathlib import Path

import numpy as np
import pytest

from train.study.tokens import copy_distance, cut, held_out_rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "heldout.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    return path


def test_rows_are_spread_over_the_file_and_begin_as_prompts_do(file: Path) -> None:
    rows = held_out_rows(file, 5, 3, begin=999)
    assert rows[:, 0].tolist() == [999] * 3
    assert rows[:, 1].tolist() == [0, 32, 64]  # 25 rows of 4 tokens: the 1st, 9th and 17th.
    assert np.all(np.diff(rows[:, 1:]) == 1)


def test_a_file_with_fewer_rows_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="gives 2 rows of 40 tokens, 3 are asked for"):
        held_out_rows(file, 40, 3, begin=None)


def test_a_cut_keeps_the_last_tokens_and_the_beginning() -> None:
    rows = np.arange(20).reshape(2, 10)
    assert cut(rows, 4, begin=99).tolist() == [[99, 7, 8, 9], [99, 17, 18, 19]]
    assert cut(rows, 4, begin=None).tolist() == [[6, 7, 8, 9], [16, 17, 18, 19]]
    assert rows[0, 6] == 6  # The rows themselves stay what they are.


def test_a_token_is_a_copy_where_it_and_those_before_it_stood_earlier() -> None:
    row = np.array([1, 2, 3, 9, 1, 2, 3, 8, 2, 3, 1, 2, 3, 4])
    found = copy_distance(row, run=3)
    #                        1  2  3  9  1  2  3  8  2  3  1  2  3  4
    assert found.tolist() == [0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 6, 0]


def test_the_nearest_copy_counts_and_runs_may_overlap() -> None:
    assert copy_distance(np.full(6, 7), run=2).tolist() == [0, 0, 1, 1, 1, 1]
