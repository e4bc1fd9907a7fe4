"""An HTTP/1.1 connection that waits for its client for a bounded time.

Uvicorn bounds how long a connection may rest between requests, and nothing else. So a client could
keep a connection for ever by a header that never ends, by a body that nobody reads any more, or by
a stream that it does not read. The time for a body that is read is bounded where it is read.
"""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LOG = logging.getLogger("longspec.serve")
SEND_SECONDS = 20.0
"""In which a client must have sent the head of a request, and the rest of a body that was answered
before its end."""
READ_SECONDS, LEAST_READ = 60.0, 16 * 1024
"""In which a client must have read this number of bytes, or all that was sent."""


class Connection(H11Protocol):
    """Closes the connection of a client that is late."""

    _sending: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        # What the system's buffers do not take is what the client is late with, however little.
        transport.set_write_buffer_limits(high=0)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Some of a request."""
        super().data_received(data)
        self._expect()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._expect()

    def _expect(self) -> None:
        """Bound the wait for the client; more bytes that do not end it give no more time."""
        theirs = self.conn.their_state
        unread = theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if theirs is not h11.IDLE and not unread:
            self._sending = _cancelled(self._sending)
        elif self._sending is None:
            self._sending = self.loop.call_later(SEND_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """Begin to wait for the reader."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The reader has all."""
        super().resume_writing()
        self._reading = _cancelled(self._reading)

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(READ_SECONDS, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        """Go on waiting for a reader that reads. To the application another one has left."""
        if before - self.transport.get_write_buffer_size() >= LEAST_READ:
            self._await_reader()
            return
        LOG.info("a client has read nothing for %g s: its connection is cut", READ_SECONDS)
        self.transport.abort()  # close() would wait until all is read.

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._sending, self._reading = _cancelled(self._sending), _cancelled(self._reading)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    """No timer, in place of one that may run."""
    if timer is not None:
        timer.cancel()
