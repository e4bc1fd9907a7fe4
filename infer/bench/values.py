"""What the benchmarks' options take besides numbers, and the words for what they do not take.

Types for ``argparse``, which prints what they raise behind the option's name. Nothing here is slow
to
import: a typing error is answered before jax is.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from longspec_jax.checks import Whole

from ..number_argument import number_argument

DTYPES = ("float32", "bfloat16", "float16")
Item = TypeVar("Item")


def comma_separated(convert: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """A list such as ``4096,32768``, each item by ``convert``."""

    def items(text: str) -> list[Item]:
        return [convert(part) for part in text.split(",")]

    return items


def head_counts(text: str) -> tuple[int, int]:
    """Query heads and key/value heads, from ``32/8``."""
    try:
        heads, kv_heads = map(number_argument(Whole()), text.split("/"))
    except (ValueError, argparse.ArgumentTypeError):
        heads, kv_heads = 1, 0
    if kv_heads == 0 or heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be query heads and key/value heads, the first a multiple of the "
            "second, such as 32/8"
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
