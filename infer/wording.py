"""Rows and options as the user wrote them: ``batch.jsonl, line 4``, not ``row 1``."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from longspec_jax.checks import Refused

ERRORS = (ValueError, MemoryError, NotImplementedError, FileNotFoundError, FloatingPointError)
"""What the library raises for requests that cannot be met, and for models that compute no
numbers."""
TYPED = {"draft_options": "--draft_option", "stop_strings": "--stop"}
"""Options that a command has under another name."""
_OF_ROW, _ROW = re.compile(r" of row (\d+)\b"), re.compile(r"\brow (\d+)\b")


def in_command_words(error: Exception, rows: Sequence[str] = ()) -> str:
    """The message of an error of the library, with its rows as the user named them.

    Args:
      rows: where every row was written. "of row 0" is left out where there is one row.
    """
    of_option = isinstance(error, Refused) and error.name.isidentifier()
    message = f"--{error}" if of_option else str(error)
    for option, typed in TYPED.items():
        message = re.sub(rf"(?<![\w/.-])(--)?{option}\b", typed, message)
    if len(rows) == 1:
        message = _OF_ROW.sub("", message)
    return _ROW.sub(lambda match: _name(rows, int(match[1])), message)


def _name(rows: Sequence[str], row: int) -> str:
    return rows[row] if row < len(rows) else f"row {row}"


@contextmanager
def command_words(rows: Sequence[str] = (), of: str = "") -> Iterator[None]:
    """Say what the library refuses within in the words of the command.

    Args:
      rows: where every row was written.
      of: the name of the prompt in question; messages begin with it.
    """
    try:
        yield
    except ERRORS as error:
        kind = next(kind for kind in ERRORS if isinstance(error, kind))
        words = in_command_words(error, rows)
        raise kind(f"{of}: {words}" if of and not words.startswith(of) else words) from error
