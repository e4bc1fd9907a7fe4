"""One value per row, from one for all rows or a sequence with one each; strict about types."""

from collections.abc import Sequence
from typing import Any

from longspec_jax.checks import Real, Whole, is_number, is_whole, shown


def in_row(row: int, rows: int) -> str:
    """Where a bad value stands: nothing to say if there is one row only."""
    return f" of row {row}" if rows > 1 else ""


def as_plain(value: Any) -> Any:
    """Python's own numbers and lists for an array of numpy, jax or torch."""
    return value.tolist() if hasattr(value, "tolist") else value


def by_row(name: str, value: Any, rows: int, allowed: Whole | Real) -> list[Any]:
    """A number per row.

    Args:
      name: of the option, as the user wrote it.
      value: a number, or a sequence with one per row.
      rows: how many.
      allowed: what a number must be.

    Raises:
      ValueError: for anything else.
    """
    value = as_plain(value)
    given = [value] * rows
    shared = isinstance(value, str | bytes) or not isinstance(value, Sequence)
    if not shared:
        given = list(value)
        if len(given) != rows:
            raise ValueError(
                f"{name} has {len(given)} values for {rows} prompt{'s' * (rows != 1)}; pass one "
                "number, or one per prompt"
            )
    whole = isinstance(allowed, Whole)
    for row, one in enumerate(given):
        if not is_number(one) or (whole and not is_whole(one)):
            kind = "an integer" if is_number(one) else "a number"
            where = "" if shared else in_row(row, rows)
            raise ValueError(f"{name}={shown(one)}{where} must be {kind}, or one number per row")
        if words := allowed.refusal(one):
            raise ValueError(f"{name}={one}{in_row(row, rows)} must be {words}")
    return [int(one) if whole else float(one) for one in given]
