"""The port, the routes and the engine's thread together, and how they end in order."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from longspec_jax import cli
from longspec_jax.cli import counted

from .app import Served, make_app
from .connection import Connection

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
    return found


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
