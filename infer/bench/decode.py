"""How fast whole rounds are, from a filled cache, at a given acceptance length.

Weights and cached keys and values are random and of the real shapes. Plain decoding and speculation
run in the engine's own compiled loop, from the first token to the last; only the number of accepted
tokens is drawn, with the wanted mean, instead of earned (``infer.bench.simulated``). That mean,
``acceptance_wanted``, depends on the verified nodes: ``--acceptance``, ``acceptance_of_all_nodes``,
is that of the whole tree, and a budget (``@48``) keeps of it what it kept on the demo
(``infer.bench.kept_acceptance``); ``--histogram`` is drawn as it is given. Times are medians over
repetitions, each from a dispatch to the end of the device's work, after one run that warms up;
tokens per second are tokens over that time and no product of other figures.

``acceptance length`` is emitted tokens over target passes, the bonus included. The roof of a plain
step is its bytes (weights that are read, cached keys and values) over the bandwidth measured in
this run. ``draft`` and ``verify`` are timed apart from the round, in programs of their own
(``infer.bench.parts``); ``rest`` is what they leave of it: walk, commit, bookkeeping, the loop.
``streaming`` drives the same rounds from Python and reads every one, as the library streams, and
``stepwise`` without launching ahead of what was read (``infer.bench.streaming``). ``adaptive`` is
decoding that chooses its tree by the clock, and here nothing is simulated: a random draft is as
useless as a draft can be (``infer.bench.adaptive``).

``lengths`` are the committed tokens of the shortest and of the longest row. They are the context,
unless ``--ragged`` spreads the rows evenly from all of it to half of it; bytes are those of the
actual lengths.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.decoding import engine
from longspec_jax.decoding.cache import cache_bytes
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Rows
from longspec_jax.drafters.base import NoDraft
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.sizes import shown_bytes

from ..tree_json import tree_fields, tree_of
from ..wording import counted
from . import parts as parts_lib
from .adaptive import time_adaptive
from .arguments import settled
from .charts import brief
from .decode_setting import Bench, Setting, all_settings, rough_seconds, setting_bytes
from .kernel_profile import profile
from .models import Model, check_memory, draft_state, random_model
from .prefill_time import time_prefill
from .progress import announce, step
from .report import Report, run_header
from .shapes import SHAPES
from .simulated import simulated_decode
from .streaming import read_all, simulated_round, stream, stream_by_steps
from .timing import measure_roof, rounded


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    settings = all_settings(arguments)
    for setting in settings:
        check_memory(
            f"{setting.shape} with {setting.context} cached tokens", setting_bytes(setting)
        )
    if cpu:
        shapes = ", ".join(dict.fromkeys(setting.shape for setting in settings))
        work = f"{counted(len(settings), 'case')} of the shape {shapes}"
        announce(work, sum(map(rough_seconds, settings)))
    device, roof = jax.devices()[0].device_kind, measure_roof()
    header = run_header(
        device,
        __doc__ or "",
        roof_tb_per_s=roof.bytes_per_s / 1e12,
        roof_tflop_per_s=roof.operations_per_s / 1e12,
    )
    with Report(header, arguments.json, arguments.chart) as report:
        for shape, of_shape in itertools.groupby(settings, lambda setting: setting.shape):
            step(f"drawing the weights of {shape}")
            model = random_model(
                SHAPES[shape],
                arguments.attention,
                drafter=arguments.drafter,
                options=dict(arguments.drafter_option or ()),
            )
            for setting in of_shape:
                row = measure(setting, model, roof.bytes_per_s, arguments)
                report.add(row, line(row))
            del model  # Before the next one is drawn.
        for row in report.rows:
            print(f"\n{verdict(row, device)}")


def measure(
    setting: Setting, model: Model, bytes_per_s: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All figures of one setting."""
    bench = Bench.prepare(setting, model)
    drafter, plain = bench.drafter, NoDraft()
    row = {
        **describe(bench),
        "drafter_options": dict(arguments.drafter_option or ()),
        "acceptance_of_all_nodes": arguments.acceptance if arguments.histogram is None else None,
    }
    parts = {"draft": parts_lib.draft, "verify": parts_lib.verify}
    if arguments.parts:
        parts |= {
            "verify_products": parts_lib.verify_products,
            "verify_attention": parts_lib.verify_attention,
            "draft_cross": parts_lib.draft_cross,
            "draft_head": parts_lib.draft_head,
            "draft_choice": parts_lib.draft_choice,
        }
    place = f"{setting.shape}, {setting.context} cached tokens, batch {setting.batch}"
    step(f"{place}: compiling")
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        state = bench.state(drafter)

        def begin_compiling(function: Callable[..., Any], *rest: Any) -> Any:
            return pool.submit(bench.compile, function, *rest, state=state)

        def begin_part(function: Callable[..., Any]) -> Any:
            return pool.submit(bench.compile, function, state=state.rows)

        simulated = model.target, drafter, 0, setting.lengths.edges
        loops = {
            "plain": pool.submit(
                bench.compile, engine.decode, model.target, plain, state=bench.state(plain)
            ),
            "round": begin_compiling(simulated_decode, *simulated),
        }
        if arguments.streaming:
            loops["streaming"] = begin_compiling(simulated_round, *simulated)
        programs = {
            name: begin_part(jax.jit(part(model.target, drafter, setting.turns)))
            for name, part in parts.items()
        }
        committing = begin_part(
            jax.jit(parts_lib.commit(model.target, drafter, setting.turns), donate_argnums=(1,))
        )
    row["compile_seconds"] = round(time.perf_counter() - begin, 1)
    step(f"{place}: timing plain decoding")
    plain_loop = time_loop(bench, loops["plain"].result(), plain)
    step(f"{place}: timing rounds")
    edges = setting.lengths.edges
    round_loop = time_loop(bench, loops["round"].result(), drafter, edges)
    if arguments.streaming:
        ways = {
            "streaming": stream,
            "stepwise": stream_by_steps,
        }
        for name, way in ways.items():
            program = read_by(way, functools.partial(loops["streaming"].result(), edges))
            row |= streaming(name, round_loop, time_loop(bench, program, drafter))
    if arguments.adaptive:
        row |= time_adaptive(bench, plain_loop.seconds / plain_loop.rounds)
    step(f"{place}: timing the parts of a round")
    rows = bench.state(drafter).rows
    times = {name: time_part(bench, program.result(), rows) for name, program in programs.items()}
    times["commit"] = time_commit(bench, committing.result(), rows)
    row |= results(setting, plain_loop, round_loop, times)
    floor = row["plain_step_bytes"] / bytes_per_s
    row["plain_percent_of_roof"] = rounded(100e3 * floor / row["plain_ms_per_token"])
    folder = None
    if arguments.profile:
        folder = arguments.profile / f"{setting.shape}_{setting.context}_{setting.batch}"
        profile(bench, loops["round"].result(), drafter, folder / "round", edges)
        profile(bench, loops["plain"].result(), plain, folder / "plain")
    if arguments.prefill:
        row |= time_prefill(bench, arguments.prefill, folder and folder / "prefill")
    return row


def describe(bench: Bench) -> dict[str, Any]:
    """What is measured, and its bytes."""
    setting, model = bench.setting, bench.model
    config, weights = model.config, tree_bytes(model.params.target)
    itemsize = jnp.dtype(config.dtype).itemsize
    table = config.vocab_size * config.model_width * itemsize
    read = weights - (0 if config.tied_embeddings else table)
    seen = sum(cache_bytes(config, 1, row + setting.new_tokens // 2) for row in setting.contexts)
    return {
        "shape": setting.shape,
        "context": setting.context,
        "lengths": [min(setting.contexts), max(setting.contexts)],
        "batch": setting.batch,
        **tree_fields(setting.tree),
        "new_tokens": setting.new_tokens,
        "dtype": config.dtype,
        "attention": model.target.attention or "automatic",
        "drafter": model.draft.name,
        **_longspec_options(model.draft),
        "target_bytes": weights,
        "draft_bytes": tree_bytes(model.draft.own_params),
        "cache_bytes": cache_bytes(config, setting.batch, setting.capacity),
        "draft_state_bytes": _state_bytes(bench),
        "plain_step_bytes": read + seen,
    }


def _state_bytes(bench: Bench) -> int:
    """Bytes of the drafter's state, with room for all tokens."""
    setting = bench.setting
    return tree_bytes(draft_state(bench.model, bench.drafter, setting.batch, setting.capacity))


def _longspec_options(draft: Draft) -> dict[str, Any]:
    """What was chosen about a LongSpec draft."""
    if not isinstance(draft, LongSpecDraft):
        return {}
    params = draft.params
    return {
        "draft_vocabulary": params.proposable,
        "draft_int8": params.int8,
    }


@dataclasses.dataclass(frozen=True)
class LoopTime:
    """A whole decode, timed."""

    seconds: float
    rounds: int
    """Target passes: the most that any row needed."""
    emitted: int
    """Tokens of all rows, the one drawn from the prefill not counted."""
    row_rounds: int
    """Target passes summed over rows, each as long as it was not done."""


def time_loop(
    bench: Bench, program: Callable[..., SpecState], drafter: Any, *given: Any
) -> LoopTime:
    """Median seconds of decoding the setting's tokens.

    Args:
      bench: the setting, its model and its cache.
      program: takes ``given``, parameters and state, which it is donated.
      drafter: of the program.
      *given: what the program takes first.
    """

    def decode() -> tuple[SpecState, float]:
        state = jax.block_until_ready(bench.state(drafter))
        begin = time.perf_counter()
        state = jax.block_until_ready(program(*given, bench.model.params, state))
        seconds = time.perf_counter() - begin
        bench.cache = state.rows.cache
        return state, seconds

    last, _ = decode()  # What the first run does besides is not counted.
    seconds = []
    for _ in range(bench.setting.repetitions):
        last, elapsed = decode()
        seconds.append(elapsed)
    rounds, emitted = np.asarray(last.record.rounds), np.asarray(last.record.emitted)
    return LoopTime(
        statistics.median(seconds),
        int(rounds.max()),
        int(emitted.sum()) - len(emitted),
        int(rounds.sum()),
    )


def read_by(way: Callable[..., Any], round_program: Callable[..., Any]) -> Callable[..., SpecState]:
    """A whole decode whose every round is launched and read from Python.

    Args:
      way: ``streaming.stream`` or its twin.
      round_program: the compiled round.
    """

    def program(params: Any, state: SpecState) -> SpecState:
        advance = functools.partial(round_program, params)
        return read_all(way(advance, state))

    return program


def streaming(name: str, loop: LoopTime, read: LoopTime) -> dict[str, Any]:
    """What reading every round costs over the loop on the device."""
    read_round, round_ = read.seconds / read.rounds, loop.seconds / loop.rounds
    return {
        f"{name}_round_ms": rounded(1e3 * read_round),
        f"{name}_overhead_percent": rounded(100 * (read_round / round_ - 1)),
    }


def time_part(bench: Bench, program: Callable[..., Any], rows: Rows) -> float:
    """Median seconds of one turn of a part that leaves the rows alone."""
    seconds = []
    for _ in range(bench.setting.repetitions + 1):
        begin = time.perf_counter()
        jax.block_until_ready(program(bench.model.params, rows))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) / bench.setting.turns


def time_commit(bench: Bench, program: Callable[..., Rows], rows: Rows) -> float:
    """Median seconds of one commit; the rows are used up, their cache kept."""
    seconds = []
    for _ in range(bench.setting.repetitions + 1):
        begin = time.perf_counter()
        rows = jax.block_until_ready(program(bench.model.params, rows))
        seconds.append(time.perf_counter() - begin)
    bench.cache = rows.cache
    return statistics.median(seconds[1:]) / bench.setting.turns


def results(
    setting: Setting, plain: LoopTime, spec: LoopTime, times: dict[str, float]
) -> dict[str, Any]:
    """The figures of a row, in milliseconds and tokens per second."""
    rest = spec.seconds / spec.rounds - times["draft"] - times["verify"]
    return {
        **compared(plain, spec),
        **{f"{name}_ms": rounded(1e3 * seconds) for name, seconds in times.items()},
        "rest_ms": rounded(1e3 * rest),
        "acceptance_wanted": rounded(setting.lengths.mean),
    }


def compared(plain: LoopTime, spec: LoopTime) -> dict[str, Any]:
    """The figures of whole decodes, one beside the other."""
    plain_step, round_ = plain.seconds / plain.rounds, spec.seconds / spec.rounds
    return {
        "plain_ms_per_token": rounded(1e3 * plain_step),
        "round_ms": rounded(1e3 * round_),
        "round_over_plain": rounded(round_ / plain_step),
        "acceptance_length": rounded(spec.emitted / spec.row_rounds),
        "tokens_per_second": rounded(spec.emitted / spec.seconds),
        "plain_tokens_per_second": rounded(plain.emitted / plain.seconds),
        "speed_up": rounded(spec.emitted / spec.seconds / (plain.emitted / plain.seconds)),
    }


def verdict(row: dict[str, Any], device: str) -> str:
    """What a row says about speculation, in a sentence."""
    nodes = tree_of(row).num_nodes
    rows = f" in {row['batch']} rows together" if row["batch"] > 1 else ""
    return (
        f"{row['shape']} at {row['context']} tokens on {device}: "
        f"{brief(row['tokens_per_second'])} tokens/s{rows} with a tree of {nodes} nodes, "
        f"{brief(row['plain_tokens_per_second'])} without: {row['speed_up']:.1f}x "
        f"(accepted length drawn at {row['acceptance_length']:.2f}, random weights)"
    )


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    more = {
        name.removesuffix("_ms"): row[name]
        for name in row
        if name.endswith("_ms") and name not in ("round_ms", "rest_ms", "draft_ms", "verify_ms")
    }
    shortest, longest = row["lengths"]
    cached = longest if shortest == longest else f"{shortest}-{longest}"
    return (
        f"{row['shape']} B={row['batch']} S={cached} tree={tree_of(row)}: "
        f"plain {row['plain_ms_per_token']} ms ({row['plain_percent_of_roof']} % of roof), "
        f"round {row['round_ms']} ms = draft {row['draft_ms']} + verify {row['verify_ms']} "
        f"+ rest {row['rest_ms']}, {row['round_over_plain']} plain steps; "
        f"{row['tokens_per_second']} tokens/s at acceptance {row['acceptance_length']}, plain "
        f"{row['plain_tokens_per_second']}, speed-up {row['speed_up']}; "
        f"weights {shown_bytes(row['target_bytes'])}, draft {shown_bytes(row['draft_bytes'])}, "
        f"cache {shown_bytes(row['cache_bytes'])}, draft state "
        f"{shown_bytes(row['draft_state_bytes'])}; ms: {more}"
        + (
            f"; streaming {row['streaming_overhead_percent']} % more per round, step by step "
            f"{row['stepwise_overhead_percent']} %"
            if "streaming_round_ms" in row
            else ""
        )
        + (
            f"; adaptive {row['adaptive_ms_per_token']} ms, {row['adaptive_over_plain']} plain "
            f"steps, at acceptance {row['adaptive_acceptance_length']}, rounds "
            f"{row['adaptive_choices']}"
            if "adaptive_choices" in row
            else ""
        )
        + (f"; prefill {row['prefill_tflop_per_s']} TFLOP/s" if "prefill_chunk" in row else "")
    )
