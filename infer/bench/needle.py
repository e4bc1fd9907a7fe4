"""Whether a draft finds what its target finds: a code hidden in a long document.

A document of real text holds one line with a code and ends with that line again, up to the code
(needle retrieval; SpecExtend, section 2.2 and table 1). The code is given token by token, and what
is measured is whether each of its tokens was the draft's likeliest, with the very state that it
would have in decoding: ``accuracy`` is the share of tokens, ``found`` the share of codes of which
all tokens were, ``perplexity`` that of the tokens. ``target`` is the target alone; ``full`` the
draft over its whole cache, ``streaming`` over sinks and recent tokens, ``retrieval`` over the
chunks that the target attends to; ``target_retrieval`` is the target itself as the draft over such
chunks of its own (TriForce), the most that can be made of them.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from longspec_jax import LongSpec, TreeConfig, demo_prompts
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.draft import Draft
from longspec_jax.drafters.longspec.load import LongSpecDraft
from longspec_jax.drafters.retrieval.working_cache import WorkingCacheOptions
from longspec_jax.drafters.small_lm.load import SmallLM
from longspec_jax.embedded import DEMO_NAME, DRAFTS

from ..haystack import NeedleDocument, needle_document
from ..wording import counted
from .arguments import settled
from .forced import Verdict, forced
from .progress import announce, step
from .report import Report, run_header

ONE_TOKEN = TreeConfig((1,))
CPU_SECONDS = 120
"""Of one cache at one context; a rough estimate for two shared cores."""


def main(arguments: argparse.Namespace) -> None:
    """Hide, ask, print, and write what was asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    cpu = jax.default_backend() == "cpu"
    arguments = settled(arguments, cpu)
    if cpu:
        cases = len(arguments.caches) * len(arguments.contexts)
        announce(counted(cases, "case"), cases * CPU_SECONDS)
    spec = loaded(arguments)
    check_positions(spec, arguments)
    texts = [path.read_text("utf-8") for path in arguments.texts or ()] or [
        *demo_prompts().values()
    ]
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        **{"target": arguments.target, "drafter": arguments.drafter},
        **{"dtype": spec.target_config.dtype, "seed": arguments.seed},
    )
    with Report(header, arguments.json) as report:
        for context in arguments.contexts:
            documents = hidden(spec, texts, context, arguments)
            told = False
            for cache in arguments.caches:
                step(f"{cache} cache, {context} tokens")
                draft, own = asked(spec, cache, arguments.working, documents)
                if not told:
                    told = True
                    row = describe("target", context, documents, own, arguments.depths)
                    report.add(row, line(row))
                row = describe(cache, context, documents, draft, arguments.depths)
                report.add({**row, "drafter": arguments.drafter}, line(row))


def loaded(arguments: argparse.Namespace) -> LongSpec:
    """The target and a draft that reads its whole cache."""
    drafter = DRAFTS.get(arguments.drafter, arguments.drafter)
    if arguments.target == DEMO_NAME:
        return LongSpec.demo(draft=drafter)
    return LongSpec.from_pretrained(arguments.target, drafter)


def check_positions(spec: LongSpec, arguments: argparse.Namespace) -> None:
    """Refuse documents that the target was not made for.

    Raises:
      ValueError: naming the option.
    """
    most = spec.target_config.max_positions
    for context in arguments.contexts:
        if context > most - 64:
            raise ValueError(
                f"--contexts={context}: the target was made for {most} positions, and the answer "
                f"takes some of them; name at most {most - 64}"
            )


def hidden(
    spec: LongSpec, texts: Sequence[str], context: int, arguments: argparse.Namespace
) -> list[NeedleDocument]:
    """The documents of a context: of every depth as many as were asked for."""

    def tokenize(text: str) -> list[int]:
        return spec.tokenizer(text, add_special_tokens=False)["input_ids"]

    cases = [(depth, number) for depth in arguments.depths for number in range(arguments.needles)]
    return [
        needle_document(tokenize, texts, context, depth, arguments.seed + index)
        for index, (depth, _) in enumerate(cases)
    ]


def asked(
    spec: LongSpec, cache: str, working: int, documents: Sequence[NeedleDocument]
) -> tuple[Verdict, Verdict]:
    """What the draft with this cache thinks of the codes, and what the target does."""
    draft = reading(spec, cache, working)
    target = CachedTarget(spec.target_config, spec.attention)
    params = Params(spec.target_params, draft.params)
    most = max(len(document.answer) for document in documents)
    # What stands behind a shorter code is not counted.
    answers = [(document.answer + document.answer[-1:] * most)[:most] for document in documents]
    prompts = np.asarray([document.tokens for document in documents], np.int32)
    return forced(
        *(target, draft.drafter(ONE_TOKEN, spec.attention), params),
        *(prompts, np.asarray(answers, np.int32), spec.prefill_chunk),
    )


def reading(spec: LongSpec, cache: str, working: int) -> Draft:
    """The draft that reads so much of its cache."""
    [draft] = spec.drafts
    options = {
        "full": WorkingCacheOptions(),
        "streaming": WorkingCacheOptions(working=working, refresh=0),
    }.get(cache, WorkingCacheOptions(working=working))
    part = options.working_cache(spec.target_config)
    if cache == "target_retrieval":
        return SmallLM(spec.target_config, spec.target_params, working=part)
    if not isinstance(draft, SmallLM | LongSpecDraft):
        raise ValueError(
            f"--drafter={draft.name} keeps no cache of which it could read a part; name a small "
            "language model or a LongSpec draft"
        )
    return replace(draft, working=part)


def describe(
    cache: str,
    context: int,
    documents: Sequence[NeedleDocument],
    verdict: Verdict,
    depths: Sequence[float],
) -> dict[str, Any]:
    """The figures of one cache at one context."""
    lengths = np.asarray([len(document.answer) for document in documents])
    counts = np.arange(verdict.right.shape[1]) < lengths[:, None]
    right = np.where(counts, verdict.right, False).sum(axis=1)
    by_depth = right.reshape(len(depths), -1).sum(axis=1) / lengths.reshape(len(depths), -1).sum(
        axis=1
    )
    logs = verdict.log_probabilities[counts]
    return {
        "cache": cache,
        "context": context,
        "documents": len(documents),
        "accuracy": float(right.sum() / lengths.sum()),
        "found": float((right == lengths).mean()),
        "perplexity": float(np.exp(-logs.mean())),
        "accuracy_by_depth": {
            f"{depth:g}": float(share) for depth, share in zip(depths, by_depth, strict=True)
        },
    }


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    return (
        f"{row['cache']:16} {row['context']:6} tokens: {row['accuracy']:5.1%} of the codes' tokens,"
        f" {row['found']:4.0%} of {counted(row['documents'], 'code')} found, perplexity "
        f"{row['perplexity']:.2f}"
    )
