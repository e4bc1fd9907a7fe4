"""Numbers as the commands take them: as they were typed, nothing rounded or cast."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from longspec_jax.checks import Real, Whole, shown

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")


def number_argument(allowed: Whole | Real) -> Callable[[str], Any]:
    """What reads such a number, for ``argparse``."""

    def read(text: str) -> Any:
        value = _whole(text) if isinstance(allowed, Whole) else _real(text)
        if words := allowed.refusal(value):
            written = shown(text) if isinstance(value, str) else f"{text.strip():.40}"
            raise argparse.ArgumentTypeError(f"{written} must be {words}")
        return value

    return read


def _whole(text: str) -> int | str:
    """The number that a text is, or the text."""
    return int(text) if _WHOLE.fullmatch(text.strip()) else text


def _real(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
