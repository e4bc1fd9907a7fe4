"""A whole server under load: its routes, its engine's thread and its engine, through HTTP.

Requests are greedy streams of random prompts, no two of which begin alike, from a process of its
own (``benchmarks.load``). A server with speculation and one without get the same load. At any time
``concurrency`` requests are open; twice as many as that are sent, as long as ``seconds`` have not
passed.

The weights of a shape are random, so the target agrees with its draft as often as is drawn: at the
nodes of one path of every tree it finds the next node's token the likeliest. All else is the real
round. ``acceptance`` is the mean of 64 nodes; fewer keep the share that the demo's keep. A row's
``acceptance_length`` is what its requests report.

``ttft`` is the time from sending a request to its first token, waiting in the queue included, and
``itl`` that from token to token, where tokens that come together share theirs.
``worst_gap_ms`` is the longest pause of four running streams
while a long prompt is prefilled with them, from ``max_itl_ms`` for which the server was started.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.wording import command_words
from longspec_jax import LongSpec
from longspec_jax.checks import shown_bytes
from longspec_jax.cli import as_options, counted, settled
from longspec_jax.compilation import keep_programs
from longspec_jax.config.tree import DEFAULT_TREE
from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.drafters.base import NOTHING, Needs
from longspec_jax.drafters.longspec import LongSpecDraft
from longspec_jax.embedded import DEMO_NAME
from longspec_jax.extras import missing_packages
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.sharding import path_name

from . import load
from .arguments import CHAIN, SHAPES
from .load import Stream
from .models import check_memory, draft_options, random_model, target_bytes
from .report import Report, Row, run_header
from .rounds import GOLDEN, acceptance_edges
from .timing import rounded, step

SHOWN = (
    "shape context concurrency speculation tokens_per_second acceptance_length ttft_ms_p50 "
    "ttft_ms_p99 itl_ms_p50 itl_ms_p99 max_itl_ms worst_gap_ms usual_gap_ms ttft_ms chunk"
).split()
STREAMS = 4
"""That run while a long prompt is admitted."""
STREAM_CONTEXT = 256
"""Tokens of their prompts."""
TURNS = 2
"""Requests for each of those that are open at any time; one more where a single one is."""
NODES, KEPT = (16, 32, 48, 64), (0.76, 0.89, 0.95, 1.0)
"""Nodes, and which share of the accepted tokens of 64 they keep (docs/guides/benchmarks.md)."""
SHARPNESS = 3.0
"""Factor on the MLP's input in a random draft. Its probabilities then differ among tokens as much
as a trained draft's, so that a budget of nodes keeps deep ones."""


def main(arguments: argparse.Namespace) -> None:
    """Measure, print, and write the file."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if missing := missing_packages("serve"):
        raise ValueError(missing)
    arguments = settled(arguments, jax.default_backend() == "cpu")
    check(arguments)
    header = run_header(jax.devices()[0].device_kind, __doc__ or "")
    keep_programs()
    step(f"loading {arguments.target}")
    spec = models(arguments)
    plain = dataclasses.replace(spec, draft=None)
    with Report(header, arguments.json, SHOWN) as report:
        for speculation, served in ((True, spec), (False, plain)):
            for row in under_load(served, arguments, speculation):
                report.add(row)
        report.add(admission(spec, arguments))


def check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
      ValueError: naming the option.
    """
    config = SHAPES[arguments.target]
    with command_words():
        draft_options("longspec", as_options(arguments.draft_option), config)
    longest = max(arguments.context + arguments.new_tokens, arguments.long_context + 2)
    if longest > config.max_positions:
        raise ValueError(
            f"--context, --new_tokens, --long_context: {longest} tokens are more than the "
            f"{config.max_positions} that {arguments.target} was made for; name fewer"
        )
    check_memory(f"the shape {arguments.target}", target_bytes(config))
    try:
        acceptance_edges(arguments.acceptance, DEFAULT_TREE)
    except ValueError as error:
        raise ValueError(f"--acceptance: {error}") from None


@dataclasses.dataclass(frozen=True)
class AgreeingTarget(TargetModel):
    """A target that agrees with its draft as often as is drawn."""

    acceptance: float = 1.0
    """Mean tokens of a round with :data:`NODES`' last, the bonus included."""

    def verify(
        self,
        params: Any,
        cache: KVCache,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        length: jax.Array,
        levels: int,
        needs: Needs = NOTHING,
    ) -> Verification:
        """As of the target; its logits favour a path whose depth is drawn."""
        tree = tokens, positions, mask
        run = super().verify(params, cache, *tree, length, levels, needs)
        nodes = tokens.shape[1]
        if nodes == 1:
            return run
        share = float(np.interp(nodes, NODES, KEPT))
        mean = 1 + share * (self.acceptance - 1)
        edges = acceptance_edges(mean, DEFAULT_TREE)
        return run._replace(logits=agreeing(run, *tree, edges))


def agreeing(
    run: Verification, tokens: jax.Array, positions: jax.Array, mask: jax.Array, edges: jax.Array
) -> jax.Array:
    """Logits that favour, along one path of every tree, the next node's token.

    Args:
      run: of the target.
      tokens: ``[B, T]`` of the nodes.
      positions: ``[B, T]`` of the nodes.
      mask: ``[B, T, T]`` which nodes are on the path to each.
      edges: of :func:`acceptance_edges`.
    """
    depth = positions - positions[:, :1]
    rows = jnp.arange(tokens.shape[0], dtype=jnp.uint32)
    # Of position, token and row, mixed (the constants are those of murmur3's last step).
    mixed = positions[:, 0].astype(jnp.uint32) * jnp.uint32(GOLDEN)
    mixed ^= tokens[:, 0].astype(jnp.uint32) * jnp.uint32(0x85EBCA6B) + rows
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(factor)
    wanted = (mixed[:, None] >= edges).sum(axis=1, dtype=jnp.int32)
    reached = jnp.where(mask.sum(axis=2) == depth + 1, depth, -1)  # Others have no path.
    deepest = jnp.minimum(wanted, reached.max(axis=1))[:, None]
    last = jnp.argmax(reached == deepest, axis=1)
    on_path = jnp.take_along_axis(mask, last[:, None, None], axis=1)[:, 0]
    below = on_path[:, None, :] & (depth[:, None, :] == depth[:, :, None] + 1)
    following = jnp.where(below, tokens[:, None, :], -1).max(axis=2)
    following = jnp.where(on_path & (depth < deepest), following, -1)
    here = jnp.arange(run.logits.shape[2]) == following[:, :, None]
    return jnp.where(here, run.logits.max(axis=2, keepdims=True) + 1.0, run.logits)


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn(LongSpec):
    """Models of random weights whose target agrees with the draft as often as is drawn."""

    acceptance: float = 1.0

    @cached_property
    def target(self) -> AgreeingTarget:
        """The static part of the target."""
        own = super().target
        fields = {each.name: getattr(own, each.name) for each in dataclasses.fields(own)}
        return AgreeingTarget(**fields, acceptance=self.acceptance)


def models(arguments: argparse.Namespace) -> LongSpec:
    """The demo, or random weights of a shape."""
    options = as_options(arguments.draft_option)
    if arguments.target == "demo":
        return LongSpec.demo(draft=DEMO_NAME, draft_options=options or None)
    config = SHAPES[arguments.target]
    if jax.default_backend() == "cpu":
        config = dataclasses.replace(config, dtype="float32")
    model = random_model(config, options=options)
    assert isinstance(model.draft, LongSpecDraft), "the kind that is drawn by default"
    return Drawn(
        *(config, model.params.target, sharper(model.draft)),
        prefill_chunk=2048 if jax.default_backend() == "gpu" else 256,
        acceptance=arguments.acceptance,
    )


def sharper(draft: LongSpecDraft) -> LongSpecDraft:
    """A random draft whose probabilities differ as much as a trained one's."""

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf * SHARPNESS if path_name(path).endswith("mlp_norm/scale") else leaf

    layer = jax.tree_util.tree_map_with_path(scaled, draft.params.layer)
    return dataclasses.replace(draft, params=dataclasses.replace(draft.params, layer=layer))


@contextmanager
def serving(spec: LongSpec, prepared: RequestEngine, max_len: int) -> Iterator[Callable[..., Any]]:
    """A server over an engine; both end with the context.

    Yields:
      What calls a function of ``benchmarks.load`` with the port, in a process of its own.
    """
    # What the extra installs is imported after its check.
    from infer.serve.command import served_over
    from infer.serve.http_server import HttpServer, bound

    served = served_over(spec, prepared, names=("bench",), max_len=max_len, queue_requests=1024)
    listener, ready = bound("127.0.0.1", 0), threading.Event()
    server = HttpServer(served, listener, drain_seconds=1.0)
    running = threading.Thread(target=lambda: asyncio.run(server.run(ready.set)), name="server")
    running.start()
    try:
        ready.wait()
        port = listener.getsockname()[1]
        # A process that is forked would have the locks of this one's threads.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            yield lambda call, *args: pool.submit(call, port, *args).result()
    finally:
        server.stop()
        running.join()


def prepared_engine(spec: LongSpec, slots: int, **options: Any) -> tuple[RequestEngine, float]:
    """A server's engine with all programs compiled, and the seconds that took.

    It has as many slots as are named, or as fit.
    """
    from infer.serve.command import planned_engine, server_words

    begun = time.perf_counter()
    with server_words():
        try:
            engine = planned_engine(spec, slots=slots, **options)
        except MemoryError:
            engine = planned_engine(spec, **options)
    step(
        f"compiling {', '.join(str(each.tree) for each in engine.trees)}; "
        f"{counted(engine.runner.slots, 'slot')}, {shown_bytes(engine.memory.needed_bytes)}"
    )
    engine.prepare()
    return engine, time.perf_counter() - begun


def under_load(spec: LongSpec, arguments: argparse.Namespace, speculation: bool) -> Iterator[Row]:
    """A row for every load, of one server."""
    max_len = arguments.context + arguments.new_tokens
    engine, seconds = prepared_engine(spec, max(arguments.concurrency), max_len=max_len)
    random = np.random.default_rng(int(speculation))
    with serving(spec, engine, max_len) as client:
        # What a first request pays is not counted.
        [first] = drawn(random, 1, min(arguments.context, STREAM_CONTEXT), spec)
        client(load.ask, first, min(arguments.new_tokens, 16))
        for concurrency in arguments.concurrency:
            kind = "speculation" if speculation else "plain"
            step(f"{kind}, {counted(concurrency, 'request')} at a time")
            before = [use.rounds for use in engine.trees]
            count = concurrency * TURNS + (concurrency == 1)
            prompts = drawn(random, count, arguments.context, spec)
            streams = client(
                load.at_once, prompts, arguments.new_tokens, concurrency, arguments.seconds
            )
            rounds = [use.rounds - was for use, was in zip(engine.trees, before, strict=True)]
            yield {
                "shape": arguments.target,
                "context": arguments.context,
                "concurrency": concurrency,
                "speculation": speculation,
                **figures(streams),
                "new_tokens": arguments.new_tokens,
                "requests": len(streams),
                "slots": engine.runner.slots,
                "rounds": {
                    str(use.tree) if use.tree.num_levels else "none": count
                    for use, count in zip(engine.trees, rounds, strict=True)
                },
                "prepare_seconds": rounded(seconds),
            }


def drawn(random: np.random.Generator, count: int, length: int, spec: LongSpec) -> list[list[int]]:
    """Random prompts."""
    return random.integers(0, spec.target_config.vocab_size, (count, length)).tolist()


def figures(streams: Sequence[Stream]) -> Row:
    """Tokens per second, and percentiles of the times of tokens."""
    took = max(one.arrivals[-1] for one in streams) - min(one.begun for one in streams)
    firsts = [one.first for one in streams]
    between = [seconds for one in streams for seconds in one.between]
    accepted = [
        found["mean_acceptance_length"]
        for one in streams
        if (found := one.metrics.get("speculative_decoding")) is not None
    ]
    return {
        "tokens_per_second": rounded(sum(sum(one.tokens) for one in streams) / took),
        **percentiles("ttft", firsts),
        **percentiles("itl", between),
        "acceptance_length": rounded(statistics.fmean(accepted)) if accepted else 1.0,
    }


def percentiles(name: str, seconds: Sequence[float]) -> Row:
    """The median and the 99th of a hundred, in milliseconds."""
    return {
        f"{name}_ms_p{share}": rounded(1e3 * float(np.percentile(seconds, share)))
        for share in (50, 99)
    }


def admission(spec: LongSpec, arguments: argparse.Namespace) -> Row:
    """The row of a long prompt alongside running streams."""
    max_len = arguments.long_context + 2
    tree = DEFAULT_TREE if jax.default_backend() == "gpu" else CHAIN
    limit = {"tree": tree, "max_itl_ms": float(arguments.max_itl_ms)}
    engine, seconds = prepared_engine(spec, STREAMS + 1, max_len=max_len, **limit)
    random, chunk = np.random.default_rng(2), engine.engine.prompts.chunks[-1]
    with serving(spec, engine, max_len) as client:
        step(f"a prompt of {arguments.long_context} tokens alongside {STREAMS} streams")
        short = drawn(random, STREAMS, min(STREAM_CONTEXT, arguments.long_context // 4), spec)
        [first, long_prompt] = drawn(random, 2, arguments.long_context, spec)
        client(load.ask, first, 2)  # What it pays is not counted.
        most = max_len - len(short[0])
        streams, admitted = client(load.with_long_prompt, short, most, long_prompt)
    begun, ended = admitted.begun, admitted.arrivals[0]
    gaps = {
        during: [
            later - before
            for one in streams
            for before, later in zip(one.arrivals, one.arrivals[1:], strict=False)
            if (later > begun and before < ended) == during
        ]
        for during in (True, False)
    }
    return {
        "shape": arguments.target,
        "context": arguments.long_context,
        "concurrency": STREAMS,
        "max_itl_ms": arguments.max_itl_ms,
        "worst_gap_ms": rounded(1e3 * max(gaps[True])),
        "usual_gap_ms": rounded(1e3 * statistics.median(gaps[False])),
        "ttft_ms": rounded(1e3 * admitted.first),
        "chunk": chunk,
        "prepare_seconds": rounded(seconds),
    }
