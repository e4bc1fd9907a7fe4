"""What a run has measured so far, so that stopping it early loses nothing."""

import threading
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
        self._name = ""
        self._row_names: tuple[str, ...] = ()
        self._has_text = True
        self._rounds: list[StreamRound] = []

    def begin(self, name: str, row_names: tuple[str, ...], has_text: bool) -> None:
        """A call begins."""
        with self._lock:
            self._check_open()
            self._name, self._row_names, self._rounds = name, row_names, []
            self._has_text = has_text

    def add(self, added: "StreamRound") -> None:
        """A round of it has ended."""
        with self._lock:
            self._check_open()
            self._rounds.append(added)

    def finish(self, outcome: "Outcome") -> None:
        """It has ended."""
        with self._lock:
            self._check_open()
            self._finished.append(outcome)
            self._rounds = []

    def check_open(self) -> None:
        """Raise if the run has been left."""
        with self._lock:
            self._check_open()

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

        return Outcome(self._name, self._row_names, gathered(self._rounds, self._has_text))

    @property
    def outcomes(self) -> "list[Outcome]":
        """The calls that have ended, and the one under way."""
        partial = self.unfinished
        return [*self._finished, *([] if partial is None else [partial])]

    def _check_open(self) -> None:
        if self._closed:
            raise cli.Closed
