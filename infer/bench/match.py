"""How often output in bfloat16 is that of plain decoding, and how close the draws were where not.

The demo model completes windows of its held-out documents, each once by speculation and once by
plain decoding, from copies of one prefill. In exact arithmetic the two agree; in bfloat16 a pass
over a tree and a pass over one token round differently, and a draw that is nearly a tie may flip.
Once a token differs the rest does, too, so what is counted is the first divergence of a generation.

``gap`` is plain decoding's score of its own token minus that of the token that speculation drew
there, temperature and noise included: the distance from a tie, which is that of the best two scores
unless the draw skipped one. It is computed anew from the cache and may be off by one more rounding.
``divergences_per_token`` is divergences over tokens drawn in agreement and at the divergence.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from longspec_jax import LongSpec, demo_prompts
from longspec_jax.generation.comparison import Comparison

from ..tree_json import tree_fields
from ..wording import counted
from .arguments import settled
from .progress import announce
from .report import Report, run_header

CPU_COMPILE_SECONDS, CPU_SECONDS_PER_TOKEN = 30, 0.02
"""For a rough estimate: two shared cores."""


@dataclass(frozen=True)
class Window:
    """Part of a document, as a prompt."""

    document: str
    offset: int
    """Index of the first token in the document."""
    tokens: list[int]


def main(arguments: argparse.Namespace) -> None:
    """Compare, print, and write what was asked for."""
    # A Python without PyTorch is what we run in; transformers need not warn of it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    spec = LongSpec.demo(dtype=arguments.dtype, attention=arguments.attention)
    documents = {name: spec.tokenizer(text)["input_ids"] for name, text in demo_prompts().items()}
    prompts = windows(documents, arguments.context, arguments.generations)
    tokens, most = arguments.context + arguments.new_tokens, spec.target_config.max_positions
    if tokens > most:
        raise ValueError(
            f"--context={arguments.context} and --new_tokens={arguments.new_tokens} are {tokens} "
            f"positions, and the demo was made for {most}; lower one of them"
        )
    if cpu:
        calls = len(prompts) * len(arguments.temperatures)
        work = f"{counted(calls, 'generation')} of {arguments.new_tokens} tokens, each twice"
        announce(work, CPU_COMPILE_SECONDS + calls * tokens * CPU_SECONDS_PER_TOKEN)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        **{"dtype": arguments.dtype, "attention": arguments.attention or "automatic"},
        **tree_fields(arguments.tree),
        new_tokens=arguments.new_tokens,
    )
    with Report(header, arguments.json) as report:
        for temperature in arguments.temperatures:
            for seed, window in enumerate(prompts):
                compared = spec.compare(
                    window.tokens,
                    tree=arguments.tree,
                    max_new_tokens=arguments.new_tokens,
                    temperature=temperature,
                    seed=seed,
                    eos_token_id=[],  # The rows that end early would be no long generations.
                )
                row = describe(window, temperature, seed, compared)
                report.add(row, line(row))
        report.conclude([summary(report.rows, each) for each in arguments.temperatures])


def windows(documents: Mapping[str, Sequence[int]], context: int, count: int) -> list[Window]:
    """Different prompts of one length, the documents in turn, spread over every document.

    Args:
      documents: names and tokens; those of fewer than ``context`` tokens have no window.
      context: tokens of a window.
      count: windows.

    Raises:
      ValueError: if there are not so many.
    """
    spare = {name: len(row) - context for name, row in documents.items() if len(row) >= context}
    if sum(last + 1 for last in spare.values()) < count:
        raise ValueError(
            f"the documents have {[len(tokens) for tokens in documents.values()]} tokens, too few "
            f"for {count} different prompts of {context}; lower --context or --generations"
        )
    found: list[tuple[str, int]] = []
    each = 0
    while len(found) < count:  # A document with few windows leaves more to the others.
        each += 1
        found = list(_turns({name: _spread(last, each) for name, last in spare.items()}))
    return [
        Window(name, offset, list(documents[name][offset : offset + context]))
        for name, offset in found[:count]
    ]


def _spread(last: int, count: int) -> list[int]:
    """At most ``count`` different offsets from 0 to ``last``, at about equal distances."""
    return np.unique(np.linspace(0, last, count).astype(int)).tolist()


def _turns(offsets: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int]]:
    """The first of every document, then the second of every one that has another, and so on."""
    for turn in range(max(map(len, offsets.values()))):
        for name, own in offsets.items():
            if turn < len(own):
                yield name, own[turn]


def describe(window: Window, temperature: float, seed: int, compared: Comparison) -> dict[str, Any]:
    """The row of one generation."""
    row = {
        "document": window.document,
        "offset": window.offset,
        "context": len(window.tokens),
        "temperature": temperature,
        "seed": seed,
        "new_tokens": compared.plain.stats.new_tokens[0],
        "acceptance_length": round(compared.speculative.stats.acceptance_length, 3),
        "identical": compared.identical,
        "first_divergence": None,
    }
    for found in compared.divergences:  # One at most: a call is one row.
        row |= {
            "first_divergence": found.index,
            "gap": found.gap,
            "plain_token": found.plain_token,
            "speculative_token": found.speculative_token,
        }
    return row


def summary(rows: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """What the rows of one temperature say together."""
    rows = [row for row in rows if row["temperature"] == temperature]
    different = [row for row in rows if not row["identical"]]
    gaps = [row["gap"] for row in different if row["gap"] is not None]
    places = [row["first_divergence"] for row in different]
    agreed = sum(row["new_tokens"] for row in rows if row["identical"])
    return {
        "temperature": temperature,
        "generations": len(rows),
        "identical": len(rows) - len(different),
        "identical_share": round(1 - len(different) / len(rows), 4),
        "divergences_per_token": len(different) / (agreed + sum(place + 1 for place in places)),
        "first_divergence": _quantiles(places),
        "gap": _quantiles(gaps),
        "acceptance_length": round(float(np.mean([row["acceptance_length"] for row in rows])), 3),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Least, quartiles, the point that nine in ten are below, and greatest; none of no values."""
    if not values:
        return None
    points = {
        "least": 0,
        "lower": 25,
        "median": 50,
        "upper": 75,
        "ninth_tenth": 90,
        "greatest": 100,
    }
    return {name: float(np.percentile(values, point)) for name, point in points.items()}


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    place = f"{row['document']}[{row['offset']}:], temperature {row['temperature']:g}"
    accepted = f"acceptance {row['acceptance_length']:.2f}"
    if row["identical"]:
        return f"{place}: all {row['new_tokens']} tokens identical, {accepted}"
    gap = "unknown" if row["gap"] is None else f"{row['gap']:.2e}"
    return f"{place}: differs from token {row['first_divergence']} on, gap {gap}, {accepted}"
