"""Measure how fast a draft is trained.

Whole optimiser steps of the draft are timed on random weights and tokens of real shapes, without
data loading and checkpoints. One device always runs. Every mesh is compared with it, at the same
rows per device. step_bytes: memory of the compiled step on each device
beyond its arguments; the rest is weights, masters and moments.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from longspec_jax.cli import settled
from longspec_jax.config.target import TargetConfig
from longspec_jax.recipes import base_config, stage
from longspec_jax.sharding import make_mesh
from train.arguments import from_config
from train.config import RunConfig
from train.drafts.base import TrainContext
from train.drafts.kinds import KINDS
from train.losses import tokens_at_once
from train.step import ROWS, Batch, initial_state, make_optimizer, make_step, state_shardings
from train.target import mlp_tokens_at_once

from .arguments import SHAPES, mesh_text
from .models import random_target
from .report import Report, run_header
from .timing import rounded

SHOWN = (
    "config draft sequence layout tokens_per_second step_ms efficiency peak_bytes step_bytes"
).split()


def main(arguments: argparse.Namespace) -> None:
    """Measure every shape, length and mesh, print the rows, and write them to ``--json``."""
    for axes in arguments.mesh or ():  # Refused before anything is measured.
        make_mesh(**axes)
    arguments = settled(arguments, jax.default_backend() == "cpu")
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    header = run_header(device, __doc__ or "")
    with Report(header, arguments.json, SHOWN) as report:
        for shape in arguments.shape:
            for length in arguments.length:
                alone = None
                for axes in ({}, *(arguments.mesh or ())):
                    row = measure(shape, length, axes, arguments)
                    alone = alone or row["tokens_per_second"]
                    row["efficiency"] = rounded(row["tokens_per_second"] / row["gpus"] / alone)
                    report.add(row)


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

    target = random_target(config, mesh=mesh)
    given = TrainContext(config, target, run.stages, run.seed, config.dtype, mesh, count_tokens)
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
        "layout": mesh_text(axes) or "one",
        "rows": rows,
        "accumulation": arguments.accumulation,
        "loss_chunk": loss_chunk,
        "mlp_chunk": mlp_chunk,
        "tokens_per_second": rounded(tokens.size / seconds),
        "step_ms": rounded(1e3 * seconds),
        "peak_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "step_bytes": memory.temp_size_in_bytes,
        "loss": rounded(float(values["loss"])),
    }


def _run_config(kind: str, target: TargetConfig, length: int) -> RunConfig:
    """A kind's usual settings; short rows of a LongSpec draft are at positions of long ones."""
    short = length <= 1024 and getattr(KINDS[kind].settings, "anchor_offset", False)
    offset = max(0, min(15_000, target.max_positions - length)) if short else 0
    values = base_config()
    values.draft = dict(kind=kind)
    values.update(
        target="random",
        data=dict(files="random"),
        stages=dict(bench=stage(length, 1, 1e-4, max_offset=offset)),
    )
    return from_config(values.to_dict())
