"""Intervals against hand-made samples, known distributions, and brute force."""

import itertools

import numpy as np
import pytest

from infer.report import intervals
from infer.report.intervals import (
    FEWEST,
    Fraction,
    difference_of_ratios,
    ratio,
    ratio_of_ratios,
)


def fractions(above: list[float], below: list[float]) -> list[Fraction]:
    return [Fraction(*each) for each in zip(above, below, strict=True)]


def test_a_ratio_is_one_of_sums_and_no_mean_of_ratios() -> None:
    found = ratio(fractions([10, 90], [1, 3]))
    assert found is not None
    assert (found.value, found.samples) == (25, 2)


def test_few_samples_have_no_interval() -> None:
    few = ratio(fractions([1, 2, 3], [1, 1, 1]))
    assert few is not None and len([1, 2, 3]) < FEWEST
    assert (few.low, few.high) == (None, None) and not few.excludes(100)
    enough = ratio(fractions([1, 2, 3, 4], [1, 1, 1, 1]))
    assert enough is not None and enough.low is not None


def test_four_samples_reach_from_the_least_to_the_greatest() -> None:
    """The tail of Student's t with three degrees of freedom lies beyond every draw but those."""
    found = ratio(fractions([1, 2, 3, 10], [1, 1, 1, 1]))
    assert found is not None and found.low is not None and found.high is not None
    draws = sorted(sum(draw) / 4 for draw in itertools.product([1, 2, 3, 10], repeat=4))
    assert found.low == pytest.approx(draws[0], abs=0.5)
    assert found.high == pytest.approx(draws[-1], abs=1.5)


def test_what_has_no_value_has_no_figure() -> None:
    assert ratio([]) is None
    assert ratio(fractions([0, 0], [0, 0])) is None
    assert ratio_of_ratios([]) is None
    assert ratio_of_ratios([(Fraction(1, 1), Fraction(0, 0))]) is None
    assert difference_of_ratios([(Fraction(1, 0), Fraction(1, 1))]) is None


def test_draws_without_a_value_are_left_out() -> None:
    """Most draws of these hold no pass at all."""
    found = ratio(fractions([0, 0, 0, 0, 8], [0, 0, 0, 0, 2]))
    assert found is not None
    assert (found.value, found.low, found.high) == (4, 4, 4)


@pytest.mark.parametrize("count", [4, 8, 20])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """Of a skewed ratio, of few samples and of many: at least nearly so."""
    random = np.random.default_rng(0)
    held, times = 0, 200
    for _ in range(times):
        below = random.uniform(20, 60, count)
        above = below * random.gamma(20, 3 / 20, count)
        found = ratio(fractions(above.tolist(), below.tolist()))
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 3 <= found.high
    assert 0.86 <= held / times <= 0.995


def test_pairs_say_more_than_two_intervals() -> None:
    """A method that is always a tenth faster, on samples of very different speeds."""
    random = np.random.default_rng(1)
    speeds = random.uniform(10, 100, 12)
    slow = [Fraction(100, 100 / speed) for speed in speeds]
    fast = [Fraction(100, 100 / (1.1 * speed)) for speed in speeds]
    one, other = ratio(slow), ratio(fast)
    assert one is not None and other is not None and one.high is not None and other.low is not None
    assert one.high > other.low  # Apart they overlap.
    gain = ratio_of_ratios([*zip(fast, slow, strict=True)])
    assert gain is not None
    assert gain.value == pytest.approx(1.1) and gain.low == pytest.approx(1.1)
    assert gain.excludes(1)
    difference = difference_of_ratios([*zip(fast, slow, strict=True)])
    assert difference is not None and difference.value == pytest.approx(other.value - one.value)
    assert difference.excludes(0)


def test_a_report_says_the_same_twice() -> None:
    parts = fractions([1, 5, 2, 8, 3], [1, 2, 1, 2, 2])
    assert ratio(parts) == ratio(parts)


def test_many_samples_are_drawn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = fractions(list(range(1, 31)), [1] * 30)
    whole = ratio(parts)
    monkeypatch.setattr(intervals, "_CELLS", 30 * 7)
    intervals._draws.cache_clear()
    assert ratio(parts) == whole
    assert intervals._draws(30).shape == (intervals.DRAWS, 30)
