"""Which tokens a reduced draft vocabulary holds, and what it refuses."""

import numpy as np
import pytest

from longspec_jax.drafters.vocabulary import check_vocabulary, most_frequent

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


@pytest.mark.parametrize("size, always", [(0, []), (8, []), (2, [0, 1, 2]), (-1, [])])
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


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_vocabulary(case: str) -> None:
    tokens, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        check_vocabulary(tokens, 7)
    with pytest.raises(ValueError, match="outside"):
        most_frequent(COUNTS, always=[7])
