"""The rules that numbers keep, in one place: what is whole is whole, what is finite is finite.

Python takes ``True`` for 1, ``nan`` for any comparison and ``"8"`` for a size until something far away
breaks; these functions say the name, the value and the rule where the value came in.
"""

from numbers import Integral, Real
from typing import Any

LARGEST_WHOLE = 2**31 - 1
"""Sizes, positions and token ids are 32-bit integers on the device."""
LARGEST_NUMBER = 1e30
"""Numbers are float32 on the device, which ends at 3e38; this leaves room to multiply."""
LONGEST_SHOWN = 80
"""Characters of a value in a message."""


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, Python's or NumPy's, and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1, most: int = LARGEST_WHOLE) -> int:
    """The value as an integer.

    Raises:
      ValueError: if it is no whole number, or below ``least`` or above ``most``.
    """
    if is_whole(value) and least <= value <= most:
        return int(value)
    raise ValueError(f"{name}={shown(value)} must be a whole number from {least} to {most}")


def finite_number(name: str, value: Any, least: float, most: float = LARGEST_NUMBER) -> float:
    """The value as a float.

    Raises:
      ValueError: if it is no finite number, or below ``least`` or above ``most``.
    """
    if is_number(value) and least <= value <= most:  # Not true of NaN.
        return float(value)
    raise ValueError(f"{name}={shown(value)} must be a number from {least:g} to {most:g}")


def shown(value: Any) -> str:
    """A value for a message: as Python writes it, cut where it is no longer read."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
