"""What the library says, in the command's words: ``--top_p``, not ``top_p of row 0``."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SPOKEN = (
    *("temperature", "seed", "attention", "implementation", "revision", "adaptive", "dtype"),
    *("tree", "draft"),
)
"""Options that are words of their own, too: meant as options only before an equals sign."""
WRITTEN = (
    "max_new_tokens",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prefill_chunk",
    "row_slots",
    "offload",
    "same_bits",
    "kv_dtype",
    "draft_options",
    "draft_revision",
    "stop_strings",
)
"""Options that are nothing else."""
ERRORS = (ValueError, MemoryError, NotImplementedError, FileNotFoundError, FloatingPointError)
"""What the library raises for requests that cannot be met, and for models that compute no
numbers."""
TYPED = {"draft_options": "draft_option", "implementation": "attention", "stop_strings": "stop"}
"""Options that the command has another name for."""
_OPTION = re.compile(
    rf"(?<![-\w])(?<!draft_options: )"  # Whose own options may have the same names.
    rf"(?:({'|'.join(WRITTEN)})\b(?!\.\w)|({'|'.join(SPOKEN)})(?==))(=True\b)?"
)
_OF_ROW, _ROW = re.compile(r" of row (\d+)\b"), re.compile(r"\brow (\d+)\b")


def in_command_words(message: str, rows: Sequence[str] = ()) -> str:
    """A message of the library, with its options and rows as the user named them.

    Args:
      message: of an error.
      rows: where every row was written. "of row 0" is left out where there is one row.
    """
    message = _OPTION.sub(lambda match: f"--{_typed(match[1] or match[2])}", message)
    message = message.replace("another implementation", "another --attention")
    if len(rows) == 1:
        message = _OF_ROW.sub("", message)
    return _ROW.sub(lambda match: _name(rows, int(match[1])), message)


def _typed(option: str) -> str:
    return TYPED.get(option, option)


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
        words = in_command_words(str(error), rows)
        raise kind(f"{of}: {words}" if of and not words.startswith(of) else words) from error
