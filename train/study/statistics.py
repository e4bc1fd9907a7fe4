"""Means with the uncertainty of a few seeds or rows, and differences that are paired."""

from collections.abc import Sequence

import numpy as np


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean and its standard error, which is not a number for a single value."""
    numbers = np.asarray(values, np.float64)
    if len(numbers) < 2:
        return float(numbers.mean()), float("nan")
    return float(numbers.mean()), float(numbers.std(ddof=1) / np.sqrt(len(numbers)))


def smoothed(losses: Sequence[float], width: int = 9) -> np.ndarray:
    """A moving mean; entry ``i`` is of the ``width`` values up to and with ``i + width - 1``."""
    width = min(width, len(losses))
    return np.convolve(losses, np.ones(width) / width, mode="valid")


def steps_to(losses: Sequence[float], level: float) -> int | None:
    """Steps until the moving mean is down at a level; None if it never is."""
    reached = np.flatnonzero(smoothed(losses) <= level)
    return int(reached[0]) + 1 if len(reached) else None
