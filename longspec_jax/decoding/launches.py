"""Launches that were not read yet. Another thread waits for each and notes when it ended."""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.policy import Choice


class Launch(NamedTuple):
    """One launch."""

    begun: float
    """When the step began that launched it."""
    landing: "Future[tuple[Any, float]]"
    """What the launch did, and when it had."""
    read: Callable[[Any, float], list[Any]]
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
        self._launches: deque[Launch] = deque()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="launch-reader")

    def __len__(self) -> int:
        """How many launches were not read."""
        return len(self._launches)

    @property
    def choices(self) -> list[Choice]:
        """The launches of rounds."""
        return [launch.choice for launch in self._launches if launch.choice is not None]

    def rounds_of(self, id: int) -> int:
        """Rounds under way in which a request takes part."""
        return sum(
            launch.choice.rounds
            for launch in self._launches
            if launch.choice is not None and id in launch.held
        )

    def add(
        self,
        begun: float,
        output: Array,
        read: Callable[[Any, float], list[Any]],
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
          held: the request of every slot.
          choice: the rounds; None for a part of a prefill.
          fetched: whether the output is brought to the host.
        """

        def land() -> tuple[Any, float]:
            # Waiting here lets other threads run; converting an unfinished array may not.
            output.block_until_ready()
            landed = np.asarray(output) if fetched else None
            return landed, self._clock()

        self._launches.append(Launch(begun, self._reader.submit(land), read, choice, held))

    def land(self) -> list[Any]:
        """Wait for the oldest launch, and take in what it did."""
        launch = self._launches.popleft()
        output, arrived = launch.landing.result()
        seconds = arrived - max(launch.begun, self._last_arrival)
        self._last_arrival = arrived
        return launch.read(output, seconds)

    def close(self) -> None:
        """Forget all launches, and wait for none."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._launches.clear()
