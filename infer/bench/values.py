"""What the benchmarks' options take, and the words for what they do not take.

Types for ``argparse``, which prints what they raise behind the option's name. Nothing here is slow to
import: a typing error is answered before jax is.
"""

import argparse
import math
from collections.abc import Callable, Sequence

MOST = 2**31 - 1
"""The largest number the compiled programs count with."""
DTYPES = ("float32", "bfloat16", "float16")


def whole_number(text: str, least: int = 1) -> int:
    """A count."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {MOST}")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, at least 0")
    return value


def head_counts(text: str) -> tuple[int, int]:
    """Query heads and key/value heads, from ``32/8``."""
    try:
        heads, kv_heads = map(whole_number, text.split("/"))
    except (ValueError, argparse.ArgumentTypeError):
        heads, kv_heads = 1, 0
    if kv_heads == 0 or heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be query heads and key/value heads, the first a multiple of the second, "
            "such as 32/8"
        )
    return heads, kv_heads


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """A name out of several."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(
                f"unknown {text or repr(text)}; choose from {list(known)}"
            )
        return text

    return name
