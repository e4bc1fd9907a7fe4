"""The port, the routes and the engine's thread together, and how they end in order.

Uvicorn bounds how long a connection may rest between requests, and nothing else. So a client could
keep a connection for ever by a header that never ends, by a body that nobody reads any more, or by
a stream that it does not read. :class:`Connection` bounds these waits. The time for a body that is
read is bounded where it is read.

Nor does it bound the work of the event loop, which parses requests: a megabyte of headers takes it
a second, and one of chunks of a byte each two and a half, before any key is checked. So heads are
short, and the chunks of a body have some bytes each (:class:`Parser`).

Nor does it bound the number of connections. A process without a file left for one more accepts none
for seconds, and asyncio writes thousands of tracebacks a second meanwhile. So some are kept free.
"""

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from longspec_jax import cli
from longspec_jax.cli import counted

from .app import Served, make_app

LOG = logging.getLogger("longspec.serve")
SEND_SECONDS = 20.0
"""In which a client must have sent the head of a request, and the rest of a body that was answered
before its end."""
SLICE = LONGEST_HEAD = 16 * 1024
"""Bytes that are parsed at once, and those in which a head must have ended when a slice has."""
MOST_CHUNKS, LEAST_CHUNK = 1024, 32
"""Chunks of a body whatever they hold, and bytes that others have on average."""
READ_SECONDS, LEAST_READ = 60.0, 16 * 1024
"""In which a client must have read this number of bytes, or all that was sent."""
LARGE, MOST_UNREAD = 2**20, 2**29
"""Bytes that a client has not read yet: of a connection that counts, and of all of these."""
BACKLOG, FREE_FILES, MOST_FILES = 256, 512, 2**16
"""Connections that are accepted at once, files that connections leave to everything else, and those
that the process asks for where the system gives it more than it has."""
LAST_WORDS = 5.0
"""Seconds that streams have to send their last event."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet.

    Raises:
      OSError: says which option is wrong.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(f"--host={host} is no address of this machine: {error}") from None
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise OSError(
            f"--host={host} --port={port} cannot be used: {error.strerror}; name another --port (0 "
            "for any free one) or --host"
        ) from None
    # Else a second server could bind it, too, while this one compiles and does not listen yet.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return found


def ask_for_files() -> None:
    """Ask the system for as many open files as it gives: a shell often gives 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> float:
    """Connections for which there are files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if files == resource.RLIM_INFINITY else max(files // 2, files - FREE_FILES)


class Parser(h11.Connection):
    """Refuses a body of too many small chunks."""

    _chunks = _bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Read on."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + 1, self._bytes + len(event.data)
            if self._chunks > MOST_CHUNKS + self._bytes // LEAST_CHUNK:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        return event


class Connection(H11Protocol):
    """Closes the connection of a client that is late, or whose requests take long to parse."""

    _sending: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _paused_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._make_room()
        self.conn = Parser(h11.SERVER, LONGEST_HEAD)
        # What the system's buffers do not take is what the client is late with, however little.
        transport.set_write_buffer_limits(high=0)
        self._expect()

    def _make_room(self) -> None:
        """End the connection that awaits a request for the longest time; this one if none does."""
        waiting = {
            one: one._sending.when()
            for one in self.connections
            if isinstance(one, Connection) and one._sending and not one.transport.is_closing()
        }
        (min(waiting, key=waiting.__getitem__) if waiting else self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Some of a request; the length of a head is looked at between slices."""
        for begin in range(0, len(data), SLICE):
            super().data_received(data[begin : begin + SLICE])
            if self.transport.is_closing():
                return
        self._expect()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; where the request was answered already, only close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

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

    @property
    def unread(self) -> int:
        """Bytes that wait for the reader."""
        return self.transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Begin to wait for the reader."""
        super().pause_writing()
        self._paused_at = self.loop.time()
        self._await_reader()
        if self.unread > LARGE:
            self._bound_unread()

    def _bound_unread(self) -> None:
        """Cut the slowest readers while all of them together leave too much unread; one stays.

        Else a client could ask for long answers and read as little of each as keeps it open.
        """
        every = [one for one in self.connections if isinstance(one, Connection)]
        slow = sorted((one for one in every if one.unread > LARGE), key=lambda one: one._paused_at)
        while len(slow) > 1 and sum(one.unread for one in slow) > MOST_UNREAD:
            LOG.info("too much is unread: the connection that waits the longest is cut")
            slow.pop(0).transport.abort()

    def resume_writing(self) -> None:
        """The reader has all."""
        super().resume_writing()
        self._reading = _cancelled(self._reading)

    def _await_reader(self) -> None:
        self._reading = self.loop.call_later(READ_SECONDS, self._check_reader, self.unread)

    def _check_reader(self, before: int) -> None:
        """Go on waiting for a reader that reads. To the application another one has left."""
        if before - self.unread >= LEAST_READ:
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


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own way to handle signals, which closes the port and cuts streams."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: :class:`HttpServer` handles signals."""
        yield


class HttpServer:
    """The port, the routes and the engine's thread, and how they end."""

    def __init__(self, served: Served, listener: socket.socket, drain_seconds: float) -> None:
        """Bind what is served, by a thread that was not started, and an address.

        In the end open calls are awaited for ``drain_seconds``.
        """
        self._thread, self._listener, self._drain = served.thread, listener, drain_seconds
        config = uvicorn.Config(
            make_app(served),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(LAST_WORDS),
            backlog=BACKLOG,
        )
        self._server = _Uvicorn(config)
        self._signals = 0

    async def run(self, ready: Callable[[], None]) -> int:
        """Serve until a signal or a failure.

        Args:
          ready: called once the port listens.

        Returns:
          The exit status: 0 after a signal, 1 after a failure.
        """
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ask_for_files()
        failures: list[BaseException] = []

        def fail(error: BaseException) -> None:
            failures.append(error)
            self.stop()

        self._thread.on_failure = fail
        main = threading.current_thread() is threading.main_thread()
        for number in cli.STOP_SIGNALS if main else ():
            # Ignored signals stay ignored, as under nohup.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._signalled)
        self._thread.start()
        # For the next server: connections inherit it, and outlive this one by a minute.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            while not (self._server.started or serving.done()):
                await asyncio.sleep(0.01)
            if not serving.done():
                ready()
                stopping = asyncio.create_task(self._stop.wait())
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                await self._end_calls()
            self._server.should_exit = True
            await serving
        finally:
            self._thread.abandon()
            await asyncio.to_thread(self._thread.close)
        if failures:
            message = cli.explained(failures[0])[0] if isinstance(failures[0], Exception) else ""
            cli.say(f"the engine has failed: {message or repr(failures[0])}")
        return cli.FAILED if failures else cli.OK

    def stop(self) -> None:
        """End in order; from any thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            self._loop.call_soon_threadsafe(self._stop.set)

    def _signalled(self) -> None:
        """The first signal drains; a second one ends the calls that are open."""
        self._signals += 1
        self._stop.set()

    async def _end_calls(self) -> None:
        """Finish the open calls, for as long as that may take, and end the others."""
        self._thread.drain()
        if self._thread.open_calls:
            cli.say(f"ending: {counted(self._thread.open_calls, 'call')} to finish")
        deadline = time.monotonic() + self._drain
        while self._thread.open_calls and time.monotonic() < deadline and self._signals < 2:
            await asyncio.sleep(0.02)
        self._thread.abandon()
        while self._thread.open_calls:
            await asyncio.sleep(0.02)


def log_to_stderr() -> None:
    """Write the log of this package, of the engine's faults and of uvicorn's, with the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    levels = {"longspec.serve": logging.INFO, "longspec_jax": logging.WARNING}
    for name, level in {**levels, "uvicorn": logging.WARNING}.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
