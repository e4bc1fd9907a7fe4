"""What a command is doing: a line at the bottom of a terminal, or a line now and then in a pipe."""

import os
import shutil
import threading
import time
from typing import TextIO

ERASE = "\r\x1b[2K"
TICK = 1.0
"""Seconds between two updates of the clock on a terminal."""
EVERY = 5.0
"""Seconds to the first line in a pipe or a file; what is shorter is not mentioned there."""
NARROWEST = 10
"""Columns of the line on terminals that are narrower, or do not say."""


class StatusLine:
    """What is under way, and the seconds it has taken."""

    def __init__(self, stream: TextIO):
        """Show on a stream.

        Args:
          stream: standard error as a rule, so that piped results stay clean.
        """
        self._stream = stream
        self.visible = stream.isatty() and os.environ.get("TERM") != "dumb"
        """Whether it is a line of a terminal, erased when something else is printed."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None
        self._text, self._detail, self._since, self._written = "", "", 0.0, 0.0

    def show(self, text: str, detail: str = "") -> None:
        """Show what is under way, in the place of what was.

        Args:
          text: the seconds count from when it first changes to this.
        """
        with self._lock:
            if self._closed.is_set():
                return
            if text != self._text:
                self._text, self._since = text, time.monotonic()
                self._written = self._since
            self._detail = detail
            if self.visible:
                self._draw()
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="status", daemon=True)
            self._ticker.start()

    def clear(self) -> None:
        """Erase the line; before anything else is printed."""
        with self._lock:
            if self._text and self.visible:
                self._write(ERASE)
            self._text = ""

    def close(self) -> None:
        """Erase the line for good."""
        self._closed.set()
        self.clear()
        self.visible = False

    def _tick(self) -> None:
        while not self._closed.wait(TICK if self.visible else EVERY / 5):
            with self._lock:
                if not self._text or self._closed.is_set():
                    continue
                if self.visible:
                    self._draw()
                elif is_due(self._since, self._written, now := time.monotonic()):
                    self._written = now
                    self._write(f"... {self._words()}\n")

    def _words(self) -> str:
        seconds = int(time.monotonic() - self._since)
        parts = (self._text, self._detail, f"{seconds} s" if seconds else "")
        return "  ".join(filter(None, parts))

    def _draw(self) -> None:
        columns = max(NARROWEST, shutil.get_terminal_size().columns)
        self._write(ERASE + self._words()[: columns - 1])

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # The stream is gone; the run need not be.
            self._closed.set()


def is_due(since: float, written: float, now: float) -> bool:
    """Whether a pipe gets a line about what began and was written of so long ago, in seconds.

    Each line waits as long as all before it, so that minutes of one work are a few lines.
    """
    return now - written >= max(EVERY, written - since)
