"""Means, errors and curves, against arithmetic."""

import math

import numpy as np
import pytest

from train.study.decoding import by_depth
from train.study.statistics import mean_and_error, smoothed, steps_to


def test_an_error_is_that_of_the_mean() -> None:
    assert mean_and_error([1.0, 3.0]) == pytest.approx((2.0, math.sqrt(2.0) / math.sqrt(2.0)))
    mean, error = mean_and_error([5.0])
    assert mean == 5.0 and math.isnan(error)  # One seed says nothing of others.


def test_a_level_is_reached_by_the_moving_mean() -> None:
    losses = [9.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    assert smoothed(losses, 2).tolist() == [5, 5, 5, 1, 1, 1]
    falling = np.linspace(20.0, 0.0, 21)
    assert steps_to(falling.tolist(), 10.0) == 7  # The mean of steps 6 to 14 is 10.
    assert steps_to(falling.tolist(), -1.0) is None


def test_acceptance_by_depth_is_of_the_rounds_that_came_that_deep() -> None:
    # 10 rounds: 4 accepted nothing, 3 one token, 3 two.
    assert by_depth([4, 3, 3]) == pytest.approx([6 / 10, 3 / 6])
