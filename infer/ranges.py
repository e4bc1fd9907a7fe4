"""What numbers of the command and of a batch file may be, declared once.

Values are checked as they were written: an argument's text, or a value of a JSON file. Nothing is
rounded or cast on the way to the library.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

LARGEST_INT32 = 2**31 - 1
_LARGEST_FLOAT32 = 3.4028234663852886e38
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")


@dataclass(frozen=True)
class Whole:
    """Whole numbers of a range, its ends included."""

    least: int
    most: int = LARGEST_INT32
    note: str = ""
    """Why, or what to do instead; follows the rule."""

    @property
    def rule(self) -> str:
        """What a value must be."""
        return f"a whole number from {self.least} to {self.most}{self.note}"

    def read(self, text: str) -> int:
        """The number that an argument's text is."""
        if not _WHOLE.fullmatch(text.strip()):
            raise ValueError(f"{shown(text)} must be {self.rule}")
        return self.check(int(text))

    def check(self, value: Any) -> int:
        """A value of a JSON file, or a number already read."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{shown(value)} must be {self.rule}")
        if not self.least <= value <= self.most:
            raise ValueError(f"{value} must be {self.rule}")
        return value


@dataclass(frozen=True)
class Real:
    """Finite numbers of a range."""

    least: float
    most: float
    rule: str
    """What a value must be, for reading."""
    includes_least: bool = True

    def read(self, text: str) -> float:
        """The number that an argument's text is."""
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{shown(text)} must be a number, {self.rule}") from None
        return self._within(value, text.strip())

    def check(self, value: Any) -> float:
        """A value of a JSON file."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{shown(value)} must be a number, {self.rule}")
        return self._within(value, str(value))

    def _within(self, value: float, written: str) -> float:
        above = value >= self.least if self.includes_least else value > self.least
        if not (above and value <= self.most):  # Also not a number, which is neither.
            raise ValueError(f"{written:.40} must be {self.rule}")
        return float(value)


SAMPLING: dict[str, Whole | Real] = {
    "max_new_tokens": Whole(1),
    "temperature": Real(0.0, _LARGEST_FLOAT32, ">= 0 (0 is greedy) and finite"),
    "top_k": Whole(0, note=" (0 keeps all tokens)"),
    "top_p": Real(0.0, 1.0, "in (0, 1] (1 keeps all tokens)", includes_least=False),
    "seed": Whole(0, 2**32 - 1),
}
"""The sampling options of the command and of a batch file's rows."""
TOKEN = Whole(0)
"""A token id; whether the target knows it is the target's to say."""


def shown(value: Any) -> str:
    """A value in a message: as it was written, and short."""
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    else:
        text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
