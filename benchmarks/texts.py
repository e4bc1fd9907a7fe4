"""Drafts on real text with real weights: what a round yields, what it costs, and is the text plain?

Prompts of every kind of text and length are decoded plainly, then with every tree, --batch of them
at once, past every stop token, in caches of one size. A row of the results is one call. Its gain is
over plain decoding of the same call. ``accepted_by_source`` counts accepted tokens by who proposed
them. ``differing_tokens`` counts those that are not plain decoding's.

The summary has geometric means over the texts and calls that differ in nothing else, with 95 %
intervals of Student's t over the logarithms where there are four or more: one text that repeats its
prompt gains ten times, and would be most of an arithmetic mean. A text ``loops`` if plain decoding
writes a sequence of 16 tokens more than three times: repetition flatters lookup, so the gain of
such texts is apart, too. The exit status is 1 if a token differs although the model promises that
none does.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from scipy.special import stdtrit

from infer.arguments import Models
from infer.eval.config import refuse_idle_filters
from longspec_jax import PLAIN, GenerateResult, LongSpec, TreeConfig, cli
from longspec_jax.cli import as_options, counted, settled
from longspec_jax.embedded import demo_drafts, demo_target
from longspec_jax.generation.text import loops

from .arguments import DEFAULT
from .prompts import Prompt, kinds_of, prompts
from .report import Report, Row, run_header
from .timing import rounded, step

SHOWN = "text context batch temperature tree tokens_per_round gain differing_tokens".split()
SAME = "target text context batch temperature drafter tree".split()
"""In which the calls of a line of the summary agree."""
COUNTED = "differing_tokens", "new_tokens"
FEWEST = 4
"""Fewer values have no interval."""


def main(arguments: argparse.Namespace) -> int:
    """Decode every text with every tree, print, and write the file; 1 if a promise is not kept."""
    arguments = settled(arguments, jax.default_backend() == "cpu")
    refuse_idle_filters(arguments.temperature, arguments.top_k, arguments.top_p)
    step("loading target and draft")
    spec = load(arguments)
    kinds = kinds_of(spec, arguments.text or (), arguments.files)
    # Calls of several rows are full; a text more costs nothing.
    count = max(-(-arguments.texts // rows) * rows for rows in arguments.batch)
    texts = {
        (kind, context): prompts(spec, kind, context, count, arguments.files)
        for kind in kinds
        for context in arguments.context
    }
    longest = max(len(prompt.tokens) for each in texts.values() for prompt in each)
    spec = dataclasses.replace(spec, expected_tokens=longest + arguments.new_tokens)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        target=str(arguments.target),
        draft=[draft.name for draft in spec.drafts],
        files=[str(file) for file in arguments.files],
        precision=spec.precision,
        identical_promised=spec.identical,
        longest=spec.expected_tokens,
        new_tokens=arguments.new_tokens,
        draft_options=as_options(arguments.draft_option),
        filters={"top_k": arguments.top_k, "top_p": arguments.top_p},
    )
    target = Path(arguments.target).name.removesuffix(".gguf")
    with Report(header, arguments.json, SHOWN) as report:
        for rows, temperature, (kind, context) in itertools.product(
            arguments.batch, arguments.temperature, texts
        ):
            own = texts[kind, context][: -(-arguments.texts // rows) * rows]
            said = f"{kind} of {context} tokens, {counted(rows, 'row')}, T = {temperature:g}"
            about: Row = {"target": target, "text": kind, "context": context}
            about |= {"batch": rows, "temperature": temperature}
            continued = partial(decoded, spec, arguments=arguments, temperature=temperature)
            step(f"plain decoding: {said}")
            calls = [own[first : first + rows] for first in range(0, len(own), rows)]
            plain = [continued(call, PLAIN) for call in calls]
            for tree in arguments.tree:
                step(f"{DEFAULT if tree is None else tree}: {said}")
                added = []
                for call, expected in zip(calls, plain, strict=True):
                    found = continued(call, tree)
                    added.append(about | compared(spec, call, tree, found, expected))
                    report.add(added[-1])
                report.summarise(summarised(report.rows))
                print(f"  {line_of(summarised(added)[0])}", flush=True)
    differing, tokens = (sum(row[name] for row in report.rows) for name in COUNTED)
    print(f"{differing} of {tokens} tokens differ from plain decoding's")
    return cli.FAILED if differing and spec.identical else cli.OK


def load(arguments: argparse.Namespace) -> LongSpec:
    """The target and what proposes for it.

    Raises:
      ValueError: where nothing does.
    """
    named = Models(arguments.target, arguments.draft)
    target = demo_target() if named.is_demo else arguments.target
    sources = demo_drafts([*named.drafts])
    if not sources:
        raise ValueError(f"nothing proposes for --target={target}: name a --draft, such as ngram")
    options = as_options(arguments.draft_option)
    return LongSpec.from_pretrained(target, sources, draft_options=options, dtype=arguments.dtype)


def decoded(
    spec: LongSpec,
    call: Sequence[Prompt],
    tree: TreeConfig | None,
    *,
    arguments: argparse.Namespace,
    temperature: float,
) -> GenerateResult:
    """Some texts as one call, each with a seed of its own."""
    return spec.generate(
        [prompt.tokens for prompt in call],
        tree=tree,
        temperature=temperature,
        top_k=arguments.top_k if temperature else 0,
        top_p=arguments.top_p if temperature else 1.0,
        seed=[prompt.seed for prompt in call],
        max_new_tokens=arguments.new_tokens,
        eos_token_id=[],
    )


def compared(
    spec: LongSpec,
    call: Sequence[Prompt],
    tree: TreeConfig | None,
    found: GenerateResult,
    plain: GenerateResult,
) -> Row:
    """The figures of a call next to those of plain decoding."""
    stats = found.stats
    texts = [
        {
            "document": prompt.document,
            "prompt_tokens": len(prompt.tokens),
            "tokens_per_round": rounded((len(tokens) - 1) / max(1, passes)),
            "loops": loops(expected),
        }
        for prompt, tokens, passes, expected in zip(
            call, found.sequences, stats.target_passes, plain.sequences, strict=True
        )
    ]
    pairs = zip(found.sequences, plain.sequences, strict=True)
    rounds = sum(use.rounds for use in stats.trees)
    return {
        "drafter": proposers(spec, tree),
        "tree": DEFAULT if tree is None else str(tree),
        "ran": ", ".join(f"{use.tree} x {use.rounds}" for use in stats.trees if use.rounds),
        "tokens_per_round": rounded(stats.acceptance_length),
        "accepted_by_source": dict(stats.accepted_by_source),
        "round_ms": rounded(1000 * stats.decode_seconds / max(1, rounds)),
        "plain_tokens_per_second": rounded(plain.stats.tokens_per_second),
        "tokens_per_second": rounded(stats.tokens_per_second),
        "gain": rounded(stats.tokens_per_second / plain.stats.tokens_per_second),
        "new_tokens": sum(stats.new_tokens),
        "differing_tokens": sum(
            one != other for pair in pairs for one, other in itertools.zip_longest(*pair)
        ),
        "looping": sum(text["loops"] for text in texts),
        "texts": texts,
    }


def proposers(spec: LongSpec, tree: TreeConfig | None) -> str:
    """Who proposes into a tree; all drafts may into one that is chosen."""
    return "+".join(
        draft.name
        for draft in spec.drafts
        if tree is None or len(spec.drafts) == 1 or (tree.lookup if draft.looks_up else tree.widths)
    )


def summarised(rows: Iterable[Row]) -> list[Row]:
    """Geometric means of the calls that agree, in the order of the first of each."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault(tuple(row[name] for name in SAME), []).append(row)
    return [dict(zip(SAME, key, strict=True)) | _figures(calls) for key, calls in alike.items()]


def _figures(calls: Sequence[Row]) -> Row:
    texts = [text for call in calls for text in call["texts"]]
    accepted = sum((Counter(call["accepted_by_source"]) for call in calls), Counter[str]())
    apart = {
        "looping": [call for call in calls if call["looping"] == len(call["texts"])],
        "other": [call for call in calls if not call["looping"]],
    }
    return {
        "texts": len(texts),
        "looping": sum(text["loops"] for text in texts),
        **_mean("tokens_per_round", texts),
        **_mean("gain", calls),
        **{f"gain_{name}": _mean("gain", some)["gain"] for name, some in apart.items()},
        **{
            name: rounded(statistics.fmean(call[name] for call in calls))
            for name in ("plain_tokens_per_second", "tokens_per_second", "round_ms")
        },
        "accepted_by_source": dict(accepted),
        **{name: sum(call[name] for call in calls) for name in COUNTED},
    }


def _mean(name: str, rows: Sequence[Row]) -> Row:
    """The geometric mean of a ratio and its interval's ends; None where the rows are too few."""
    logarithms = [math.log(row[name]) for row in rows if row[name]]
    if not logarithms:
        return {name: None}
    mean, low, high = statistics.fmean(logarithms), None, None
    if len(logarithms) >= FEWEST:
        error = statistics.stdev(logarithms) / math.sqrt(len(logarithms))
        reach = float(stdtrit(len(logarithms) - 1, 0.975)) * error
        low, high = rounded(math.exp(mean - reach)), rounded(math.exp(mean + reach))
    return {name: rounded(math.exp(mean)), f"{name}_low": low, f"{name}_high": high}


def line_of(summary: Row) -> str:
    """A line of the summary for people."""
    words = [f"mean of {counted(summary['texts'], 'text')}"]
    for name, unit in (("tokens_per_round", "tokens a round"), ("gain", "times plain decoding")):
        low, high = summary.get(f"{name}_low"), summary.get(f"{name}_high")
        interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
        words.append(f"{summary[name]:.2f}{interval} {unit}")
    return f"{', '.join(words)}; {summary['looping']} loop"
