"""How fast the matrix products of a verification are, beside XLA's and the roof.

The four products of a layer with random weights and few rows. One compiled program multiplies the
same rows by many distinct weights, together larger than the GPU's second-level cache, and returns
every product; several executions are queued back to back. The time of a product is the median
over repetitions of that total divided by the number of products. ``ours`` is what the model calls
(``longspec_jax.ops.matmul.few_rows``), its split-K partials not added up, since the norm that
reads them does so as it goes; ``xla`` is its definition in plain JAX. The gate of a SwiGLU
belongs to the product. With ``--int8`` they are the products of a draft in 8 bits
(``longspec_jax.ops.matmul.int8``) and its LM head's. The roof is the time of reading the weights
once at the bandwidth measured in this run.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.cli import counted, settled
from longspec_jax.config import TargetConfig
from longspec_jax.ops.matmul import few_rows, int8

from .arguments import SHAPES
from .models import WEIGHT_SCALE, check_memory
from .report import Report, run_header
from .timing import announce, jax_seconds, measure_roofline, rounded

DISTINCT_BYTES = 600e6
"""Weights in turn: a dozen times the second-level cache of an H200."""

Op = Callable[..., jax.Array]
"""``(x, *weights) -> product``."""
OPS: dict[str, tuple[Op, Op]] = {
    "qkv": (few_rows.matmul, few_rows.matmul_xla),
    "out": (few_rows.matmul_partials, few_rows.matmul_xla),
    "gate_up": (few_rows.gated_matmul, few_rows.gated_matmul_xla),
    "down": (few_rows.matmul_partials, few_rows.matmul_xla),
}
"""Ours and XLA's, by the product's place in a layer."""
INT8_OPS: dict[str, tuple[Op, Op]] = {
    "qkv": (int8.int8_matmul, int8.int8_matmul_xla),
    "out": (int8.int8_matmul_partials, int8.int8_matmul_xla),
    "gate_up": (int8.int8_gated_matmul, int8.int8_gated_matmul_xla),
    "down": (int8.int8_matmul_partials, int8.int8_matmul_xla),
    "head": (int8.int8_matmul, int8.int8_matmul_xla),
}
"""The same with weights of 8 bits, ``[outputs, inputs]``, and a scale for every output."""


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the files."""
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    ops = INT8_OPS if arguments.int8 else OPS
    for shape in arguments.shape:
        shapes = weight_shapes(SHAPES[shape])
        check_memory(
            f"a product of {shape}",
            2 * 4 * max(math.prod(shapes[name]) for name in ops if name in shapes),
        )
    if cpu:
        number = len(arguments.shape) * len(ops) * len(arguments.rows)
        announce(f"{counted(2 * number, 'program')} to compile")
    roofline = measure_roofline()
    method = (__doc__ or "").split("\n\n", 1)[1]
    header = run_header(jax.devices()[0].device_kind, method, **roofline.fields)
    with Report(header, arguments.json) as report:
        for shape in arguments.shape:
            for row in measure(shape, arguments.rows, roofline.bytes_per_s, arguments.int8):
                report.add(row, line(row))


def weight_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's weights, contracted axis first; experts are no such products."""
    heads = config.num_heads * config.head_width
    fused = (config.num_heads + 2 * config.num_kv_heads) * config.head_width
    shapes = {
        "qkv": (config.model_width, fused),
        "out": (heads, config.model_width),
        "gate_up": (config.model_width, 2, config.mlp_width),
        "down": (config.mlp_width, config.model_width),
        "head": (config.model_width, config.vocab_size),
    }
    if config.is_sparse:
        del shapes["gate_up"], shapes["down"]
    return shapes


def measure(
    shape: str, rows: Iterable[int], bytes_per_s: float, in_int8: bool = False
) -> Iterable[dict[str, Any]]:
    """Time every product of a layer with every number of rows."""
    config = SHAPES[shape]
    dtype = jnp.dtype(config.dtype)
    shapes = weight_shapes(config)
    for name, ops in (INT8_OPS if in_int8 else OPS).items():
        if name not in shapes:
            continue
        size = math.prod(shapes[name]) * (1 if in_int8 else dtype.itemsize)
        count = math.ceil(DISTINCT_BYTES / size) if jax.default_backend() == "gpu" else 2
        draw = _int8_weights if in_int8 else functools.partial(_weights, dtype=dtype)
        keys = (jax.random.key(index, impl="rbg") for index in range(count))
        weights = [draw(key, shapes[name]) for key in keys]
        for number in rows:
            x = jax.random.normal(jax.random.key(count), (number, shapes[name][0]), dtype)
            times = {
                f"{label}_microseconds": rounded(1e6 * _seconds(op, x, weights))
                for label, op in zip(("ours", "xla"), ops, strict=True)
            }
            yield {
                "shape": shape,
                "product": name,
                "weights": list(shapes[name]),
                "int8": in_int8,
                "rows": number,
                "dtype": config.dtype,
                "roof_microseconds": rounded(1e6 * size / bytes_per_s),
                **times,
            }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    ours, roof = row["ours_microseconds"], row["roof_microseconds"]
    return (
        f"{row['shape']} {row['product']:8s} {row['rows']:4d} rows {ours:8.4g} us "
        f"({100 * roof / ours:5.1f} % of the roof), xla {row['xla_microseconds']:8.4g} us"
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _weights(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, ...]:
    """What an op takes beside its rows."""
    return (WEIGHT_SCALE * jax.random.normal(key, shape, dtype),)


@functools.partial(jax.jit, static_argnames=("shape",))
def _int8_weights(key: jax.Array, shape: tuple[int, ...]) -> tuple[int8.Int8Rows]:
    """The same for one with weights of 8 bits."""
    inputs, *outputs = shape
    steps = jax.random.randint(key, (math.prod(outputs), inputs), -127, 128, jnp.int8)
    return (int8.Int8Rows(steps, jnp.full(steps.shape[:1], WEIGHT_SCALE / 127)),)


def _seconds(op: Op, x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> float:
    program = jax.jit(lambda x, weights: [op(x, *each) for each in weights])
    return jax_seconds(functools.partial(program, x, weights)) / len(weights)
