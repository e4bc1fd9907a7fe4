"""Long runs through the server over a toy model: a conversation, many requests, many at once.

    python -m tests.serve.long_run --json=docs/results/serve_long_cpu.json

Minutes, so no test runs it. Every text has to be that of the library alone, in float32, nothing may
be compiled once the server listens, and many requests must not leave arrays behind; else it ends
with status 1. Resident memory is that of server and clients together.
"""

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infer.bench.report import Report, run_header
from infer.serve.command import served_model
from longspec_jax import PLAIN, LongSpec
from tests.footprint import resident_bytes
from tests.infer.toys import toy_spec
from tests.kit import compilations
from tests.serve.kit import Client, events, serving

REQUESTS, SLOTS, LONGEST = 200, 8, 12_000
LENGTHS = (1, 60, 255, 256, 257, 900, 2000, 3000)
"""Tokens of prompts; every twentieth one is as long as fits."""
TURNS, CONTEXT, ANSWER, QUESTION = 20, 32_000, 24, 40
"""Of the conversation."""
MANY, DISTINCT, SHORT = 2000, 40, 300
"""Requests one after the other, how many of them differ, and the longest one's tokens."""
CLIENTS, QUARTERS = 16, 4
"""That send these at once, and how often memory is looked at."""
USUAL = {
    **{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.2, "logit_bias": {"3": 1.5}, "stop_token_ids": [7]},
)


def spec_of(longest: int) -> LongSpec:
    """The toy for texts of this length."""
    return replace(toy_spec(max_positions=longest), prefill_chunk=256, row_slots=2)


@contextlib.contextmanager
def server_of(spec: LongSpec, slots: int) -> Iterator[Client]:
    """A server whose programs are compiled."""
    longest = spec.target_config.max_positions
    more: dict[str, Any] = {"prefixes": True, "adaptive": True, "traced": True, "adjusted": True}
    with spec.engine(slots=slots, max_tokens=longest, prefills=2, **more) as engine:
        engine.prepare()
        model = served_model(spec, engine, names=("toy",), max_len=longest, most_rows=8)
        limits = {"queue_requests": 256, "queue_tokens": 10**7, "request_seconds": 3600.0}
        with serving(engine, model, **limits) as client:
            client.timeout = 3600.0
            yield client


def ask(server: Client, body: dict[str, Any], leaves: bool = False) -> dict[str, Any] | None:
    """The answer to a request; None for one whose client leaves at its first tokens."""
    if leaves:
        response = server.connect("POST", "/v1/completions", {**body, "stream": True})
        next(iter(events(response)), None)
        response.connection.close()
        return None
    response = server.connect("POST", "/v1/completions", body)
    found = json.loads(response.read())
    assert response.status == 200, found
    return found


def tokens_of(answer: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the answer's tokens."""
    return tuple(token["id"] for token in answer["longspec"][0]["tokens"])


def alone(spec: LongSpec, bodies: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Tokens of the same requests by plain decoding in the library."""
    return spec.generate(
        [body["prompt"] for body in bodies],
        tree=PLAIN,
        max_new_tokens=[body["max_tokens"] for body in bodies],
        seed=[body["seed"] for body in bodies],
        eos_token_id=[body.get("stop_token_ids", []) for body in bodies],
        logit_bias=[
            {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
            for body in bodies
        ],
        **{name: [body[name] for body in bodies] for name in USUAL},
    ).sequences


def mixed(count: int, lengths: Sequence[int], longest: int, most_new: int) -> list[dict[str, Any]]:
    """Requests of all kinds of sampling and of two priorities; some end at a stop token.

    Args:
      lengths: of most prompts; every twentieth one is as long as fits.
      longest: tokens of a request.
      most_new: of them, most new ones.
    """
    random, bodies = np.random.default_rng(0), []
    text = random.integers(1, 15, longest).tolist()
    for index in range(count):
        new = int(random.integers(1, most_new + 1))
        length = longest - new if index % 20 == 0 else int(random.choice(lengths))
        shared = int(random.integers(0, 600))  # Beginnings that others have, too.
        own = random.integers(1, 15, longest).tolist()
        bodies.append(
            {
                "prompt": (text[:shared] + own)[:length],
                "max_tokens": new,
                "seed": index,
                "ignore_eos": True,
                "priority": int(index % 2),
                "longspec": {"rounds": True},
                **USUAL,
                **KINDS[(index + index // 20) % len(KINDS)],
            }
        )
    return bodies


def at_once() -> dict[str, Any]:
    """Mixed requests, all sent together; the clients of some leave."""
    spec, bodies = spec_of(LONGEST), mixed(REQUESTS, LENGTHS, LONGEST, 32)
    leaving = [index % 17 == 3 for index in range(REQUESTS)]
    with server_of(spec, SLOTS) as server, compilations() as compiled:
        begun = time.perf_counter()
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = [*pool.map(lambda *one: ask(server, *one), bodies, leaving)]
        seconds = time.perf_counter() - begun
        counts = list(compiled)
        metrics = server.connect("GET", "/metrics").read().decode()
    kept = [(body, answer) for body, answer in zip(bodies, answers, strict=True) if answer]
    expected = alone(spec, [body for body, _ in kept])
    different = sum(
        tokens_of(answer) != ours for (_, answer), ours in zip(kept, expected, strict=True)
    )
    numbers = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[:1] not in "#")
    return {
        "what": "requests at once",
        "requests": REQUESTS,
        "slots": SLOTS,
        "longest": LONGEST,
        "prompt_tokens": sum(len(body["prompt"]) for body in bodies),
        "answered": len(kept),
        "clients_that_left": sum(leaving),
        "differing_texts": different,
        "compilations": len(counts),
        "preemptions": float(numbers["longspec:num_preemptions_total"]),
        "prefix_hits": float(numbers["longspec:prefix_cache_hits_total"]),
        "seconds": round(seconds, 1),
    }


def many() -> dict[str, Any]:
    """The same requests again and again: what a server holds after each quarter of them."""
    spec, bodies = spec_of(SHORT), mixed(DISTINCT, (1, 60, 150, 250), SHORT, 16)
    firsts: dict[int, tuple[int, ...]] = {}
    different, arrays, resident = 0, [], []
    with server_of(spec, SLOTS) as server, compilations() as compiled:
        begun = time.perf_counter()
        for _ in range(QUARTERS):
            indices = [index % DISTINCT for index in range(MANY // QUARTERS)]
            with ThreadPoolExecutor(CLIENTS) as pool:
                for index, answer in zip(
                    indices, pool.map(lambda one: ask(server, bodies[one]), indices), strict=True
                ):
                    assert answer is not None
                    tokens = tokens_of(answer)
                    different += firsts.setdefault(index, tokens) != tokens
            gc.collect()
            arrays.append(sum(array.nbytes for array in jax.live_arrays()))
            resident.append(round(resident_bytes() / 1e6))
        seconds = time.perf_counter() - begun
        counts = list(compiled)
    expected = alone(spec, bodies)
    different += sum(firsts[index] != ours for index, ours in enumerate(expected))
    return {
        "what": "many requests",
        "requests": MANY,
        "slots": SLOTS,
        "array_bytes": arrays,
        "resident_mb": resident,
        "differing_texts": different,
        "compilations": len(counts),
        "seconds": round(seconds, 1),
    }


def conversation() -> dict[str, Any]:
    """A long text, and questions about it, each behind the answer before."""
    longest = CONTEXT + TURNS * (ANSWER + QUESTION)
    spec, random = spec_of(longest), np.random.default_rng(1)
    history, firsts, cached, bodies, answers = [], [], [], [], []
    with server_of(spec, 2) as server, compilations() as compiled:
        for turn in range(TURNS):
            history += random.integers(1, 15, QUESTION if turn else CONTEXT).tolist()
            body = {
                "prompt": [*history],
                "max_tokens": ANSWER,
                "seed": turn,
                "ignore_eos": True,
                "longspec": {"rounds": True},
                **USUAL,
                "temperature": float(turn % 2),
            }
            answer = ask(server, body)
            assert answer is not None
            bodies.append(body)
            answers.append(tokens_of(answer))
            history += answers[-1]
            firsts.append(answer["metrics"]["time_to_first_token_ms"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        counts = list(compiled)
    some = [0, 1, 2, TURNS // 2, TURNS - 1]
    expected = alone(spec, [bodies[turn] for turn in some])
    return {
        "what": "conversation",
        "turns": TURNS,
        "context": CONTEXT,
        "first_token_ms": firsts,
        "cached_tokens": cached,
        "second_over_first_percent": round(100 * firsts[1] / firsts[0], 2),
        "differing_texts": sum(
            answers[turn] != ours for turn, ours in zip(some, expected, strict=True)
        ),
        "compared_turns": [turn + 1 for turn in some],
        "compilations": len(counts),
    }


def main() -> int:
    """Run all, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    header = run_header(jax.devices()[0].device_kind, __doc__ or "")
    with Report(header, arguments.json) as report:
        for run in (conversation, many, at_once):
            row = run()
            report.add(row, json.dumps(row))
    failed = any(row["differing_texts"] or row["compilations"] for row in report.rows)
    grown = any(len({*row.get("array_bytes", ())}) > 1 for row in report.rows)
    return int(failed or grown)


if __name__ == "__main__":
    raise SystemExit(main())
