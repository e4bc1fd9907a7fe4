"""Text on a terminal: accepted draft tokens in colour, plain where colour is not wanted."""

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from longspec_jax.cli import harmless
from longspec_jax.generation.activity import Activity, Compiling, DecodingPlainly, Prefilling, Tuned
from longspec_jax.status_line import NARROWEST, StatusLine

if TYPE_CHECKING:  # Slow to import, and the screen says that it is being imported.
    from longspec_jax.generation.text import Piece

LABEL = 20
"""Columns of a report's labels."""
GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def wants_color(out: TextIO) -> bool:
    """Whether to colour: on a terminal unless ``NO_COLOR`` is set, or where ``FORCE_COLOR`` is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return out.isatty() and os.environ.get("TERM") != "dumb"


class Screen:
    """Where the command prints: text, and a status line while there is none."""

    def __init__(self, color: bool, out: TextIO | None = None, status: StatusLine | None = None):
        self._out = out or sys.stdout
        self._color = color
        self._status = status or StatusLine(sys.stderr)
        columns = shutil.get_terminal_size().columns
        self._width = max(NARROWEST, columns) if self._out.isatty() else None
        self._at_line_start = True

    def line(self, text: str = "") -> None:
        """Print a line."""
        self._write(f"{text}\n")

    def entry(self, text: str, indent: int = LABEL) -> None:
        """Print a line of a report, folded to the terminal under its label."""
        if self._width is not None and len(text) > self._width:
            folds = textwrap.TextWrapper(self._width, break_on_hyphens=False)
            folds.subsequent_indent = " " * min(indent, self._width // 3)
            text = folds.fill(text)
        self.line(text)

    def dim(self, text: str) -> None:
        """Print text that is not the model's, without a line end of its own."""
        self._write(text, DIM)

    def pieces(self, pieces: "Iterable[Piece]") -> None:
        """Print the model's text."""
        for drafted, group in itertools.groupby(pieces, lambda piece: piece.drafted):
            text = "".join(piece.text for piece in group)
            self._write(text if self._width is None else harmless(text), GREEN if drafted else "")

    def end_line(self) -> None:
        """Begin a line, if one is open."""
        if not self._at_line_start:
            self.line()

    def activity(self, activity: Activity) -> None:
        """Say what the library is doing, if that takes time."""
        words = described(activity)
        if isinstance(activity, DecodingPlainly):
            self.end_line()  # The text is complete; a log may take the status on the same line.
        if words is not None:
            self.status(*words)

    def status(self, text: str, detail: str = "") -> None:
        """Say what is under way."""
        if self._status.visible:
            self.end_line()
        self._status.show(text, detail)

    def close(self) -> None:
        """Erase what the status line says, for good."""
        self._status.close()

    def legend(self) -> str:
        """What the colours mean."""
        if not self._color:
            return ""
        return f"{GREEN}green{RESET}: accepted draft tokens"

    def _write(self, text: str, color: str = "") -> None:
        if not text:
            return
        self._status.clear()
        self._out.write(f"{color}{text}{RESET}" if color and self._color else text)
        self._out.flush()
        self._at_line_start = text.endswith("\n")


def described(activity: Activity) -> tuple[str, str] | None:
    """What is being done, and how far it has got; None for what is done."""
    match activity:
        case Compiling():
            return "compiling, once for prompts of about this length", ""
        case Tuned():
            return None
        case Prefilling(done, total):
            return "reading the prompt", f"{bar(done, total)} {done} of {total} tokens"
        case DecodingPlainly(done, total):
            return "decoding plainly, to compare", f"{bar(done, total)} {done} of {total} tokens"


def bar(done: int, total: int, width: int = 10) -> str:
    """How much is done, drawn."""
    full = width * done // max(total, 1)
    return f"[{'#' * full}{'.' * (width - full)}]"
