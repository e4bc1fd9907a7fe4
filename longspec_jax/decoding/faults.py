"""Whether an engine goes on behind a fault, which loses all arrays that were donated."""

import logging
import math
import traceback
from collections.abc import Callable

LOG = logging.getLogger(__name__)

FAULTS_APART = 60.0
"""Seconds between two faults, below which an engine does not go on behind the second."""


class Faults:
    """The faults of an engine so far."""

    def __init__(self, clock: Callable[[], float], *, forgiven: bool) -> None:
        """Begin without any.

        Args:
          clock: seconds.
          forgiven: whether the engine may go on at all.
        """
        self.count = 0
        """Faults behind which the engine went on."""
        self.clock = clock
        self._forgiven, self._last = forgiven, -math.inf

    def forgive(self, error: BaseException) -> bool:
        """Whether to go on; then the fault is logged, and its frames hold no arrays any more.

        Not after an interruption, nor if the last fault is less than a minute ago.
        """
        now = self.clock()
        again = self._forgiven and now - self._last >= FAULTS_APART
        if not (again and isinstance(error, Exception)):
            return False
        self._last = now
        self.count += 1
        LOG.error("a step failed, and all requests begin again", exc_info=error)
        # There may be no room for the old arrays beside new ones.
        traceback.clear_frames(error.__traceback__)
        return True
