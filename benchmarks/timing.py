"""Timing of work that is queued on a device, the device's roofline, and progress messages."""

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPETITIONS = 5
QUEUED_SECONDS = 0.02
"""Least work in the queue per repetition, so that the last synchronisation does not count."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The device's bandwidth and rate, measured in the run that refers to them."""

    bytes_per_s: float
    operations_per_s: float

    @property
    def fields(self) -> dict[str, float]:
        """For the header of a result file."""
        return {
            "roof_tb_per_s": self.bytes_per_s / 1e12,
            "roof_tflop_per_s": self.operations_per_s / 1e12,
        }

    def seconds(self, moved: int, operations: int) -> float:
        """The least time that moving these bytes and doing these operations can take."""
        return max(moved / self.bytes_per_s, operations / self.operations_per_s)


def measure_roofline() -> Roofline:
    """Read-only bandwidth over 4 GB and the rate of a large bfloat16 product, on random data."""
    small = jax.default_backend() != "gpu"
    elements, side = (2**20, 256) if small else (2**30, 8192)
    values = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    total = jax.jit(jnp.sum)
    read = jax_seconds(lambda: total(values))
    a, b = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    multiply = jax_seconds(lambda: product(a, b))
    return Roofline(4 * elements / read, 2 * side**3 / multiply)


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


def step(words: str) -> None:
    """Print what is being done, on standard error next to the rows."""
    print(f"... {words}", file=sys.stderr, flush=True)
