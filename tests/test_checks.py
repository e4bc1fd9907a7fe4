"""Sizes have one unit wherever they are shown."""

import pytest

from longspec_jax.checks import shown_bytes


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0.0 MB"),
        (75_497_472, "75.5 MB"),
        (999_900_000, "999.9 MB"),
        (10**9, "1.00 GB"),
        (16_060_000_000, "16.06 GB"),
    ],
)
def test_sizes(count: int, words: str) -> None:
    assert shown_bytes(count) == words
