"""Compilations, noticed as they happen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compilations() -> Iterator[list[float]]:
    """The moments at which something was compiled inside."""
    moments: list[float] = []

    def note(event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            moments.append(time.perf_counter())

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield moments
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
