"""What every kind of draft gives on the demo's held-out documents, beside plain decoding.

All documents are completed in one batch, once by speculation and once by plain decoding, from
copies of one prefill. ``acceptance_length`` counts passes over the whole cache; a drafter that
runs the target over a part of it (``streaming``) pays for those passes in tokens per second
alone. The state's bytes are those of a row with room for the longest document.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from longspec_jax import LongSpec, TreeConfig, demo_prompts
from longspec_jax.embedded import DRAFTS
from longspec_jax.generation.comparison import Comparison

from ..tree_json import tree_fields, tree_of
from ..wording import counted
from .arguments import settled
from .progress import announce
from .report import Report, run_header

MEASURED = {
    "longspec": (DRAFTS["demo"], TreeConfig.parse("4,16,16,16,16@64")),
    "ngram": ("ngram", TreeConfig.parse("8,8,8,8,8,8,8,8@64")),
    "streaming": ("streaming", TreeConfig.parse("chain:4")),
    "small_lm": (DRAFTS["demo_small_lm"], TreeConfig.parse("4,8,8,8")),
}
"""Every kind, its draft for the demo and the tree it usually runs where nodes are nearly free."""
CPU_SECONDS = 240
"""Of one drafter at one temperature; a rough estimate for two shared cores."""


def main(arguments: argparse.Namespace) -> None:
    """Compare, print, and write what was asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    names = arguments.drafters or list(MEASURED)
    if cpu:
        cases = len(names) * len(arguments.temperatures)
        announce(counted(cases, "comparison"), cases * CPU_SECONDS)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        dtype="float32",
        new_tokens=arguments.new_tokens,
        context=arguments.context,
    )
    with Report(header, arguments.json) as report:
        for name in names:
            source, tree = MEASURED[name]
            spec = LongSpec.demo(draft=source)
            rows = [
                spec.tokenizer(text)["input_ids"][: arguments.context]
                for text in demo_prompts().values()
            ]
            for temperature in arguments.temperatures:
                compared = spec.compare(
                    rows,
                    tree=tree,
                    max_new_tokens=arguments.new_tokens,
                    temperature=temperature,
                    seed=arguments.seed,
                    eos_token_id=[],
                )
                row = describe(name, tree, temperature, compared)
                report.add(row, line(row))


def describe(
    drafter: str, tree: TreeConfig, temperature: float, compared: Comparison
) -> dict[str, Any]:
    """The figures of one drafter at one temperature."""
    stats, rows = compared.speculative.stats, len(compared.speculative.sequences)
    return {
        "drafter": drafter,
        **tree_fields(tree),
        "temperature": temperature,
        "rows": rows,
        "acceptance_length": stats.acceptance_length,
        "acceptance_length_by_row": list(_lengths(compared)),
        "identical_to_plain_fraction": 1 - len(compared.divergences) / rows,
        "draft_state_bytes": stats.draft_state_bytes // rows,
        "draft_bytes": stats.memory.draft_bytes,
        "round_ms": 1000 * stats.decode_seconds / max(stats.target_passes),
        "tokens_per_second": stats.tokens_per_second,
        "plain_tokens_per_second": compared.plain.stats.tokens_per_second,
    }


def _lengths(compared: Comparison) -> Iterator[float]:
    stats = compared.speculative.stats
    for new, passes in zip(stats.new_tokens, stats.target_passes, strict=True):
        yield (new - 1) / passes if passes else float(np.nan)


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    return (
        f"{row['drafter']:10} tree {tree_of(row)!s:18} T={row['temperature']:g}: "
        f"{row['acceptance_length']:.2f} tokens per pass, "
        f"{row['identical_to_plain_fraction']:.0%} of {row['rows']} rows identical to plain, "
        f"state {row['draft_state_bytes']:,} bytes per row; batch of {row['rows']}: "
        f"{row['tokens_per_second']:.0f} tokens/s, {row['plain_tokens_per_second']:.0f} without"
    )
