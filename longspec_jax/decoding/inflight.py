"""Launches: their size, those that were not read yet, and the faults of an engine.

Another thread waits for each launch and notes when it ended. A fault loses all arrays that were
donated; an engine may go on after one.
"""

import logging
import math
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.chooser import Choice, load_of
from longspec_jax.decoding.round import MOST_ROUNDS

LOG = logging.getLogger(__name__)

FAULTS_APART = 60.0
"""Seconds between two faults, below which an engine does not go on after the second."""

LAUNCH_SECONDS = 0.4
"""Seconds of a launch of many rounds: the host can interrupt a run between two of them. After each
a GPU waits some 2 ms for the host."""
FIRST_ROUNDS = 4
"""Rounds of the first launch of many where nothing is known of a round's seconds."""
FEW_SLOTS = 4
"""Slots of which a CPU always launches all: another size would prolong a start by two thirds."""


def most_rounds(candidates: int, round_seconds: float) -> int:
    """Rounds of a launch of many: as many as fill :data:`LAUNCH_SECONDS`.

    Args:
      candidates: how many trees there are to choose among.
      round_seconds: of the last launch; NaN before the first.
    """
    if candidates > 1 or jax.process_count() > 1:
        # The policy decides, or every process has to decide alike.
        return MOST_ROUNDS
    if math.isnan(round_seconds):
        return FIRST_ROUNDS
    return min(max(int(LAUNCH_SECONDS / max(round_seconds, 1e-6)), 1), MOST_ROUNDS)


def launch_sizes(slots: int) -> tuple[int, ...]:
    """Rows of an engine's launches, ascending: 1, 2, 4, ... and all slots.

    Every size has a program for each candidate and kind of sampling. A CPU takes seconds to compile
    one, so there the sizes are one row, a quarter of the slots, and all; of few slots only all.
    """
    if jax.default_backend() == "cpu":
        fewer = {1, slots // 4} if slots > FEW_SLOTS else set()
    else:
        fewer = {1 << power for power in range(load_of(slots))}
    return tuple(sorted({*fewer, slots}))


class Launch(NamedTuple):
    """One launch."""

    begun: float
    """When the step began that launched it."""
    landing: "Future[tuple[Any, float]]"
    """What the launch did, and when it had."""
    read: Callable[[Any, float], None]
    """Takes in what it did and its seconds."""
    choice: Choice | None
    """The rounds; None for a part of a prefill."""
    held: tuple[int | None, ...]
    """The request of every slot."""


class LaunchQueue:
    """Launches in the order in which the device runs them.

    The seconds of a launch run from the end of the launch before, or from the beginning of its own
    step if the device had nothing to do. The time that a scheduler takes between two steps is no
    part of them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
          clock: seconds; the thread that waits asks it, too.
        """
        self._clock, self._last_arrival = clock, -math.inf
        self.unread: deque[Launch] = deque()
        """The launches that were not read, the oldest first."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="launch-reader")

    @property
    def choices(self) -> list[Choice]:
        """The launches of rounds."""
        return [launch.choice for launch in self.unread if launch.choice is not None]

    def rounds_of(self, id: int) -> int:
        """How many rounds are under way that a request takes part in."""
        rounds = 0
        for launch in self.unread:
            if launch.choice is not None and id in launch.held:
                rounds += launch.choice.rounds
        return rounds

    def add(
        self,
        begun: float,
        output: Array,
        read: Callable[[Any, float], None],
        held: tuple[int | None, ...],
        choice: Choice | None = None,
        *,
        fetched: bool = True,
    ) -> None:
        """Have a launch waited for.

        Args:
          begun: when the step began that launched it.
          output: ready when the launch has ended.
          read: takes in the output on the host, and the seconds.
          choice: the rounds; None for a part of a prefill.
          fetched: whether the output is brought to the host.
        """

        def fetch() -> tuple[Any, float]:
            # Waiting here lets other threads run; converting an unfinished array may not.
            output.block_until_ready()
            found = np.asarray(output) if fetched else None
            return found, self._clock()

        self.unread.append(Launch(begun, self._reader.submit(fetch), read, choice, held))

    def wait(self) -> None:
        """Wait for the oldest launch, and take in what it did."""
        launch = self.unread.popleft()
        output, arrived = launch.landing.result()
        seconds = arrived - max(launch.begun, self._last_arrival)
        self._last_arrival = arrived
        launch.read(output, seconds)

    def close(self) -> None:
        """Forget all launches, and wait for none."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.unread.clear()


class Faults:
    """The faults so far of an engine that may go on after one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin without any."""
        self.count = 0
        """Faults after which the engine went on."""
        self.clock = clock
        self._last = -math.inf

    def forgive(self, error: BaseException) -> bool:
        """Whether to go on; then the fault is logged, and its frames hold no arrays any more.

        Not after an interruption, nor if the last fault is less than a minute ago.
        """
        now = self.clock()
        if now - self._last < FAULTS_APART or not isinstance(error, Exception):
            return False
        self._last = now
        self.count += 1
        LOG.error("a step failed, and all requests begin again", exc_info=error)
        # There may be no room for the old arrays next to new ones.
        traceback.clear_frames(error.__traceback__)
        return True
