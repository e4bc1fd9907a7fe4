"""How far figures may be chance: bootstrap intervals over samples, paired where methods share them.

What is drawn anew is the sample, a prompt with everything that was measured on it: rounds of one
text resemble each other, so that drawing rounds would make intervals too narrow. Every figure is a
ratio of sums (tokens by seconds, tokens by passes) or made of two, and stays one in every draw.

Percentiles of the drawn figures are too narrow for few samples. They are taken further out, as far
as Student's t is wider than the normal distribution ("expanded percentile": Hesterberg, *What
Teachers Should Know About the Bootstrap*, The American Statistician 69, 2015, section 5.3).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, stdtrit

LEVEL = 0.95
"""Share of the draws that an interval holds."""
DRAWS = 4000
"""How often the samples are drawn anew."""
FEWEST = 4
"""Samples below which there is no interval: fewer have next to no different draws."""
SEED = 13
"""Of the draws, so that a report says the same each time it is written."""
_CELLS = 4_000_000
"""Counts that are held at once, so that thousands of samples fit in memory."""


class Fraction(NamedTuple):
    """What one sample gives to a ratio of sums."""

    above: float
    below: float


@dataclass(frozen=True)
class Estimate:
    """A figure of some samples."""

    value: float
    low: float | None
    """Lower end of its interval; None where the samples are too few."""
    high: float | None
    samples: int
    """How many it is of."""

    def excludes(self, value: float) -> bool:
        """Whether there is an interval, and a value lies outside of it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def ratio(parts: Sequence[Fraction]) -> Estimate | None:
    """The sum of what is above by the sum of what is below; None where that is nothing.

    Args:
      parts: one a sample.
    """
    return _estimate([*parts], lambda sums: sums[0] / sums[1])


def ratio_of_ratios(pairs: Sequence[tuple[Fraction, Fraction]]) -> Estimate | None:
    """The first of two ratios by the second, of the same samples; None where one has no value.

    Args:
      pairs: what a sample gives to the first ratio and to the second.
    """
    rows = [(*first, *second) for first, second in pairs]
    return _estimate(rows, lambda sums: sums[0] / sums[1] / (sums[2] / sums[3]))


def difference_of_ratios(pairs: Sequence[tuple[Fraction, Fraction]]) -> Estimate | None:
    """The first of two ratios minus the second, of the same samples; None where one has no value.

    Args:
      pairs: what a sample gives to the first ratio and to the second.
    """
    rows = [(*first, *second) for first, second in pairs]
    return _estimate(rows, lambda sums: sums[0] / sums[1] - sums[2] / sums[3])


def _estimate(
    rows: Sequence[Sequence[float]], figure: Callable[[np.ndarray], np.ndarray]
) -> Estimate | None:
    """A figure of sums over samples, and its interval.

    Args:
      rows: one a sample.
      figure: of sums ``[columns, draws]``.
    """
    if not rows:
        return None
    values = np.asarray(rows, np.float64)
    count = len(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(values.sum(axis=0)[:, None])[0])
        if not np.isfinite(value):
            return None
        if count < FEWEST:
            return Estimate(value, None, None, count)
        drawn = figure(_drawn_sums(values))
    # A draw of samples that say nothing about the ratio (no pass, no second) has no figure.
    tail = _tail(count)
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return Estimate(value, float(low), float(high), count)


def _tail(count: int) -> float:
    """The share of the draws beyond each end of an interval."""
    t = stdtrit(count - 1, (1 - LEVEL) / 2)
    return float(ndtr(t * math.sqrt(count / (count - 1))))


def _drawn_sums(values: np.ndarray) -> np.ndarray:
    """Sums ``[columns, draws]`` over samples drawn with replacement."""
    parts = np.array_split(_draws(len(values)), max(1, DRAWS * len(values) // _CELLS))
    return np.concatenate([part.astype(np.float64) @ values for part in parts]).T


@functools.lru_cache(maxsize=64)
def _draws(count: int) -> np.ndarray:
    """How often every draw has every sample, ``[draws, samples]``: the same for all figures.

    Numbers fit in eight bits: none exceeds the samples, and of many samples each is drawn seldom.
    """
    random = np.random.default_rng(SEED)
    most = max(1, _CELLS // count)
    parts = []
    for start in range(0, DRAWS, most):
        rows = np.arange(min(most, DRAWS - start))
        drawn = random.integers(count, size=(len(rows), count)) + count * rows[:, None]
        counts = np.bincount(drawn.ravel(), minlength=drawn.size)
        parts.append(counts.reshape(drawn.shape).astype(np.uint8))
    return np.concatenate(parts)
