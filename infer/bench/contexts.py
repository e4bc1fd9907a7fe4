"""What drafts gain on the demo as the context grows, and what reading a part of it does to them.

The demo's held-out documents are cut to every context and completed in one batch, by speculation
and by plain decoding, from copies of one prefill. Documents that are shorter take no part.
``acceptance_length`` is tokens emitted per target pass, the bonus token included and the prefill
excluded. The small model reads all of its cache, its sinks and recent tokens (StreamingLLM), or the
chunks that the target attends to (SpecExtend); the LongSpec draft all of the target's last layer,
or those chunks of it. Layout of SpecExtend's tables 2 and 6 and its figure 3.

``longspec_partial_passes`` lets the target check the LongSpec draft's trees over a part of its own
cache before a full pass; ``agreement`` is how often that one confirmed a token, given that it
confirmed the one before. Its ``acceptance_length`` counts full passes.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from longspec_jax import LongSpec, TreeConfig, demo_prompts
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.embedded import DRAFTS
from longspec_jax.generation.comparison import Comparison

from ..rounds import by_round
from ..wording import counted
from .arguments import METHODS, settled
from .chain_cost import measured_agreement
from .progress import announce, step
from .report import Report, run_header


@dataclass(frozen=True)
class Method:
    """A draft for the demo, and how much of a cache it reads."""

    draft: str
    """In the demo."""
    tree: TreeConfig
    options: Mapping[str, int] = field(default_factory=dict)


SMALL_TREE, LONGSPEC_TREE = TreeConfig.parse("4,8,8,8"), TreeConfig.parse("4,16,16,16,16@64")
OPT_TREE = TreeConfig.parse("16x10@50+0.7")
"""The setting of SpecExtend's experiments."""
WORKING = {"working": 1024}
STREAMING = {**WORKING, "refresh": 0}
MEASURED = dict(
    zip(
        METHODS,
        (
            Method("demo_small_lm", SMALL_TREE),
            Method("demo_small_lm", SMALL_TREE, STREAMING),
            Method("demo_small_lm", SMALL_TREE, WORKING),
            Method("demo_small_lm", OPT_TREE, WORKING),
            Method("demo", LONGSPEC_TREE),
            Method("demo", LONGSPEC_TREE, WORKING),
            Method("demo", OPT_TREE),
            Method("demo", TreeConfig.parse("chain:16"), {"retrieve": 2048}),
        ),
        strict=True,
    )
)
CPU_SECONDS = 90
"""Of one method at one context and temperature; a rough estimate for two shared cores."""


def main(arguments: argparse.Namespace) -> None:
    """Compare, print, and write what was asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    methods = arguments.methods or list(MEASURED)
    check_contexts(arguments)
    if cpu:
        cases = len(methods) * len(arguments.contexts) * len(arguments.temperatures)
        announce(counted(cases, "comparison"), cases * CPU_SECONDS)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        dtype="float32",
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
    )
    with Report(header, arguments.json) as report:
        for name in methods:
            method = MEASURED[name]
            spec = LongSpec.demo(draft=DRAFTS[method.draft], draft_options=dict(method.options))
            for context in arguments.contexts:
                rows = prompts(spec, context, arguments.documents)
                for temperature in arguments.temperatures:
                    step(f"{name}, {context} tokens, temperature {temperature:g}")
                    compared = spec.compare(
                        rows,
                        tree=method.tree,
                        max_new_tokens=arguments.new_tokens,
                        temperature=temperature,
                        seed=arguments.seed,
                        eos_token_id=[],
                    )
                    row = describe(name, context, temperature, compared)
                    drafter = spec.drafts[0].drafter(method.tree)
                    if isinstance(drafter, Hierarchy):
                        passes = map(confirmed_by_pass, compared.speculative.drafted)
                        counts = [count for of_row in passes for count in of_row]
                        row["agreement"] = measured_agreement(counts, drafter.shortest)
                    report.add(row, line(row))


def prompts(spec: LongSpec, context: int, documents: int | None = None) -> list[list[int]]:
    """The beginnings of the documents that are long enough, the first ``documents`` of them."""
    texts = (spec.tokenizer(text)["input_ids"] for text in demo_prompts().values())
    return [tokens[:context] for tokens in texts if len(tokens) >= context][:documents]


def check_contexts(arguments: argparse.Namespace) -> None:
    """Refuse a context that no document has, or that leaves no room for new tokens.

    Raises:
      ValueError: naming the option.
    """
    spec = LongSpec.demo(draft=None)
    longest = max(len(spec.tokenizer(text)["input_ids"]) for text in demo_prompts().values())
    most = spec.target_config.max_positions
    for context in arguments.contexts:
        if context + arguments.new_tokens > most:
            raise ValueError(
                f"--contexts={context} and --new_tokens={arguments.new_tokens} are "
                f"{context + arguments.new_tokens} positions, and the demo was made for {most}; "
                "lower one of them"
            )
        if context > longest:
            raise ValueError(
                f"--contexts={context}: the longest of the demo's documents has {longest} tokens; "
                "name shorter contexts"
            )


def describe(method: str, context: int, temperature: float, compared: Comparison) -> dict[str, Any]:
    """The figures of one method at one context and temperature."""
    stats, rows = compared.speculative.stats, len(compared.speculative.sequences)
    return {
        "method": method,
        "context": context,
        "temperature": temperature,
        "tree": str(MEASURED[method].tree),
        **MEASURED[method].options,
        "rows": rows,
        "acceptance_length": stats.acceptance_length,
        "tokens_per_second": stats.tokens_per_second,
        "plain_tokens_per_second": compared.plain.stats.tokens_per_second,
        "identical_to_plain_fraction": 1 - len(compared.divergences) / rows,
    }


def confirmed_by_pass(drafted: Sequence[bool]) -> list[int]:
    """Draft tokens that every target pass confirmed; one that the text's end cut short is left out.

    Args:
      drafted: of every emitted token, the prefill's first.
    """
    passes = zip(*by_round(drafted), strict=True)
    return [accepted for emitted, accepted in passes if accepted < emitted]


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    agreement = f", agreement {row['agreement']:.3f}" if "agreement" in row else ""
    return (
        f"{row['method']:23} {row['context']:6} tokens T={row['temperature']:g}: "
        f"{row['acceptance_length']:5.2f} tokens per pass, {row['tokens_per_second']:7.0f} "
        f"tokens/s ({row['plain_tokens_per_second']:.0f} without), "
        f"{row['identical_to_plain_fraction']:.0%} of {row['rows']} rows identical to plain"
        f"{agreement}"
    )
