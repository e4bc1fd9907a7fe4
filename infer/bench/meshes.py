"""Decoding on meshes of devices: times, bytes on every device, and the tokens of one device.

The batch runs on one device first, which says what its tokens must be, and then on every mesh:
prefill and rounds of the draft's tree, and plain steps, once to compile and once for the clock. The
shape ``demo`` is the embedded target and draft over the held-out documents; other shapes have
random weights and prompts. In float32 tokens are the same everywhere; in bfloat16 sums in another
order may turn a near-tie. Rows hold from the whole context down to half of it. Bytes are those of
the weights on every device, and of the whole cache.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longspec_jax import PLAIN, GenerateResult, LongSpec, demo_prompts
from longspec_jax.cli import counted, mesh_text, settled
from longspec_jax.config import MESH_AXES
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.embedded import DRAFTS
from longspec_jax.sharding import make_mesh, param_shardings

from .arguments import SHAPES
from .models import random_model
from .report import Report, Row, run_header
from .timing import announce, rounded, step

CHUNK = 2048
"""Most tokens of a prefill step."""
CPU_SECONDS = 30
"""Of one mesh; a rough estimate for two shared cores."""
Prompts = list[list[int]]


def main(arguments: argparse.Namespace) -> None:
    """Measure every mesh, print, and write the files."""
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
    spec, prompts = prepare(arguments)
    expected = None
    with Report(header, arguments.json) as report:
        for axes, mesh in zip([{}, *wanted], [None, *meshes], strict=True):
            name = mesh_text(axes) or "one device"
            spread = spec if mesh is None else spread_over(spec, mesh)
            step(f"{name}: rounds")
            rounds = measure(spread, prompts, arguments.new_tokens, arguments.tree)
            step(f"{name}: plain steps")
            plain = measure(spread, prompts, arguments.new_tokens, PLAIN)
            expected = expected or plain.sequences
            row = {"mesh": dict(axes), **describe(spread, rounds, plain, expected)}
            report.add(row, line(name, row))


def prepare(arguments: argparse.Namespace) -> tuple[LongSpec, Prompts]:
    """The models on one device, and the prompts of all rows."""
    lengths = np.linspace(arguments.context, arguments.context / 2, arguments.batch).astype(int)
    if arguments.shape == "demo":
        demo = LongSpec.demo(draft=DRAFTS["demo"])
        texts = [demo.tokenizer(text)["input_ids"] for text in demo_prompts().values()]
        prompts = [texts[row % len(texts)][: int(size)] for row, size in enumerate(lengths)]
        return demo, prompts
    # Random weights know no positions, and must be able to decode at any context.
    config = dataclasses.replace(SHAPES[arguments.shape], max_positions=2**20)
    model = random_model(config)
    chunk = min(CHUNK, arguments.context)
    spec = LongSpec(config, model.params.target, model.draft, prefill_chunk=chunk)
    random = np.random.default_rng(0)
    return spec, [random.integers(0, config.vocab_size, size).tolist() for size in lengths]


def spread_over(spec: LongSpec, mesh: Mesh) -> LongSpec:
    """The models on a mesh."""
    [draft] = spec.drafts
    target, layer = (
        jax.device_put(params, param_shardings(mesh, params))
        for params in (spec.target_params, draft.params.layer)
    )
    config: Any = draft
    bound = LongSpecDraft.bind(config.config, layer, target, mesh=mesh)
    return dataclasses.replace(spec, target_params=target, draft=bound, mesh=mesh)


def measure(spec: LongSpec, prompts: Prompts, new_tokens: int, tree: Any) -> GenerateResult:
    """Decode the batch; calls leave compiling out of their times."""
    return spec.generate(prompts, max_new_tokens=new_tokens, tree=tree, eos_token_id=[])


def bytes_by_device(arrays: Any) -> list[int]:
    """What each device that holds any of the arrays holds of them, in the order of their ids."""
    held: dict[int, int] = {}
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return [held[device] for device in sorted(held)]


def describe(
    spec: LongSpec, rounds: GenerateResult, plain: GenerateResult, expected: Sequence[Any]
) -> dict[str, Any]:
    """The figures of one mesh."""
    spec_stats, plain_stats = rounds.stats, plain.stats
    return {
        "rows": len(rounds.sequences),
        "prompt_tokens": list(spec_stats.prompt_tokens),
        "prefill_seconds": rounded(spec_stats.prefill_seconds),
        "round_ms": rounded(1e3 * spec_stats.decode_seconds / max(spec_stats.target_passes)),
        "plain_ms": rounded(1e3 * plain_stats.decode_seconds / max(plain_stats.target_passes)),
        "tokens_per_second": rounded(spec_stats.decode_tokens / spec_stats.decode_seconds),
        "plain_tokens_per_second": rounded(plain_stats.decode_tokens / plain_stats.decode_seconds),
        "identical_fraction": _identical(rounds.sequences, expected),
        "plain_identical_fraction": _identical(plain.sequences, expected),
        "cache_bytes": spec_stats.memory.cache_bytes,
        "weight_bytes_by_device": bytes_by_device(spec.target_params),
    }


def _identical(rows: Sequence[Any], expected: Sequence[Any]) -> float:
    """The share of rows whose tokens are all as expected."""
    same = [one == other for one, other in zip(rows, expected, strict=True)]
    return sum(same) / len(same)


def line(name: str, row: Row) -> str:
    """A row for reading."""
    weights = " + ".join(f"{count / 1e6:.4g}" for count in row["weight_bytes_by_device"])
    return (
        f"{name:12} round {row['round_ms']} ms, plain {row['plain_ms']} ms, prefill "
        f"{row['prefill_seconds']} s; {row['identical_fraction']:.0%} of the rows identical to "
        f"plain decoding on one device; cache {row['cache_bytes'] / 1e6:.4g} MB, weights of each "
        f"device {weights} MB"
    )
