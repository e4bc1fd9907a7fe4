"""Drafts on real text with real weights: what a round yields, what it costs, and is the text plain?

A prompt is the middle of a file, of as many tokens as --context says; with --question a turn of a
chat that asks it about that piece. Each is decoded with speculation and without, from one prefill,
one row at a time, past every stop token. A row of the results is one text. ``loops`` says whether
the plain text holds a sequence of 16 tokens more than three times: repetition flatters lookup, so
read such rows apart. ``accepted_by_source`` counts accepted tokens by who proposed them.
The exit status is 1 if a text differs although the model promises that none does.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from longspec_jax import LongSpec, TreeConfig, cli
from longspec_jax.cli import settled
from longspec_jax.embedded import demo_drafts
from longspec_jax.generation.text import loops

from .report import Report, Row, run_header
from .timing import step

SHOWN = (
    "target prompt_tokens document temperature tree tokens_per_round tokens_per_second "
    "plain_tokens_per_second gain identical loops"
).split()


class Prompt(NamedTuple):
    """A piece of a file."""

    file: str
    tokens: np.ndarray


def main(arguments: argparse.Namespace) -> int:
    """Decode every text with every tree, print, and write the file; 1 if a promise is not kept."""
    arguments = settled(arguments, jax.default_backend() == "cpu")
    step("loading target and draft")
    drafts = demo_drafts(arguments.draft)
    spec = LongSpec.from_pretrained(arguments.target, drafts, dtype=arguments.dtype)
    header = run_header(
        jax.devices()[0].device_kind,
        __doc__ or "",
        target=str(arguments.target),
        draft=[str(name) for name in arguments.draft],
        question=arguments.question,
        precision=spec.precision,
        identical_promised=spec.identical,
    )
    different = 0
    with Report(header, arguments.json, SHOWN) as report:
        for context in arguments.context:
            prompts = [*pieces(spec, arguments.files, context, arguments.question)]
            if not prompts:
                raise ValueError(
                    f"no file of --files has {context} tokens; give longer ones, or a smaller "
                    "--context"
                )
            for temperature in arguments.temperature:
                for tree in arguments.tree or [None]:
                    for seed, prompt in enumerate(prompts, 1):
                        row = measured(spec, prompt, tree, temperature, seed, arguments.new_tokens)
                        whole = {"target": Path(arguments.target).name, "context": context, **row}
                        different += not row["identical"]
                        report.add(whole)
                    recent = report.rows[-len(prompts) :]
                    tokens, gain = (
                        statistics.fmean(row[name] for row in recent)
                        for name in ("tokens_per_round", "gain")
                    )
                    print(f"  mean of {len(recent)}: {tokens:.2f} tokens a round, gain {gain:.2f}")
    return cli.FAILED if different and spec.identical else cli.OK


def pieces(
    spec: LongSpec, files: Sequence[Path], context: int, question: str | None
) -> Iterator[Prompt]:
    """The middles of the files that are long enough."""
    for file in files:
        tokens = spec.tokenizer(file.read_text(errors="replace"))["input_ids"]
        first = (len(tokens) - context) // 2
        if first < 0:
            continue
        piece = tokens[first : first + context]
        if question is not None:
            content = f"{question}\n\n```\n{spec.tokenizer.decode(piece)}\n```"
            text = spec.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            piece = spec.tokenizer(text, add_special_tokens=False)["input_ids"]
        yield Prompt(file.name, np.asarray(piece, np.int32))


def measured(
    spec: LongSpec,
    prompt: Prompt,
    tree: TreeConfig | None,
    temperature: float,
    seed: int,
    new_tokens: int,
) -> Row:
    """A text decoded both ways."""
    found = spec.compare(
        prompt.tokens,
        tree=tree,
        temperature=temperature,
        seed=seed,
        max_new_tokens=new_tokens,
        eos_token_id=[],
    )
    stats, plain = found.speculative.stats, found.plain.stats
    [use, *_] = stats.trees
    return {
        "document": prompt.file,
        "drafter": use.drafter,
        "tree": "default" if tree is None else str(tree),
        "ran": str(use.tree),
        "temperature": temperature,
        "prompt_tokens": len(prompt.tokens),
        "new_tokens": new_tokens,
        "tokens_per_round": stats.acceptance_length,
        "accepted_by_source": dict(stats.accepted_by_source),
        "round_ms": 1000 * use.seconds / max(1, use.rounds),
        "plain_tokens_per_second": plain.tokens_per_second,
        "tokens_per_second": stats.tokens_per_second,
        "gain": found.speedup,
        "identical": found.identical,
        "loops": loops(found.plain.sequences[0]),
    }
