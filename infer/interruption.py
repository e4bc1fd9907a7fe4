"""Work that Ctrl-C can leave at any moment, also while a compiler runs.

Python handles signals in the main thread, between two of its own instructions: not while that
thread is inside a compiler or waits for a device. The work therefore runs in a thread of its own,
and the main thread has nothing to do but to wait.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

STACK_BYTES = 64 * 2**20
"""Of the thread that works: tracing and compiling nest deeply, and a thread has less than a
process."""
PATIENCE = 1.5
"""Seconds for last words after Ctrl-C, before the process ends without."""


def run_interruptibly(work: Callable[[], None]) -> None:
    """Run work to its end and raise what it raises.

    Raises:
      KeyboardInterrupt: on Ctrl-C; the work may still be running then, and only the end of the
        process ends it.
    """
    raised: list[BaseException] = []
    done = threading.Event()

    def target() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below.
            raised.append(error)
        finally:
            done.set()

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=target, name="work", daemon=True).start()
    finally:
        threading.stack_size(before)
    while not done.wait(0.5):
        pass
    if raised:
        raise raised[0]


def prepare_to_leave(status: int) -> None:
    """Keep what there is undisturbed, and end in a moment with this status if that blocks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The impatient would lose what is kept now.
    end_soon(status)


def end_soon(status: int) -> None:
    """Let the process end in a moment even if what it says blocks, as a full pipe does."""
    timer = threading.Timer(PATIENCE, os._exit, [status])
    timer.daemon = True
    timer.start()


def end_now(status: int) -> None:
    """End the process at once: a thread inside a compiler would otherwise be waited for."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    os._exit(status)
