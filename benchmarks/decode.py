"""How fast whole rounds are, from a filled cache, at a given acceptance length.

Weights and cached keys and values are random and of the real shapes. Plain decoding and speculation
each run in one compiled loop of the engine's rounds, from the first token to the last; only the
number of accepted tokens is drawn, with mean ``acceptance_wanted``, instead of earned
(``benchmarks.rounds``). Times are medians over repetitions, each from a dispatch to the end of
the device's work, after one run that warms up; tokens per second are tokens over that time.

``acceptance length`` is emitted tokens over target forwards, the bonus included. The roofline of a
plain step is its bytes (weights that are read, cached keys and values; on a mesh those of one
device) over the bandwidth measured in this run. ``draft`` and ``verify`` are timed apart from the
round, in programs of their own; ``rest`` is what they leave of it: accept, commit, bookkeeping, the
loop. It can be negative, since programs of their own may be scheduled differently. ``--prefill``
also times the target's reading of a prompt as long as the context, in chunks, in a program of its
own.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from infer.output import tree_fields
from infer.wording import command_words
from longspec_jax import make_mesh
from longspec_jax.cli import as_options, settled
from longspec_jax.compilation import keep_programs
from longspec_jax.config.target import TargetConfig
from longspec_jax.decoding.cache import cache_bytes
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.longspec import LongSpecDraft
from longspec_jax.ops.placement import tree_bytes

from .arguments import SHAPES, mesh_text
from .models import Model, check_memory, draft_options, draft_state, random_model
from .report import Report, run_header
from .rounds import PARTS, Bench, LoopTime, Setting, acceptance_edges
from .stored import refuse_experts
from .timing import measure_roofline, rounded, step

SHOWN = (
    "shape weights mesh batch context tree budget tokens_per_second plain_tokens_per_second "
    "speed_up acceptance_length round_ms draft_ms verify_ms rest_ms round_over_plain "
    "plain_ms_per_token plain_percent_of_roof prefill_seconds prefill_tokens_per_second"
).split()


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the files."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    arguments = settled(arguments, jax.default_backend() == "cpu")
    keep_programs()
    settings = all_settings(arguments)
    for setting in settings:
        needed = setting.device_bytes // (arguments.mesh or {}).get("tp", 1)
        check_memory(f"{setting.shape} with {setting.context} cached tokens", needed)
    mesh = make_mesh(**arguments.mesh) if arguments.mesh else None
    roofline = measure_roofline()
    header = run_header(jax.devices()[0].device_kind, __doc__ or "", **roofline.fields)
    options = as_options(arguments.draft_option)
    with Report(header, arguments.json, SHOWN) as report:
        for shape, of_shape in itertools.groupby(settings, lambda setting: setting.shape):
            step(f"drawing the weights of {shape}")
            model = random_model(
                dataclasses.replace(SHAPES[shape], kv_dtype=arguments.kv_dtype),
                arguments.attention,
                kind=arguments.draft,
                options=options,
                batch_invariant=arguments.batch_invariant,
                weights=arguments.weights,
                mesh=mesh,
            )
            for setting in of_shape:
                row = {"mesh": mesh_text(arguments.mesh or {}), "draft_options": options}
                row |= measure(setting, model, roofline.bytes_per_s)
                report.add(row)
            del model  # Before the next one is drawn.


def all_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Every point that the arguments ask for, those of a shape in a row.

    Raises:
      ValueError: naming the option that asks for what cannot be.
    """
    try:
        for tree in arguments.tree:
            acceptance_edges(arguments.acceptance, tree)
    except ValueError as error:
        raise ValueError(f"--acceptance: {error}") from None
    for shape in arguments.shape:
        if arguments.weights != "whole":
            refuse_experts(SHAPES[shape], arguments.weights)
        if arguments.prefill and arguments.prefill > min(arguments.context):
            raise ValueError(
                f"--prefill: chunks of {arguments.prefill} tokens are longer than the prompt, "
                f"--context={min(arguments.context)}"
            )
        with command_words():
            draft_options(arguments.draft, as_options(arguments.draft_option), SHAPES[shape])
    return [
        Setting(
            shape=shape,
            context=context,
            batch=batch,
            tree=tree,
            new_tokens=arguments.new_tokens,
            acceptance=arguments.acceptance,
            repetitions=arguments.repetitions,
            turns=arguments.turns,
            weights=arguments.weights,
            chunk=arguments.prefill,
        )
        for shape in dict.fromkeys(arguments.shape)
        for batch in arguments.batch
        for context in arguments.context
        for tree in arguments.tree
    ]


def measure(setting: Setting, model: Model, bytes_per_s: float) -> dict[str, Any]:
    """All figures of one setting."""
    bench = Bench.prepare(setting, model.proposing(setting.tree))
    drafter, plain = bench.drafter, NoDraft()
    edges = acceptance_edges(setting.acceptance, setting.tree)
    place = f"{setting.shape}, {setting.context} cached tokens, batch {setting.batch}"
    step(f"{place}: compiling")
    begin = time.perf_counter()
    thunks = [bench.loop(plain), bench.loop(drafter, edges)]
    thunks += [bench.part(part, drafter) for part in PARTS]
    if setting.chunk:
        thunks.append(bench.prompt(setting.chunk))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        plain_program, round_program, *programs = pool.map(lambda compile_: compile_(), thunks)
    compile_seconds = round(time.perf_counter() - begin, 1)
    step(f"{place}: timing plain decoding")
    plain_loop = bench.time_loop(plain_program, plain)
    step(f"{place}: timing rounds")
    round_loop = bench.time_loop(round_program, drafter, edges)
    step(f"{place}: timing the parts of a round")
    times = {
        part.__name__: bench.time_part(program, drafter)
        for part, program in zip(PARTS, programs[: len(PARTS)], strict=True)
    }
    row = {
        **describe(bench),
        "compile_seconds": compile_seconds,
        **results(setting, plain_loop, round_loop, times),
    }
    if setting.chunk:
        step(f"{place}: timing a prompt")
        seconds = bench.time_prompt(programs[-1])
        tokens = setting.batch * (setting.context // setting.chunk) * setting.chunk
        row |= {
            "prefill_chunk": setting.chunk,
            "prefill_seconds": rounded(seconds),
            "prefill_tokens_per_second": rounded(tokens / seconds),
        }
    floor = row["plain_step_bytes"] / bytes_per_s
    row["plain_percent_of_roof"] = rounded(100e3 * floor / row["plain_ms_per_token"])
    return row


def describe(bench: Bench) -> dict[str, Any]:
    """What is measured, and its bytes."""
    setting, model = bench.setting, bench.model
    config, weights = model.config, tree_bytes(model.params.target)
    itemsize = jnp.dtype(config.dtype).itemsize
    table = config.vocab_size * config.model_width * itemsize
    read = weights - (0 if config.tied_embeddings else table)
    read -= _idle(config, model.params.target, setting.batch)
    seen = cache_bytes(config, setting.batch, setting.context + setting.new_tokens // 2)
    state = draft_state(model, bench.drafter, setting.batch, setting.capacity)
    own = read // model.target.width_shares + seen // bench.shardings.cache_shards
    return {
        "shape": setting.shape,
        "context": setting.context,
        "batch": setting.batch,
        **tree_fields(setting.tree),
        "new_tokens": setting.new_tokens,
        "dtype": config.dtype,
        "attention": model.target.attention or "automatic",
        "weights": setting.weights,
        "batch_invariant": model.target.batch_invariant,
        "kv_dtype": config.kv_dtype,
        "draft": model.draft.name,
        **_longspec_options(model.draft),
        "target_bytes": weights,
        "draft_bytes": tree_bytes(model.draft.own_params),
        "cache_bytes": cache_bytes(config, setting.batch, setting.capacity),
        "draft_state_bytes": tree_bytes(state),
        "plain_step_bytes": own,
    }


def _idle(config: TargetConfig, params: Any, rows: int) -> int:
    """Bytes of experts that no row of a plain step chooses, if choices are independent.

    What is read of the others is the roofline of a kernel that reads each of them once.
    """
    idle = 0.0
    for index in range(config.num_layers):
        if (experts := config.layer(index).experts) is not None:
            mlp = params[f"layers_{index}"]["mlp"]
            unchosen = (1 - experts.chosen / experts.count) ** rows
            idle += unchosen * tree_bytes([mlp["expert_gate_up"], mlp["expert_down"]])
    return round(idle)


def _longspec_options(draft: Draft) -> dict[str, Any]:
    """The options of a LongSpec draft."""
    if not isinstance(draft, LongSpecDraft):
        return {}
    return {"draft_vocabulary": draft.params.proposable, "draft_int8": draft.params.int8}


def results(
    setting: Setting, plain: LoopTime, spec: LoopTime, times: dict[str, float]
) -> dict[str, Any]:
    """The figures of a row, in milliseconds and tokens per second."""
    plain_step, round_ = plain.seconds / plain.rounds, spec.seconds / spec.rounds
    speed, plain_speed = spec.emitted / spec.seconds, plain.emitted / plain.seconds
    return {
        "plain_ms_per_token": rounded(1e3 * plain_step),
        "round_ms": rounded(1e3 * round_),
        "round_over_plain": rounded(round_ / plain_step),
        "acceptance_length": rounded(spec.emitted / spec.row_rounds),
        "tokens_per_second": rounded(speed),
        "plain_tokens_per_second": rounded(plain_speed),
        "speed_up": rounded(speed / plain_speed),
        **{f"{name}_ms": rounded(1e3 * seconds) for name, seconds in times.items()},
        "rest_ms": rounded(1e3 * (round_ - sum(times.values()))),
        "acceptance_wanted": rounded(setting.acceptance),
    }
