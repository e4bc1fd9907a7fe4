"""A line at the bottom of a terminal that says what is under way, and is gone when text comes."""

import os
import shutil
import threading
import time
from typing import TextIO

ERASE = "\r\x1b[2K"
TICK = 1.0
"""Seconds between two sights of the clock."""


class StatusLine:
    """What is under way, with the seconds it has taken; nothing where no terminal watches."""

    def __init__(self, stream: TextIO):
        """Show on a stream, if it is a terminal.

        Args:
          stream: standard error as a rule, so that piped output has none of it.
        """
        self._stream = stream
        self.visible = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None
        self._text, self._detail, self._since = "", "", 0.0

    def show(self, text: str, detail: str = "") -> None:
        """Show what is under way, in the place of what was.

        Args:
          text: the seconds count from when it first changes to this.
          detail: how far it has got.
        """
        if not self.visible:
            return
        with self._lock:
            if text != self._text:
                self._text, self._since = text, time.monotonic()
            self._detail = detail
            self._draw()
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def clear(self) -> None:
        """Erase the line; to be done before anything else is printed."""
        with self._lock:
            if self._text:
                self._text = ""
                self._write(ERASE)

    def close(self) -> None:
        """Erase the line for good."""
        self.visible = False
        self._closed.set()
        self.clear()

    def _tick(self) -> None:
        while not self._closed.wait(TICK):
            with self._lock:
                if self._text:
                    self._draw()

    def _draw(self) -> None:
        seconds = int(time.monotonic() - self._since)
        parts = (self._text, self._detail, f"{seconds} s" if seconds else "")
        room = shutil.get_terminal_size().columns - 1
        self._write(ERASE + "  ".join(filter(None, parts))[:room])

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # The terminal is gone; the run need not be.
            self.visible = False
