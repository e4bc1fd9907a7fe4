"""The rules that values keep, in one place: what is whole is whole, what is finite is finite.

Python takes ``True`` for 1, ``nan`` for any comparison and ``"8"`` for a size until something far
away breaks; these functions say the name, the value and the rule where the value came in.
"""

import difflib
import itertools
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST_WHOLE = 2**31 - 1
"""Sizes, positions and token ids are 32-bit integers on the device."""
LARGEST_NUMBER = 1e30
"""Numbers are float32 on the device, which ends at 3e38; this leaves room to multiply."""
LARGEST_FLOAT32 = 3.4028234663852886e38
LONGEST_SHOWN = 80
"""Characters of a value in a message."""
SIMILAR = 0.75
"""Least similarity of a suggested name, as difflib measures it: ``stop`` is not ``top_p``."""


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Whole:
    """The rule of a whole number: a range, its ends included."""

    least: int = 1
    most: int = LARGEST_WHOLE
    note: str = ""
    """What an end means, or what to do instead; follows the rule."""

    def refusal(self, value: Any) -> str | None:
        """What a value must be instead; None for one that will do."""
        if is_whole(value) and self.least <= value <= self.most:
            return None
        return f"a whole number from {self.least} to {self.most}{self.note}"


@dataclass(frozen=True)
class Real:
    """The rule of a real number: a range whose upper end is included."""

    least: float
    most: float
    rule: str
    """What a number must be, for reading."""
    includes_least: bool = True

    def refusal(self, value: Any) -> str | None:
        """What a value must be instead; None for one that will do."""
        if not is_number(value):
            return f"a number, {self.rule}"
        above = value >= self.least if self.includes_least else value > self.least
        return None if above and value <= self.most else self.rule  # Not true of NaN.


@dataclass(frozen=True)
class Truth:
    """The rule of what is so or not."""

    def refusal(self, value: Any) -> str | None:
        """What a value must be instead; None for one that will do."""
        return None if isinstance(value, bool) else "True or False"


@dataclass(frozen=True)
class Word:
    """The rule of a name."""

    def refusal(self, value: Any) -> str | None:
        """What a value must be instead; None for one that will do."""
        return None if isinstance(value, str) and value else "a word"


SAMPLING: dict[str, Whole | Real] = {
    "max_new_tokens": Whole(1),
    "temperature": Real(0.0, LARGEST_FLOAT32, ">= 0 (0 is greedy) and finite"),
    "top_k": Whole(0, note=" (0 keeps all tokens)"),
    "top_p": Real(0.0, 1.0, "in (0, 1] (1 keeps all tokens)", includes_least=False),
    "min_p": Real(0.0, 1.0, "in [0, 1] (0 keeps all tokens)"),
    # It divides and multiplies logits, which must stay finite.
    "repetition_penalty": Real(
        1 / LARGEST_NUMBER, LARGEST_NUMBER, "above 0 (1 is none), from 1e-30 to 1e30"
    ),
    "presence_penalty": Real(-2.0, 2.0, "from -2 to 2 (0 is none)"),
    "frequency_penalty": Real(-2.0, 2.0, "from -2 to 2 (0 is none)"),
    "seed": Whole(0, 2**32 - 1),
}
"""Values of the generation options, of the library, the commands and batch files alike."""
TOKEN = Whole(0)
"""Values of a token id; the size of the vocabulary is checked where the target is known."""


def whole_number(name: str, value: Any, least: int = 1, most: int = LARGEST_WHOLE) -> int:
    """The value as an integer.

    Raises:
      ValueError: if it is no whole number, or below ``least`` or above ``most``.
    """
    if words := Whole(least, most).refusal(value):
        raise ValueError(f"{name}={shown(value)} must be {words}")
    return int(value)


def finite_number(name: str, value: Any, least: float, most: float = LARGEST_NUMBER) -> float:
    """The value as a float.

    Raises:
      ValueError: if it is no finite number, or below ``least`` or above ``most``.
    """
    if is_number(value) and least <= value <= most:  # Not true of NaN.
        return float(value)
    raise ValueError(f"{name}={shown(value)} must be a number from {least:g} to {most:g}")


def by_row(name: str, value: Any, rows: int, allowed: Whole | Real) -> list[Any]:
    """A number per row, from one for all rows or a sequence with one per row."""
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


def in_row(row: int, rows: int) -> str:
    """The row of a bad value, for an error message; empty if there is only one."""
    return f" of row {row}" if rows > 1 else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means; None if no name is similar."""
    # A name twice as long is not similar, and difflib would read all of it.
    close = [one for one in known if len(name) < 2 * len(one)]
    return next(iter(difflib.get_close_matches(name, close, 1, SIMILAR)), None) if close else None


def as_plain(value: Any) -> Any:
    """Python's own numbers and lists for an array of numpy, jax or torch."""
    return value.tolist() if hasattr(value, "tolist") else value


def shown(value: Any) -> str:
    """A value for a message: as Python writes it, cut after :data:`LONGEST_SHOWN` characters."""
    try:
        text = repr(_beginning(value))
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _beginning(value: Any) -> Any:
    """Enough of a value to show: a whole one may be a text of megabytes."""
    most = LONGEST_SHOWN + 1
    if type(value) in (str, bytes):
        return value[:most]
    if type(value) is list:
        return [_beginning(one) for one in value[:most]]
    if type(value) is dict:
        items = itertools.islice(value.items(), most)
        return {_beginning(name): _beginning(one) for name, one in items}
    return value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shown_bytes(count: float) -> str:
    """Bytes with a decimal unit: ``75.5 MB``, ``16.06 GB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
