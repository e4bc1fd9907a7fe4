"""Sizes have one unit wherever they are shown."""

from longspec_jax.checks import shown_bytes
from tests.kit import each_row


@each_row(
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
