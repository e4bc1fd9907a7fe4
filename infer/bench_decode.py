"""How fast whole rounds are, from a filled cache, at a given acceptance length.

Weights and cached keys and values are random and of the real shapes. Plain decoding and speculation
run in the engine's own compiled loop, from the first token to the last; only the number of accepted
tokens is drawn, with the wanted mean, instead of earned (``longspec_jax.decoding.simulated``). Times
are medians over repetitions, each from a dispatch to the end of the device's work, after one run
that warms up; tokens per second are tokens over that time and no product of other figures.

``acceptance length`` is emitted tokens over target passes, the bonus included. The roof of a plain
step is its bytes (weights that are read, cached keys and values) over the bandwidth measured in this
run. ``draft`` and ``verify`` are timed apart from the round, in programs of their own
(``infer.bench_parts``); ``rest`` is what they leave of it: walk, commit, bookkeeping, the loop.
``streaming`` drives the same rounds from Python and reads every one, as the library streams, and
``stepwise`` without launching ahead of what was read (``infer.bench_streaming``). ``adaptive`` is
decoding that chooses its tree by the clock, and here nothing is simulated: a random draft is as
useless as a draft can be (``infer.bench_adaptive``).

``lengths`` are the committed tokens of the shortest and of the longest row. They are the context,
unless ``--ragged`` spreads the rows evenly from all of it to half of it; bytes are those of the
actual lengths.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.config import TreeConfig
from longspec_jax.decoding import engine
from longspec_jax.decoding.cache import cache_bytes
from longspec_jax.decoding.engine import SpecState
from longspec_jax.decoding.simulated import AcceptanceLengths, simulated_decode
from longspec_jax.drafters.base import NoDraft
from longspec_jax.generation.memory import tree_bytes

from . import bench_adaptive, bench_parts, bench_report, bench_streaming
from .bench_models import SHAPES, Model, draft_state, random_model
from .comma_separated import comma_separated
from .decode_setting import Bench, Setting
from .kernel_profile import profile
from .prefill_time import time_prefill
from .timing import measure_roof, rounded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench decode``."""
    integers = comma_separated(int)
    parser.add_argument(
        "--shape", type=comma_separated(str), default=["vicuna7b"], help=str([*SHAPES])
    )
    parser.add_argument("--context", type=integers, default=[4096, 32768])
    parser.add_argument("--batch", type=integers, default=[1])
    parser.add_argument(
        "--ragged", action="store_true", help="rows of a batch from the whole context to half of it"
    )
    parser.add_argument(
        "--acceptance", type=float, default=3.57, help="mean tokens emitted a round"
    )
    parser.add_argument(
        "--histogram", type=integers, help="recorded rounds by emitted tokens, instead"
    )
    parser.add_argument("--tree", type=integers, default=[4, 16, 16, 16, 16])
    parser.add_argument("--budget", type=int, help="nodes of the tree to verify; all if absent")
    parser.add_argument(
        "--draft_vocabulary", type=int, help="tokens the draft may propose; all if absent"
    )
    parser.add_argument(
        "--draft_int8",
        action="store_true",
        help="the draft's weights and LM head in 8 bits",
    )
    parser.add_argument("--new_tokens", type=int, default=256, help="tokens of one repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20, help="repeats of a separately timed part")
    parser.add_argument("--attention", help="attention implementation; automatic if absent")
    parser.add_argument("--prefill", type=int, metavar="CHUNK", help="time a real prefill, too")
    parser.add_argument("--streaming", action="store_true", help="time rounds that are read, too")
    parser.add_argument("--adaptive", action="store_true", help="time adaptive decoding, too")
    parser.add_argument("--parts", action="store_true", help="take draft and verify further apart")
    parser.add_argument(
        "--profile", type=Path, help="write kernel times and compiled programs to this folder"
    )
    parser.add_argument("--json", type=Path, help="write header and rows to this file")
    parser.add_argument("--chart", type=Path, help="draw the rows into this PNG")


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write what was asked for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    roof = measure_roof()
    header = bench_report.header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        roof_tb_per_s=roof.bytes_per_s / 1e12,
        roof_tflop_per_s=roof.operations_per_s / 1e12,
    )
    report = bench_report.Report(header, arguments.json)
    tree = TreeConfig(tuple(arguments.tree), arguments.budget)
    if arguments.histogram:
        lengths = AcceptanceLengths.from_histogram(arguments.histogram)
    else:
        lengths = AcceptanceLengths.geometric(arguments.acceptance, tree.num_levels)
    for shape in arguments.shape:
        model = random_model(
            *(SHAPES[shape], arguments.attention, arguments.draft_vocabulary),
            draft_int8=arguments.draft_int8,
        )
        for batch in arguments.batch:
            for context in arguments.context:
                shortest = -(-context // 2) if arguments.ragged else context
                setting = Setting(
                    *(shape, context, shortest, batch, tree, arguments.new_tokens, lengths),
                    *(arguments.repetitions, arguments.turns),
                )
                row = measure(setting, model, roof.bytes_per_s, arguments)
                report.add(row, line(row))
        del model
    if arguments.chart:
        bench_report.draw(report.rows, arguments.chart)


def measure(
    setting: Setting, model: Model, bytes_per_s: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """All figures of one setting."""
    bench = Bench.prepare(setting, model)
    drafter, plain = bench.drafter, NoDraft()
    row = describe(bench)
    parts = {"draft": bench_parts.draft, "verify": bench_parts.verify}
    if arguments.parts:
        parts |= {
            "verify_products": bench_parts.verify_products,
            "verify_attention": bench_parts.verify_attention,
            "draft_cross": bench_parts.draft_cross,
            "draft_head": bench_parts.draft_head,
            "draft_choice": bench_parts.draft_choice,
        }
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        loops = {
            "plain": pool.submit(bench.compile, engine.decode, model.target, plain, drafter=plain),
            "round": pool.submit(
                *(bench.compile, simulated_decode, model.target, drafter),
                *(setting.lengths, 0),
                drafter=drafter,
            ),
        }
        if arguments.streaming:
            loops["streaming"] = pool.submit(
                *(bench.compile, bench_streaming.simulated_round, model.target, drafter),
                *(setting.lengths, 0),
                drafter=drafter,
            )
        programs = {
            name: pool.submit(
                bench.compile,
                jax.jit(part(model.target, drafter, setting.turns)),
                drafter=drafter,
            )
            for name, part in parts.items()
        }
        committing = pool.submit(
            bench.compile,
            jax.jit(bench_parts.commit(model.target, drafter, setting.turns), donate_argnums=(2,)),
            drafter=drafter,
        )
    row["compile_seconds"] = round(time.perf_counter() - begin, 1)
    plain_loop = time_loop(bench, loops["plain"].result(), plain)
    round_loop = time_loop(bench, loops["round"].result(), drafter)
    if arguments.streaming:
        ways = {
            "streaming": bench_streaming.stream,
            "stepwise": bench_streaming.stream_by_steps,
        }
        for name, way in ways.items():
            program = read_by(way, loops["streaming"].result())
            row |= streaming(name, round_loop, time_loop(bench, program, drafter))
    if arguments.adaptive:
        row |= bench_adaptive.time_adaptive(bench, plain_loop.seconds / plain_loop.rounds)
    state = bench.state(drafter)
    times = {name: time_part(bench, program.result(), state) for name, program in programs.items()}
    times["commit"] = time_commit(bench, committing.result(), state)
    row |= results(setting, plain_loop, round_loop, times)
    floor = row["plain_step_bytes"] / bytes_per_s
    row["plain_percent_of_roof"] = rounded(100e3 * floor / row["plain_ms_per_token"])
    if arguments.profile:
        folder = arguments.profile / f"{setting.shape}_{setting.context}_{setting.batch}"
        profile(bench, loops["round"].result(), drafter, folder / "round")
        profile(bench, loops["plain"].result(), plain, folder / "plain")
    if arguments.prefill:
        row |= time_prefill(bench, arguments.prefill)
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
        "tree": list(setting.tree.widths),
        "budget": setting.tree.budget,
        "new_tokens": setting.new_tokens,
        "dtype": config.dtype,
        "attention": model.target.attention or "automatic",
        "draft_vocabulary": bench.model.params.draft.head.shape[0],
        "draft_int8": bench.model.params.draft.int8,
        "target_bytes": weights,
        "draft_bytes": tree_bytes(model.params.draft.own),
        "cache_bytes": cache_bytes(config, setting.batch, setting.capacity),
        "draft_state_bytes": tree_bytes(draft_state(model, bench.drafter, setting.batch)),
        "plain_step_bytes": read + seen,
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


def time_loop(bench: Bench, program: Callable[..., SpecState], drafter: Any) -> LoopTime:
    """Median seconds of decoding the setting's tokens."""
    seconds = []
    for _ in range(bench.setting.repetitions + 1):
        state = jax.block_until_ready(bench.state(drafter))
        begin = time.perf_counter()
        state = jax.block_until_ready(program(bench.model.params, bench.request, state))
        seconds.append(time.perf_counter() - begin)
        bench.cache = state.cache
    rounds, emitted = np.asarray(state.rounds), np.asarray(state.emitted)
    return LoopTime(
        statistics.median(seconds[1:]),
        int(rounds.max()),
        int(emitted.sum()) - len(emitted),
        int(rounds.sum()),
    )


def read_by(way: Callable[..., Any], round_program: Callable[..., Any]) -> Callable[..., SpecState]:
    """A whole decode whose every round is launched and read from Python.

    Args:
      way: ``bench_streaming.stream`` or its twin.
      round_program: the compiled round.
    """

    def program(params: Any, request: Any, state: SpecState) -> SpecState:
        advance = functools.partial(round_program, params, request)
        return bench_streaming.read_all(way(advance, state))

    return program


def streaming(name: str, loop: LoopTime, read: LoopTime) -> dict[str, Any]:
    """What reading every round costs over the loop on the device."""
    read_round, round_ = read.seconds / read.rounds, loop.seconds / loop.rounds
    return {
        f"{name}_round_ms": rounded(1e3 * read_round),
        f"{name}_overhead_percent": rounded(100 * (read_round / round_ - 1)),
    }


def time_part(bench: Bench, program: Callable[..., Any], state: SpecState) -> float:
    """Median seconds of one turn of a part that leaves the state alone."""
    seconds = []
    for _ in range(bench.setting.repetitions + 1):
        begin = time.perf_counter()
        jax.block_until_ready(program(bench.model.params, bench.request, state))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) / bench.setting.turns


def time_commit(bench: Bench, program: Callable[..., SpecState], state: SpecState) -> float:
    """Median seconds of one commit; the state is used up, its cache kept."""
    seconds = []
    for _ in range(bench.setting.repetitions + 1):
        begin = time.perf_counter()
        state = jax.block_until_ready(program(bench.model.params, bench.request, state))
        seconds.append(time.perf_counter() - begin)
    bench.cache = state.cache
    return statistics.median(seconds[1:]) / bench.setting.turns


def results(
    setting: Setting, plain: LoopTime, spec: LoopTime, times: dict[str, float]
) -> dict[str, Any]:
    """The figures of a row, in milliseconds and tokens a second."""
    plain_step, round_ = plain.seconds / plain.rounds, spec.seconds / spec.rounds
    rest = round_ - times["draft"] - times["verify"]
    return {
        "plain_ms_per_token": rounded(1e3 * plain_step),
        "round_ms": rounded(1e3 * round_),
        **{f"{name}_ms": rounded(1e3 * seconds) for name, seconds in times.items()},
        "rest_ms": rounded(1e3 * rest),
        "round_over_plain": rounded(round_ / plain_step),
        "acceptance_wanted": rounded(setting.lengths.mean),
        "acceptance_length": rounded(spec.emitted / spec.row_rounds),
        "tokens_per_second": rounded(spec.emitted / spec.seconds),
        "plain_tokens_per_second": rounded(plain.emitted / plain.seconds),
        "speed_up": rounded(spec.emitted / spec.seconds / (plain.emitted / plain.seconds)),
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    more = {
        name.removesuffix("_ms"): row[name]
        for name in row
        if name.endswith("_ms") and name not in ("round_ms", "rest_ms", "draft_ms", "verify_ms")
    }
    shortest, longest = row["lengths"]
    cached = longest if shortest == longest else f"{shortest}-{longest}"
    gib = 2**30
    return (
        f"{row['shape']} B={row['batch']} S={cached} tree={row['tree']} budget={row['budget']}: "
        f"plain {row['plain_ms_per_token']} ms ({row['plain_percent_of_roof']} % of roof), "
        f"round {row['round_ms']} ms = draft {row['draft_ms']} + verify {row['verify_ms']} "
        f"+ rest {row['rest_ms']}, {row['round_over_plain']} plain steps; "
        f"{row['tokens_per_second']} tokens/s at acceptance {row['acceptance_length']}, plain "
        f"{row['plain_tokens_per_second']}, speed-up {row['speed_up']}; "
        f"GiB: weights {row['target_bytes'] / gib:.2f}, draft {row['draft_bytes'] / gib:.2f}, "
        f"cache {row['cache_bytes'] / gib:.2f}, draft state {row['draft_state_bytes'] / gib:.4f}; "
        f"ms: {more}"
        + (
            f"; streaming {row['streaming_overhead_percent']} % more a round, step by step "
            f"{row['stepwise_overhead_percent']} %"
            if "streaming_round_ms" in row
            else ""
        )
        + (
            f"; adaptive {row['adaptive_ms_per_token']} ms, {row['adaptive_over_plain']} plain steps, "
            f"at acceptance {row['adaptive_acceptance_length']}, rounds {row['adaptive_choices']}"
            if "adaptive_choices" in row
            else ""
        )
        + (f"; prefill {row['prefill_tflop_per_s']} TFLOP/s" if "prefill_chunk" in row else "")
    )
