"""How fast the matrix products of a verification are, next to XLA's and the roofline.

The four products of a layer with random weights and few rows. One compiled program multiplies the
same rows by many distinct weights, together larger than the GPU's second-level cache, and returns
every product, and does so several times. The time of a product is the median
over repetitions of that total divided by the number of products. ``ours`` is what the model calls
(``longspec_jax.ops.matmul.few_rows``), its split-K partials not added up, since the norm that
reads them does so as it goes; ``xla`` is its definition in plain JAX. The gate of a SwiGLU
belongs to the product. ``--weights`` chooses how the weights are stored. ``one-order`` are whole,
and ``ours`` are the matmuls of ``batch_invariant`` with the LM head
(``longspec_jax.ops.matmul.ordered``). ``int8`` are those of a
draft in 8 bits and its LM head; ``fp8``, ``fp8-blocks`` and ``w4a16`` those of a quantised target,
with a scale for each output, for 128 x 128 weights, and for 128 inputs of an output
(``longspec_jax.ops.matmul.quantised``). The roofline is the time of reading
weights and scales once at the bandwidth measured in this run.
"""

import argparse
import functools
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.cli import settled
from longspec_jax.config.target import TargetConfig
from longspec_jax.ops.matmul import few_rows, ordered, quantised
from longspec_jax.ops.matmul.packed_shares import packed_params
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix

from .arguments import SHAPES
from .models import WEIGHT_SCALE, check_memory
from .report import Report, run_header
from .stored import random_matrix
from .timing import jax_seconds, measure_roofline, rounded

SHOWN = (
    "shape stored product rows ours_microseconds roof_microseconds ours_gb_per_s xla_microseconds"
).split()
DISTINCT_BYTES = 240e6
"""Weights in turn: four times the second-level cache of an H200."""
TURNS = 16
"""Times that a program goes through all of them, so that its launch does not count."""

Op = Callable[..., jax.Array]
"""``(x, weights) -> product``."""
GATED_XLA = functools.partial(few_rows.matmul_xla, gated=True)
OPS: dict[str, tuple[Op, Op]] = {
    "qkv": (few_rows.matmul, few_rows.matmul_xla),
    "out": (functools.partial(few_rows.matmul, split=True), few_rows.matmul_xla),
    "gate_up": (functools.partial(few_rows.matmul, gated=True), GATED_XLA),
    "down": (functools.partial(few_rows.matmul, split=True), few_rows.matmul_xla),
}
"""Ours and XLA's, by the product's place in a layer."""
ORDERED_OPS: dict[str, tuple[Op, Op]] = {
    "qkv": (ordered.matmul, few_rows.matmul_xla),
    "out": (functools.partial(ordered.matmul, split=True), few_rows.matmul_xla),
    "gate_up": (functools.partial(ordered.matmul, gated=True), GATED_XLA),
    "down": (functools.partial(ordered.matmul, split=True), few_rows.matmul_xla),
    "head": (ordered.head_matmul, few_rows.head_matmul_xla),
}
"""Those whose order of summation follows only from the weights' shape."""
QUANTISED_OPS: dict[str, tuple[Op, Op]] = {
    "qkv": (quantised.quantised_matmul, quantised.quantised_matmul_xla),
    "out": (
        functools.partial(quantised.quantised_matmul, split=True),
        quantised.quantised_matmul_xla,
    ),
    "gate_up": (
        functools.partial(quantised.quantised_matmul, gated=True),
        functools.partial(quantised.quantised_matmul_xla, gated=True),
    ),
    "down": (
        functools.partial(quantised.quantised_matmul, split=True),
        quantised.quantised_matmul_xla,
    ),
}
"""The same with the weights of a quantised target."""
HEAD = functools.partial(quantised.quantised_matmul, dtype=jnp.float32)
HEAD_XLA = functools.partial(quantised.quantised_matmul_xla, dtype=jnp.float32)
INT8_OPS = QUANTISED_OPS | {"head": (HEAD, HEAD_XLA)}
"""Those of a draft in 8 bits, which has an LM head of its own."""


def ops_of(weights: str) -> dict[str, tuple[Op, Op]]:
    """The products of a layer whose weights are stored so, one of ``WEIGHTS`` of the arguments."""
    own = {"whole": OPS, "one-order": ORDERED_OPS, "int8": INT8_OPS}
    return own.get(weights, QUANTISED_OPS)


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the files."""
    arguments = settled(arguments, jax.default_backend() == "cpu")
    products = [[*ops_of(weights)] for weights in arguments.weights]
    for shape in arguments.shape:
        shapes = weight_shapes(SHAPES[shape])
        present = [name for names in products for name in names if name in shapes]
        largest = max(math.prod(shapes[name]) for name in present)
        check_memory(f"a product of {shape}", 2 * 4 * largest)
    roofline = measure_roofline()
    method = (__doc__ or "").split("\n\n", 1)[1]
    header = run_header(jax.devices()[0].device_kind, method, **roofline.fields)
    with Report(header, arguments.json, SHOWN) as report:
        for shape in arguments.shape:
            for weights in arguments.weights:
                for row in measure(shape, arguments.rows, roofline.bytes_per_s, weights):
                    report.add(row)


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
    shape: str, rows: Iterable[int], bytes_per_s: float, stored: str = "whole"
) -> Iterable[dict[str, Any]]:
    """Time every product of a layer with every number of rows."""
    config = SHAPES[shape]
    dtype = jnp.dtype(config.dtype)
    shapes = weight_shapes(config)
    for name, ops in ops_of(stored).items():
        if name not in shapes:
            continue
        # An LM head, which the target's embedding may be, has its outputs first.
        table = stored == "one-order" and name == "head"
        draw = functools.partial(_drawn, stored, shapes[name][:: -1 if table else 1], dtype)
        leaves = jax.tree.leaves(jax.eval_shape(draw, 0))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        count = math.ceil(DISTINCT_BYTES / size) if jax.default_backend() == "gpu" else 2
        # Packing consumes what it packs.
        packed = [packed_params(draw(index), dtype) for index in range(count)]
        operands = {"ours": packed, "xla": [draw(index) for index in range(count)]}
        inputs = [
            jax.random.normal(jax.random.key(count), (n, shapes[name][0]), dtype) for n in rows
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            programs = {
                (label, len(x)): pool.submit(_compiled, op, x, operands[label])
                for label, op in zip(operands, ops, strict=True)
                for x in inputs
            }
        for x in inputs:
            times = {
                f"{label}_microseconds": rounded(
                    1e6 * _seconds(programs[label, len(x)].result(), x, each)
                )
                for label, each in operands.items()
            }
            yield {
                "shape": shape,
                "product": name,
                "weights": list(shapes[name]),
                "stored": stored,
                "int8": stored == "int8",
                "rows": len(x),
                "dtype": config.dtype,
                "roof_microseconds": rounded(1e6 * size / bytes_per_s),
                **times,
                "ours_gb_per_s": rounded(1e-3 * size / times["ours_microseconds"]),
            }


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(stored: str, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Random weights, as the ops of this kind take them."""
    key, (inputs, *outputs) = jax.random.key(seed, impl="rbg"), shape
    if stored in ("whole", "one-order"):
        return WEIGHT_SCALE * jax.random.normal(key, shape, dtype)
    if stored == "int8":
        codes = jax.random.randint(key, (*outputs, inputs), -127, 128, jnp.int8)
        return QuantisedMatrix(codes, jnp.full((*outputs, 1), WEIGHT_SCALE / 127))
    return random_matrix(
        key, stored=stored, out_axes=tuple(outputs), inputs=inputs, scale=WEIGHT_SCALE
    )


def _compiled(op: Op, x: jax.Array, weights: list[Any]) -> Callable[..., Any]:
    """A program that multiplies the rows by all weights, :data:`TURNS` times."""

    def turn(_: jax.Array, before: list[jax.Array], x: jax.Array, weights: Any) -> list[jax.Array]:
        # Nothing of a turn may be computed before it begins.
        x, _ = jax.lax.optimization_barrier((x, before))
        return [op(x, each) for each in weights]

    def turns(x: jax.Array, weights: list[Any]) -> list[jax.Array]:
        shapes = jax.eval_shape(lambda x, weights: [op(x, each) for each in weights], x, weights)
        none = [jnp.zeros(each.shape, each.dtype) for each in shapes]
        return jax.lax.fori_loop(0, TURNS, functools.partial(turn, x=x, weights=weights), none)

    return jax.jit(turns).lower(x, weights).compile()


def _seconds(program: Callable[..., Any], x: jax.Array, weights: list[Any]) -> float:
    return jax_seconds(functools.partial(program, x, weights)) / len(weights) / TURNS
