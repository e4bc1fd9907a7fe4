"""Compile programs before they are called, side by side.

Tracing and lowering are Python, which one thread at a time can run: several threads that trace only
get in each other's way. XLA compiles beside Python. So one thread lowers program after program, and
every one of them is compiled meanwhile: what comes first is what takes longest.

Nothing runs and nothing is allocated: shapes and places will do (:class:`jax.ShapeDtypeStruct`).
jax keeps what it has compiled by the function and its arguments' types, and the first call with
these finds it. Where a release of jax does not, the call compiles as it would have done anyhow, or
reads what :mod:`longspec_jax.compilation` keeps.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax


def compile_side_by_side(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compile programs, each as soon as it is there.

    Args:
      programs: lowers the next one when it is asked for it, in the caller's thread.

    Raises:
      Exception: what failed first, in the order of the programs; nothing is begun any more then.
    """
    pool = ThreadPoolExecutor(processors(), thread_name_prefix="compile")
    try:
        for compiled in [pool.submit(program.compile) for program in programs]:
            compiled.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
