"""Measure how fast a draft is trained.

    python -m train.bench --shape=vicuna7b --mesh=fsdp=2
    python -m train.bench --shape=llama3-8b --length=4096 --draft=eagle3

Whole optimiser steps of the draft are timed on random weights and tokens of real shapes, without
data loading and checkpoints. One device always runs. Every mesh is compared with it, at the same
rows per device. flops_utilization: operations that no implementation can leave out / the rate of a
large bfloat16 matmul on the same device. step_bytes: memory of the compiled step on each device
beyond its arguments; the rest is weights, masters and moments.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from longspec_jax import cli, files
from longspec_jax.checks import Whole
from longspec_jax.config.known import TARGETS, TINY
from longspec_jax.config.target import TargetConfig
from longspec_jax.models.target import Target
from longspec_jax.provenance import provenance
from longspec_jax.recipes import DRAFTS, base_config, stage
from longspec_jax.sharding import make_mesh, param_shardings

from .arguments import from_config
from .config import RunConfig
from .drafts.base import Given
from .drafts.kinds import KINDS
from .losses import tokens_at_once
from .step import ROWS, Batch, initial_state, make_optimizer, make_step, state_shardings
from .target import mlp_tokens_at_once

SHAPES = {"tiny": TINY, **{name: known.config for name, known in TARGETS.items()}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    for axes in arguments.mesh or ():  # Refused before anything is measured.
        make_mesh(**axes)
    run(arguments)
    return cli.OK


def run(arguments: argparse.Namespace) -> None:
    """Measure every shape, length and mesh, print the rows, and write them to ``--json``."""
    rate = matmul_rate()
    kind = jax.devices()[0].device_kind
    header = {
        **provenance(f"{jax.device_count()} x {kind}"),
        "matmul_tflop_per_s": round(rate / 1e12, 1),
        "method": " ".join((__doc__ or "").split()),
    }
    print(f"{header['device']}; a large matmul reaches {rate / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in arguments.shape:
        for length in arguments.length:
            alone = None
            for axes in ({}, *(arguments.mesh or ())):
                row = measure(shape, length, axes, arguments)
                row["flops_utilization"] = _rounded(row.pop("flops_per_s") / rate)
                alone = alone or row["tokens_per_second"]
                row["efficiency"] = _rounded(row["tokens_per_second"] / row["gpus"] / alone)
                rows.append(row)
                print(line(row), flush=True)
                if arguments.json:
                    report = json.dumps({"header": header, "rows": rows}, indent=1)
                    files.replace(arguments.json, (report + "\n").encode())


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m train.bench", description=__doc__)
    add = parser.add_argument
    shapes = cli.several(cli.one_of([*SHAPES]), commas=True)
    add("--shape", **shapes, default=["vicuna7b"], help=f"target: one of {', '.join(SHAPES)}")
    add("--draft", choices=[*KINDS], default="longspec", help="kind of draft that is trained")
    lengths = cli.several(cli.number(Whole(2)), commas=True)
    add("--length", **lengths, default=[1024], help="tokens of a row")
    mesh_help = f"{cli.MESH_GRAMMAR}; repeat to measure several; one device if absent"
    add("--mesh", type=cli.mesh, action="append", metavar="AXIS=N,...", help=mesh_help)
    add(
        "--tokens",
        type=cli.COUNT,
        default=16384,
        help="tokens of a micro-batch on each device that holds rows",
    )
    add("--accumulation", type=cli.COUNT, default=4, help="micro-batches of a step")
    add("--steps", type=cli.COUNT, default=4, help="timed steps, after one warm-up step")
    add("--json", type=cli.result_file, help="also write the results to this file")
    return parser


def measure(
    shape: str, length: int, axes: Mapping[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time the steps of one setting."""
    mesh = make_mesh(**axes)
    config = dataclasses.replace(
        SHAPES[shape], max_positions=max(SHAPES[shape].max_positions, length)
    )
    rows = max(1, arguments.tokens // length)
    loss_chunk = tokens_at_once(config.vocab_size)
    mlp_chunk = mlp_tokens_at_once(rows * length)
    run = _run_config(arguments.draft, config, length)

    def count_tokens() -> np.ndarray:
        return np.ones(config.vocab_size, np.int64)

    target = random_target(config, mesh)
    given = Given(config, target, run.stages, run.seed, config.dtype, mesh, count_tokens)
    # Drawn below, and laid out as a step wants them, like those of a run.
    trainer, frozen, _ = KINDS[arguments.draft].begin(run.draft, given)
    objective = trainer.objective(run.stages[0], loss_chunk, mlp_chunk)
    optimizer = make_optimizer(run.optimizer)
    shardings = state_shardings(mesh, objective, optimizer)
    state = initial_state(objective, optimizer, shardings, seed=0)
    holders = mesh.shape["data"] * mesh.shape["fsdp"]
    rows *= holders
    sizes = arguments.accumulation, rows, length
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, sizes, np.int32)
    batch = jax.device_put(Batch(tokens, np.ones(sizes, np.float32)), NamedSharding(mesh, ROWS))
    step = make_step(objective, optimizer, 0, mesh, shardings)
    rate = np.float32(1e-4)
    jitted: Any = step
    compiled = jitted.lower(state, frozen, batch, rate).compile()
    state, values = compiled(state, frozen, batch, rate)
    jax.block_until_ready(values)
    begin = time.perf_counter()
    for _ in range(arguments.steps):
        state, values = compiled(state, frozen, batch, rate)
    jax.block_until_ready(values)
    seconds = (time.perf_counter() - begin) / arguments.steps
    memory = compiled.memory_analysis()
    return {
        "config": shape,
        "draft": arguments.draft,
        "stage": "short" if length <= 1024 else "long",
        "sequence": length,
        "gpus": mesh.size,
        "layout": cli.mesh_text(axes) or "one",
        "rows": rows,
        "accumulation": arguments.accumulation,
        "loss_chunk": loss_chunk,
        "mlp_chunk": mlp_chunk,
        "tokens_per_second": _rounded(tokens.size / seconds),
        "step_ms": _rounded(1e3 * seconds),
        "flops_per_s": objective.flops_per_token(length) * tokens.size / seconds / mesh.size,
        "peak_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "step_bytes": memory.temp_size_in_bytes,
        "loss": _rounded(float(values["loss"])),
    }


def _run_config(kind: str, target: TargetConfig, length: int) -> RunConfig:
    """A kind's usual settings; short rows of a LongSpec draft are at positions of long ones."""
    short = length <= 1024 and DRAFTS[kind].get("anchor_offset")
    offset = max(0, min(15_000, target.max_positions - length)) if short else 0
    values = base_config()
    values.draft = DRAFTS[kind]
    values.update(
        target="random",
        data=dict(files="random"),
        stages=dict(bench=stage(length, 1, 1e-4, max_offset=offset)),
    )
    return from_config(values.to_dict())


def random_target(config: TargetConfig, mesh: Mesh) -> Any:
    """Random weights, every device drawing its own shards, one array after the other."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    shapes = jax.eval_shape(
        lambda key: Target(config).init(key, tokens, method="initialize")["params"],
        jax.random.key(0),
    )
    leaves, tree = jax.tree.flatten(shapes)
    shardings = jax.tree.leaves(param_shardings(mesh, shapes))
    drawn = [
        _drawer(leaf.shape, leaf.dtype.name, sharding)(jax.random.key(number, impl="rbg"))
        for number, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
    ]
    return jax.tree.unflatten(tree, drawn)


@functools.cache
def _drawer(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Any:
    """A compiled generator of one array; layers of equal shape share it."""

    def draw(key: jax.Array) -> jax.Array:
        values = 0.02 * jax.random.normal(key, shape, jnp.dtype(dtype))
        return values if len(shape) > 1 else jnp.ones(shape, jnp.dtype(dtype))

    return jax.jit(draw, out_shardings=sharding)


def matmul_rate() -> float:
    """Operations per second of a large matmul on the first device, bfloat16 on a GPU."""
    side = 8192 if jax.default_backend() == "gpu" else 256
    a, b = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul)
    jax.block_until_ready(matmul(a, b))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        results = [matmul(a, b) for _ in range(10)]
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - begin) / 10)
    return 2 * side**3 / sorted(seconds)[2]


def line(row: Mapping[str, Any]) -> str:
    """A row for reading."""
    return (
        f"{row['config']} {row['sequence']} {row['layout']}: {row['tokens_per_second']} tokens/s, "
        f"step {row['step_ms']} ms, {row['flops_utilization']:.1%} of the matmul rate, "
        f"{row['efficiency']:.2f} of one device's speed per device; "
        f"{row['peak_bytes'] / 1e9:.1f} GB per device, {row['step_bytes'] / 1e9:.1f} GB of it "
        "while the step runs"
    )


def _rounded(value: float) -> float:
    """Four significant digits: more would not repeat."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
