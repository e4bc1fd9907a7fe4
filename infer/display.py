"""Text on a terminal: accepted draft tokens in colour, plain where colour is not wanted."""

import itertools
import os
import sys
from typing import TextIO

from longspec_jax.generation.result import StreamRound

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def wants_color(choice: str, out: TextIO) -> bool:
    """Whether to colour: as chosen, or on a terminal unless ``NO_COLOR`` is set."""
    if choice != "auto":
        return choice == "always"
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Where the command prints."""

    def __init__(self, color: bool, out: TextIO | None = None):
        """Print to standard output unless told otherwise.

        Args:
          color: whether to emit colours.
          out: a text stream.
        """
        self._out = out or sys.stdout
        self._color = color

    def line(self, text: str = "") -> None:
        """Print a line."""
        print(text, file=self._out, flush=True)

    def dim(self, text: str) -> None:
        """Print text that is not the model's, without a line end."""
        self._write(self._paint(text, DIM))

    def round(self, added: StreamRound) -> None:
        """Print what a round of the first row released."""
        for drafted, pieces in itertools.groupby(added.pieces[0], lambda piece: piece.drafted):
            text = "".join(piece.text for piece in pieces)
            self._write(self._paint(text, GREEN) if drafted else text)

    def legend(self) -> str:
        """What the colours mean."""
        if not self._color:
            return ""
        return f"{self._paint('green', GREEN)}: accepted draft tokens"

    def _paint(self, text: str, code: str) -> str:
        return f"{code}{text}{RESET}" if self._color and text else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
