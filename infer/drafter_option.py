"""What a user chooses about a drafter, as the commands take it: ``int8``, ``vocabulary=4096``."""

import argparse
import contextlib
from typing import Any


def drafter_option(text: str) -> tuple[str, Any]:
    """An option of a drafter, for ``argparse``: its name, and its value if it is not just true."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty; leave the option out instead")
    name, equals, value = text.partition("=")
    if not equals:
        return name, True
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, {"true": True, "false": False}.get(value.lower(), value)
