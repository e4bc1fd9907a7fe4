"""Lists on the command line: ``--context=4096,32768``."""

from collections.abc import Callable
from typing import TypeVar

Item = TypeVar("Item")


def comma_separated(convert: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """What ``argparse`` turns such an argument into a list with, each item by ``convert``."""

    def items(text: str) -> list[Item]:
        return [convert(part) for part in text.split(",")]

    return items
