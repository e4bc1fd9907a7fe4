"""Ranges of context lengths that tables and charts put samples into."""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PAPER_EDGES = (0, 5_000, 10_000, 15_000, 20_000, 25_000, 32_000)
"""Of the LongSpec paper's Table 4."""
FURTHER = (64_000, 128_000, 256_000, 512_000, 1_024_000)
"""Beyond it."""
EDGES = (*PAPER_EDGES, *FURTHER)


@dataclass(frozen=True)
class Bin:
    """A range of tokens, the end excluded."""

    start: int
    stop: int

    def __contains__(self, tokens: int) -> bool:
        """Whether a length lies in it."""
        return self.start <= tokens < self.stop

    @property
    def name(self) -> str:
        """As the paper writes it: ``5k–10k``."""
        return f"{_short(self.start)}–{_short(self.stop)}"


def occupied(lengths: Iterable[int], edges: Sequence[int] = EDGES) -> list[Bin]:
    """The ranges between edges that hold a length; the last reaches as far as it must.

    Args:
      lengths: in tokens.
      edges: ascending, from 0.
    """
    ascending = sorted(set(lengths))
    longest = ascending[-1] if ascending else 0
    if longest >= edges[-1]:
        edges = (*edges, longest + 1)
    bins = itertools.starmap(Bin, itertools.pairwise(edges))
    return [
        each
        for each in bins
        if bisect.bisect_left(ascending, each.start) < bisect.bisect_left(ascending, each.stop)
    ]


def _short(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens and tokens % 1000 == 0 else str(tokens)


def nominal(tokens: int) -> int:
    """The power of two a length is nearest to, as SpecExtend's tables name inputs (1K, 2K, ...)."""
    low = 1 << max(tokens.bit_length() - 1, 0)
    return low if tokens * tokens < 2 * low * low else 2 * low
