"""Timing of work that is queued on a device, and what the device does at best."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPETITIONS = 5
QUEUED_SECONDS = 0.02
"""Least work in the queue per repetition, so that the last synchronisation does not count."""


@dataclasses.dataclass(frozen=True)
class Roof:
    """What the device does at best, measured in the run that refers to it."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, moved: int, operations: int) -> float:
        """The least time that moving so many bytes and doing so many operations can take."""
        return max(moved / self.bytes_per_s, operations / self.operations_per_s)


def measure_roof() -> Roof:
    """Read-only bandwidth over 4 GB and the rate of a large bfloat16 product, on random data."""
    small = jax.default_backend() != "gpu"
    elements, side = (2**20, 256) if small else (2**30, 8192)
    values = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    total = jax.jit(jnp.sum)
    read = jax_seconds(lambda: total(values))
    a, b = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    multiply = jax_seconds(lambda: product(a, b))
    return Roof(4 * elements / read, 2 * side**3 / multiply)


def jax_seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a compiled jax program."""
    return median_seconds(call, jax.block_until_ready)


def median_seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Median seconds of a call, over repetitions of many executions queued back to back.

    Args:
      call: queues the work once and returns what to wait for.
      wait: returns when the device has finished the result it is given.
    """
    wait(call())
    begin = time.perf_counter()
    wait(call())
    queued = max(2, math.ceil(QUEUED_SECONDS / (time.perf_counter() - begin)))
    seconds = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        result = call()
        for _ in range(queued - 1):
            result = call()
        wait(result)
        seconds.append((time.perf_counter() - begin) / queued)
    return statistics.median(seconds)


def rounded(value: float) -> float:
    """Four significant digits: more would not repeat."""
    return float(f"{value:.4g}")
