"""Compile programs before they are called, side by side.

Tracing and lowering are Python, which one thread at a time can run: several threads that trace only
get in each other's way. XLA compiles beside Python. So one thread lowers program after program, and
every one of them is compiled meanwhile: what comes first is what takes longest.

No program runs and no cache is allocated: shapes and places will do. (Of large programs on a GPU,
XLA times ways to multiply, with buffers of its own.) jax keeps what it has compiled by the function
and its arguments' types, and the first call with these finds it. Where a release of jax does not,
the call compiles as it would have done anyhow, or reads what :mod:`longspec_jax.compilation` keeps.
"""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax


def compile_side_by_side(programs: Iterable[jax.stages.Lowered]) -> None:
    """Compile programs, each as soon as it is there.

    Args:
      programs: lowers the next one when it is asked for it, in the caller's thread.

    Raises:
      Exception: what failed, of several the first in the order of the programs. None is lowered any
        more then, and none begun. What is being compiled is not waited for, but by the end of the
        process.
    """
    pool = ThreadPoolExecutor(processors(), thread_name_prefix="compile")
    compiled: list[Future] = []
    try:
        for program in programs:
            compiled.append(pool.submit(program.compile))
            if any(one.done() and one.exception() for one in compiled):
                break
        for one in compiled:
            one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
