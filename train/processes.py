"""Several processes as one run: joining them, and what only one of them does.

Devices of all processes form one mesh and every process runs the same program. Files in the working
folder, which all processes share, are written by process 0 while the others wait.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils


def join(coordinator: str, processes: int, process: int) -> None:
    """Join the other processes of a run. Must precede every other use of jax.

    Args:
      coordinator: ``HOST:PORT`` of process 0; empty to ask Slurm, Open MPI or Kubernetes for all
        three.
      processes: how many there are.
      process: which one this is, from 0.

    Raises:
      ValueError: if the numbers do not fit together, or nothing answers for them.
    """
    if coordinator and not 0 <= process < processes:
        raise ValueError(
            f"--process={process} of --processes={processes}: give both with --coordinator, and "
            "count processes from 0"
        )
    try:
        if coordinator:
            jax.distributed.initialize(coordinator, processes, process)
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the processes could not be joined ({reason}); outside Slurm, Open MPI and Kubernetes "
            "give --coordinator=HOST:PORT --processes=N --process=I"
        ) from error


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return jax.process_index() == 0


def by_first(name: str, work: Callable[[], None]) -> None:
    """Let process 0 do something while the others wait for it."""
    if is_first():
        work()
    wait(name)


def wait(name: str) -> None:
    """Go on when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gathered(params: Any) -> Any:
    """Parameters as whole arrays in the memory of every process, ready to be saved."""
    if jax.process_count() == 1:
        return params
    return multihost_utils.process_allgather(params, tiled=True)
