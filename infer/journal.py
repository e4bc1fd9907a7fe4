"""What a run has measured so far, so that stopping it early loses nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from longspec_jax import cli

if TYPE_CHECKING:  # Slow to import; a round to add has imported it.
    from longspec_jax.generation.result import StreamRound

    from .results import Outcome


class Journal:
    """Finished calls, and the rounds of the one under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._finished: list[Outcome] = []
        self._about: tuple[str, tuple[str, ...], bool] = "", (), True
        self._rounds: list[StreamRound] = []

    def begin(self, name: str, row_names: tuple[str, ...], has_text: bool) -> None:
        """A call begins; ``has_text`` says whether there is a tokenizer."""
        with self._open():
            self._about, self._rounds = (name, row_names, has_text), []

    def add(self, added: "StreamRound") -> None:
        """A round of it has ended."""
        with self._open():
            self._rounds.append(added)

    def finish(self, outcome: "Outcome") -> None:
        """It has ended."""
        with self._open():
            self._finished.append(outcome)
            self._rounds = []

    def check_open(self) -> None:
        """Raise if the run has been left."""
        with self._open():
            pass

    def close(self) -> None:
        """Leave the run: nothing is added from now on."""
        with self._lock:
            self._closed = True

    @property
    def unfinished(self) -> "Outcome | None":
        """The call under way, as far as it has got; None before its first token."""
        if not self._rounds:
            return None
        from .results import Outcome, gathered

        name, row_names, has_text = self._about
        return Outcome(name, row_names, gathered(self._rounds, has_text))

    @property
    def outcomes(self) -> "list[Outcome]":
        """The calls that have ended, and the one under way."""
        partial = self.unfinished
        return [*self._finished, *([] if partial is None else [partial])]

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock; raises if the run has been left."""
        with self._lock:
            if self._closed:
                raise cli.Closed
            yield
