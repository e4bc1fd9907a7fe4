"""Many requests of very different lengths over a few row slots of the demo.

Beside ``slots`` (rows come and go: :mod:`longspec_jax.decoding.continuous`) the same requests run
``alone``, one after the other, which says what their tokens must be, and in padded batches of as
many rows as there are slots: ``batches`` in the order of arrival, ``sorted_batches`` by length,
which is the best that padding can do where nobody waits for an answer. Every way runs twice, and
the second time counts; ``seconds_to_last_compilation`` is that of the first.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from longspec_jax import LongSpec, demo_prompts
from longspec_jax.cli import counted, settled

from .report import Report, run_header
from .timing import announce, compilations, rounded, step

Tokens: TypeAlias = tuple[int, ...]
LENGTHS, CPU_LENGTHS = (100, 15000), (20, 800)
"""Tokens of the shortest and of the longest prompt."""
CPU_SECONDS = 90
"""Of one way; a rough estimate for two shared cores."""


class Request(NamedTuple):
    """One of many."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


def main(arguments: argparse.Namespace) -> None:
    """Run every way, print, and write the files."""
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    if cpu:
        announce(counted(len(WAYS), "way"), len(WAYS) * CPU_SECONDS)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        dtype="float32",
        tree=str(arguments.tree),
        requests=arguments.requests,
        row_slots=arguments.row_slots,
    )
    spec = LongSpec.demo(tree=arguments.tree)
    lengths = CPU_LENGTHS if cpu else LENGTHS
    requests = drawn_requests(spec.tokenizer, arguments.requests, lengths, arguments.new_tokens)
    with Report(header, arguments.json) as report:
        expected: list[Tokens] = []
        for way, run in WAYS.items():
            step(f"{way}: warming up")
            with compilations() as compiled:
                begin = time.perf_counter()
                run(spec, requests, arguments.row_slots)
            last = max((moment - begin for moment in compiled), default=0.0)
            step(f"{way}: timing")
            with compilations() as compiled:
                begin = time.perf_counter()
                found = run(spec, requests, arguments.row_slots)
                seconds = time.perf_counter() - begin
            expected = expected or found
            row = describe(way, requests, found, expected, seconds)
            row |= {"compilations": len(compiled), "seconds_to_last_compilation": rounded(last)}
            report.add(row, line(row))


def drawn_requests(
    tokenizer: Any, count: int, lengths: tuple[int, int], new_tokens: int
) -> list[Request]:
    """Pieces of the held-out documents, their lengths evenly spread over the orders of magnitude.

    Every second one samples.

    Args:
      tokenizer: the demo's.
      count: of requests.
      lengths: tokens of the shortest and of the longest prompt.
      new_tokens: at most; at least a quarter of it.
    """
    random = np.random.default_rng(0)
    text = [token for one in demo_prompts().values() for token in tokenizer(one)["input_ids"]]
    low, high = np.log(lengths)
    found = []
    for number in range(count):
        length = int(np.exp(random.uniform(low, high)))
        begin = int(random.integers(0, len(text) - length))
        new = int(random.integers(new_tokens // 4, new_tokens + 1))
        found.append(Request(text[begin : begin + length], new, float(number % 2), number))
    return found


def complete(spec: LongSpec, requests: Sequence[Request]) -> list[Tokens]:
    """The tokens of requests that are one call."""
    result = spec.generate(
        [request.prompt for request in requests],
        max_new_tokens=[request.max_new_tokens for request in requests],
        temperature=[request.temperature for request in requests],
        seed=[request.seed for request in requests],
        eos_token_id=[],
    )
    return list(result.sequences)


def slots(spec: LongSpec, requests: Sequence[Request], row_slots: int) -> list[Tokens]:
    """Rows that come and go."""
    return complete(dataclasses.replace(spec, row_slots=row_slots), requests)


def alone(spec: LongSpec, requests: Sequence[Request], row_slots: int) -> list[Tokens]:
    """One request after the other, through a single slot: calls would be as many shapes."""
    return complete(dataclasses.replace(spec, row_slots=1), requests)


def batches(spec: LongSpec, requests: Sequence[Request], row_slots: int) -> list[Tokens]:
    """Padded batches in the order of arrival."""
    found: list[Tokens] = []
    for begin in range(0, len(requests), row_slots):
        found += complete(spec, requests[begin : begin + row_slots])
    return found


def sorted_batches(spec: LongSpec, requests: Sequence[Request], row_slots: int) -> list[Tokens]:
    """Padded batches of neighbours in length."""
    order = sorted(range(len(requests)), key=lambda number: len(requests[number].prompt))
    found = batches(spec, [requests[number] for number in order], row_slots)
    return [found[order.index(number)] for number in range(len(requests))]


WAYS: dict[str, Callable[[LongSpec, Sequence[Request], int], list[Tokens]]] = {
    "alone": alone,
    "slots": slots,
    "batches": batches,
    "sorted_batches": sorted_batches,
}
"""The first one says what the tokens must be."""


def describe(
    way: str,
    requests: Sequence[Request],
    found: Sequence[Tokens],
    expected: Sequence[Tokens],
    seconds: float,
) -> dict[str, Any]:
    """The figures of one way."""
    lengths, tokens = [len(request.prompt) for request in requests], sum(map(len, found))
    same = [one == other for one, other in zip(found, expected, strict=True)]
    return {
        "way": way,
        "requests": len(requests),
        "prompt_tokens": [min(lengths), max(lengths)],
        "tokens": tokens,
        "seconds": rounded(seconds),
        "tokens_per_second": rounded(tokens / seconds),
        "identical_to_alone_fraction": sum(same) / len(same),
    }


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    return (
        f"{row['way']:14} {row['requests']} requests of {row['prompt_tokens'][0]} to "
        f"{row['prompt_tokens'][1]} tokens: {row['seconds']} s, {row['tokens_per_second']} "
        f"tokens/s, prefill included; {row['identical_to_alone_fraction']:.0%} identical to alone; "
        f"{row['compilations']} compilations, in the first run the last one after "
        f"{row['seconds_to_last_compilation']} s"
    )
