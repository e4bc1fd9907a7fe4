"""Several processes as one run: joining them, and what only one of them does.

Devices of all processes form one mesh and every process runs the same program. Files in the working
folder, which all processes share, are written by process 0 while the others wait. What ends one of
them ends all: those left would wait for its part of the next computation for ever.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from longspec_jax.checks import first_line

HEARTBEAT_SECONDS = 20
"""A process that is silent for this time counts as dead, and the others end."""
FAILED, HEARD = "longspec/failed/", "longspec/heard/"
"""Keys under which a process reports its failure, and the others that they have read it."""
POLL_SECONDS, GRACE_SECONDS = 0.5, 10.0


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the other processes of a run. Must precede every other use of jax.

    Without a coordinator Slurm, Open MPI or Kubernetes is asked for all three.

    Raises:
      ValueError: if nothing answers for them.
    """
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(
            f"the processes could not be joined ({reason}); outside Slurm, Open MPI and Kubernetes "
            "give --coordinator=HOST:PORT --processes=N --process=I"
        ) from error


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return jax.process_index() == 0


def by_first(name: str, work: Callable[[], object]) -> None:
    """Let process 0 do something while the others wait for it."""
    if is_first():
        work()
    wait(name)


def wait(name: str) -> None:
    """Go on when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def ending_together(report: Callable[[Exception], int]) -> Iterator[None]:
    """End all processes when one of them meets an error, the one that met it after a report.

    The others may wait in a computation that never ends, and only the end of the process stops it.
    In a run of one process errors are raised as usual. ``report`` prints an error and returns the
    exit status.
    """
    if jax.process_count() == 1:
        yield
        return
    finished = threading.Event()
    watch = threading.Thread(target=_end_with_others, args=(finished,), daemon=True)
    watch.start()
    try:
        yield
    except Exception as error:
        finished.set()
        watch.join()  # If another process failed before, this one ends here.
        status = report(error)
        reason = first_line(error)
        _leave(status, {FAILED: json.dumps({"status": status, "reason": reason})})
    finally:
        finished.set()
        watch.join()


def _exchange() -> Any:
    """The key-value store of all processes, which jax has under no public name."""
    from jax._src.distributed import global_state

    return global_state.client


def _end_with_others(finished: threading.Event) -> None:
    """End this process as soon as another one has failed."""
    while not finished.wait(POLL_SECONDS):
        try:
            failures = _exchange().key_value_dir_get(FAILED)
        except jax.errors.JaxRuntimeError:
            return  # Process 0 is gone, and jax ends those that it leaves behind.
        if failures:
            name, failure = failures[0]
            values = json.loads(failure)
            process = name.rpartition("/")[2]
            print(f"process {process} has failed: {values['reason']}", file=sys.stderr)
            _leave(values["status"], {})


def _leave(status: int, words: dict[str, str]) -> None:
    """Store words for the other processes, and end this one when all have read them."""
    exchange, own = _exchange(), jax.process_index()
    try:
        for folder, word in {**words, HEARD: ""}.items():
            exchange.key_value_set(f"{folder}{own}", word)
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            if len(exchange.key_value_dir_get(HEARD)) == jax.process_count():
                # The others end through the store of process 0.
                time.sleep(2 * POLL_SECONDS if is_first() else 0)
                break
    except jax.errors.JaxRuntimeError:
        pass  # Process 0 is gone, and with it the keys.
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # An ordinary exit would wait for the others, and for computations.


def gathered(params: PyTree) -> PyTree:
    """Parameters as whole arrays in the memory of every process, ready to be saved."""
    if jax.process_count() == 1:
        return params
    return multihost_utils.process_allgather(params, tiled=True)
