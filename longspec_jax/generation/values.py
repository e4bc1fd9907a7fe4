"""One value per row, from one for all rows or a sequence with one each; strict about types."""

from collections.abc import Callable, Sequence
from typing import Any

from longspec_jax.checks import is_number, is_whole, shown


def in_row(row: int, rows: int) -> str:
    """Where a bad value stands: nothing to say if there is one row only."""
    return f" of row {row}" if rows > 1 else ""


def integers(name: str, value: Any, rows: int, good: Callable[[int], bool], rule: str) -> list[int]:
    """A whole number per row.

    Args:
      name: of the option, as the user wrote it.
      value: a number, or a sequence with one per row.
      rows: how many.
      good: whether a number will do.
      rule: what it must be, in words.

    Raises:
      ValueError: for anything else.
    """
    return _by_row(name, value, rows, lambda one: int(one) if is_whole(one) else None, good, rule)


def floats(
    name: str, value: Any, rows: int, good: Callable[[float], bool], rule: str
) -> list[float]:
    """A number per row; arguments and errors as in :func:`integers`."""
    return _by_row(
        name, value, rows, lambda one: float(one) if is_number(one) else None, good, rule
    )


def as_plain(value: Any) -> Any:
    """Python's own numbers and lists for an array of numpy, jax or torch."""
    return value.tolist() if hasattr(value, "tolist") else value


def _by_row(
    name: str,
    value: Any,
    rows: int,
    read: Callable[[Any], Any],
    good: Callable[[Any], bool],
    rule: str,
) -> list[Any]:
    value = as_plain(value)
    given = [value] * rows
    shared = isinstance(value, str | bytes) or not isinstance(value, Sequence)
    if not shared:
        given = list(value)
        if len(given) != rows:
            raise ValueError(
                f"{name} has {len(given)} values for {rows} prompt{'s' * (rows != 1)}; pass one number, "
                "or one per prompt"
            )
    found = [read(one) for one in given]
    for row, (one, number) in enumerate(zip(given, found, strict=True)):
        if number is None:
            kind = "an integer" if is_number(one) else "a number"
            where = "" if shared else in_row(row, rows)
            raise ValueError(f"{name}={shown(one)}{where} must be {kind}, or one number per row")
        if not good(number):
            raise ValueError(f"{name}={one}{in_row(row, rows)} must be {rule}")
    return found
