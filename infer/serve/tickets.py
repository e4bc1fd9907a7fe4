"""Tickets, by which an event loop follows rows through an engine in another thread."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from .gains import Answer, Gain, Times
from .protocol import Row
from .rules import Refused


class Ticket:
    """The rows of one call, on their way through the engine.

    The event loop awaits :meth:`begun` and reads :meth:`gains`; the engine's thread calls
    :meth:`begin`, :meth:`put` and :meth:`fail`, and then :meth:`wake`, which takes effect in the
    loop.
    """

    def __init__(self, rows: Sequence[Row], deadline: float, levels: int) -> None:
        """Wait to be submitted.

        Args:
          rows: of the call.
          deadline: when it ends at the latest, on the monotonic clock.
          levels: of the engine's tree.
        """
        self.rows, self.deadline = tuple(rows), deadline
        self.arrived = time.monotonic()
        self.answers = [
            Answer(row.tokens, times=Times(self.arrived), levels=levels) for row in rows
        ]
        """Filled by the reader; the thread writes their times."""
        self.ids: list[int] = []
        """Of the rows in the engine, in their order."""
        self.open = len(self.rows)
        """Rows that have not ended."""
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Gain]] = deque()
        self._ready, self._begun = asyncio.Event(), asyncio.Event()
        self._failure: Refused | None = None
        self._submitted = False

    def begin(self) -> None:
        """The engine has taken all rows."""
        self._submitted = True

    def put(self, row: int, gain: Gain) -> None:
        """A row has gained something."""
        self._arrived.append((row, gain))

    def fail(self, refused: Refused) -> None:
        """Nothing more will come."""
        self._failure = refused

    def wake(self) -> None:
        """Have the reader look; in its loop."""
        if self._submitted or self._failure is not None:
            self._begun.set()
        self._ready.set()

    async def begun(self) -> None:
        """Wait until the engine has taken the rows.

        Raises:
          Refused: if it does not take them.
        """
        await self._begun.wait()
        if self._failure is not None and not self._arrived:
            raise self._failure

    async def gains(self) -> AsyncIterator[tuple[int, Gain]]:
        """What rows gain, until all have ended; what was not read meanwhile is joined.

        Raises:
          Refused: if a row ends early.
        """
        left = len(self.rows)
        while left:
            await self._ready.wait()
            self._ready.clear()
            by_row: dict[int, list[Gain]] = {}
            while self._arrived:
                row, gain = self._arrived.popleft()
                by_row.setdefault(row, []).append(gain)
            for row, gains in by_row.items():
                gain = Gain.joined(gains)
                if gain.finish == "error":
                    raise Refused(
                        "the model's logits were not finite, so the text cannot go on; the model "
                        "overflows in its number format",
                        status=500,
                    )
                left -= gain.finish is not None
                self.answers[row].add(gain)
                yield row, gain
            if self._failure is not None and not self._arrived:
                raise self._failure


def wake(tickets: Iterable[Ticket]) -> None:
    """Have the readers of tickets look, each in its loop; called by the engine's thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in tickets:
        by_loop.setdefault(ticket.loop, []).append(ticket)
    for loop, woken in by_loop.items():
        with contextlib.suppress(RuntimeError):  # The loop is closed, and nobody reads.
            loop.call_soon_threadsafe(_wake_all, woken)


def _wake_all(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        ticket.wake()
