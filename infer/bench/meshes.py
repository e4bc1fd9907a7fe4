"""Decoding on meshes of devices: times, bytes on every device, and the tokens of one device.

The batch runs on one device first, which says what its tokens must be, and then on every mesh:
prefill, rounds of the draft's tree, and plain steps, once to compile and once for the clock. The
shape ``demo`` is the embedded target and draft over the held-out documents; other shapes have
random weights and prompts. In float32 tokens are the same everywhere; in bfloat16 sums that are
added up in another order may turn a near tie. Rows hold from the whole context down to half of it.
Bytes are read off the arrays of every device.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from longspec_jax import LongSpec, demo_prompts
from longspec_jax.config import MESH_AXES
from longspec_jax.decoding import engine
from longspec_jax.decoding.prefill import prefill
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.embedded import DRAFTS
from longspec_jax.generation.job import Shape
from longspec_jax.mesh_argument import written
from longspec_jax.sharding import make_mesh, param_shardings

from ..wording import counted
from .arguments import settled
from .models import Model, greedy_request, random_model
from .progress import announce, step
from .report import Report, Row, run_header
from .shapes import SHAPES
from .timing import rounded

CHUNK = 2048
"""Most tokens of a prefill step."""
CPU_SECONDS = 30
"""Of one mesh; a rough estimate for two shared cores."""


class Batch(NamedTuple):
    """The prompts of all rows, and the static sizes of decoding them."""

    tokens: np.ndarray
    """``[B, P]``, right-padded."""
    length: np.ndarray
    """``[B]``."""
    new_tokens: int
    shape: Shape


class Pass(NamedTuple):
    """One decoding of a batch."""

    tokens: np.ndarray
    """``[B, new tokens]``."""
    prefill_seconds: float
    seconds: float
    rounds: int
    cache_bytes: list[int]
    """Of every device, before the first round."""


def main(arguments: argparse.Namespace) -> None:
    """Measure every mesh, print, and write what was asked for."""
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    wanted = arguments.mesh or [{axis: 2} for axis in MESH_AXES]
    meshes = [make_mesh(**axes) for axes in wanted]
    if cpu:
        announce(counted(1 + len(meshes), "layout"), CPU_SECONDS * (1 + len(meshes)))
    header = run_header(
        f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        __doc__ or "",
        shape=arguments.shape,
        dtype=SHAPES[arguments.shape].dtype,
        tree=str(arguments.tree),
    )
    model, batch = prepare(arguments)
    expected = None
    with Report(header, arguments.json) as report:
        for axes, mesh in zip([{}, *wanted], [None, *meshes], strict=True):
            name = written(axes) or "one device"
            spread = model if mesh is None else spread_over(model, mesh)
            step(f"{name}: rounds")
            rounds = measure(spread, spread.drafter(arguments.tree), batch)
            step(f"{name}: plain steps")
            plain = measure(spread, NoDraft(), batch)
            if expected is None:
                expected = plain.tokens
            row = {"mesh": dict(axes), **describe(spread, batch, rounds, plain, expected)}
            report.add(row, line(name, row))


def prepare(arguments: argparse.Namespace) -> tuple[Model, Batch]:
    """The model on one device, and what it decodes."""
    lengths = np.linspace(arguments.context, arguments.context / 2, arguments.batch).astype(int)
    if arguments.shape == "demo":
        demo = LongSpec.demo(draft=DRAFTS["demo"])
        [draft] = demo.drafts
        params = Params(demo.target_params, draft.params)
        model = Model(demo.target_config, CachedTarget(demo.target_config), params, draft)
        texts = [demo.tokenizer(text)["input_ids"] for text in demo_prompts().values()]
        prompts = [texts[row % len(texts)][: int(size)] for row, size in enumerate(lengths)]
    else:
        # Random weights know no positions, and must be able to decode at any context.
        config = dataclasses.replace(SHAPES[arguments.shape], max_positions=2**20)
        model = random_model(config)
        random = np.random.default_rng(0)
        prompts = [random.integers(0, config.vocab_size, size).tolist() for size in lengths]
    length = np.asarray([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(length.max())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    new, levels = arguments.new_tokens, arguments.tree.num_levels
    return model, Batch(tokens, length, new, Shape.for_call(tokens.shape[1], new, levels, CHUNK))


def spread_over(model: Model, mesh: Mesh) -> Model:
    """The model on a mesh."""
    draft: Any = model.draft
    target, layer = (
        jax.device_put(params, param_shardings(mesh, params))
        for params in (model.params.target, draft.params.layer)
    )
    draft = LongSpecDraft.bind(draft.config, layer, target, mesh=mesh)
    static = CachedTarget(model.config, mesh=mesh.abstract_mesh)
    return Model(model.config, static, Params(target, draft.params), draft)


def measure(model: Model, drafter: Drafter, batch: Batch) -> Pass:
    """Decode the batch, the second time for the clock."""
    _decode(model, drafter, batch)
    return _decode(model, drafter, batch)


def _decode(model: Model, drafter: Drafter, batch: Batch) -> Pass:
    rows = len(batch.length)
    begin = time.perf_counter()
    state = prefill(
        *(model.target, drafter, model.params, batch.tokens, batch.length),
        greedy_request(rows, batch.new_tokens),
        capacity=batch.shape.capacity,
        max_emitted=batch.shape.max_emitted,
        chunk=batch.shape.chunk,
    )
    jax.block_until_ready(state)
    prefilled, held = time.perf_counter(), bytes_by_device(state.rows.cache)
    state: SpecState = jax.block_until_ready(
        engine.decode(model.target, drafter, model.params, state)
    )
    seconds = time.perf_counter() - prefilled
    tokens = np.asarray(state.record.output)[:, : batch.new_tokens]
    rounds = int(np.max(state.record.rounds))
    return Pass(tokens, prefilled - begin, seconds, rounds, held)


def bytes_by_device(arrays: Any) -> list[int]:
    """What each device that holds any of the arrays holds of them, in the order of their ids."""
    held: dict[int, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return [held[device] for device in sorted(held)]


def describe(
    model: Model, batch: Batch, rounds: Pass, plain: Pass, expected: np.ndarray
) -> dict[str, Any]:
    """The figures of one mesh."""
    rows, emitted = len(batch.length), batch.new_tokens - 1
    return {
        "rows": rows,
        "prompt_tokens": batch.length.tolist(),
        "prefill_seconds": rounded(rounds.prefill_seconds),
        "round_ms": rounded(1e3 * rounds.seconds / rounds.rounds),
        "plain_ms": rounded(1e3 * plain.seconds / plain.rounds),
        "tokens_per_second": rounded(rows * emitted / rounds.seconds),
        "plain_tokens_per_second": rounded(rows * emitted / plain.seconds),
        "identical_fraction": _identical(rounds.tokens, expected),
        "plain_identical_fraction": _identical(plain.tokens, expected),
        "cache_bytes_by_device": rounds.cache_bytes,
        "weight_bytes_by_device": bytes_by_device(model.params.target),
    }


def _identical(tokens: np.ndarray, expected: np.ndarray) -> float:
    """The share of rows whose tokens are all as expected."""
    return float((tokens == expected).all(axis=1).mean())


def line(name: str, row: Row) -> str:
    """A row for reading."""
    return (
        f"{name:12} round {row['round_ms']} ms, plain {row['plain_ms']} ms, prefill "
        f"{row['prefill_seconds']} s; {row['identical_fraction']:.0%} of the rows identical to "
        f"plain decoding on one device; per device {_megabytes(row['cache_bytes_by_device'])} of "
        f"cache, {_megabytes(row['weight_bytes_by_device'])} of weights"
    )


def _megabytes(counts: Sequence[int]) -> str:
    return " + ".join(f"{count / 1e6:.4g}" for count in counts) + " MB"
