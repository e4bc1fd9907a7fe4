"""Order a target's tokens by how often a corpus holds them, for a reduced draft vocabulary.

    python -m train.vocabulary --target=TARGET --drafter=FOLDER --files='corpus/*.jsonl'
    python -m infer.decode --target=TARGET --drafter=FOLDER --drafter_option=vocabulary=16384

The table is saved beside the draft, which proposes from its first tokens where it is told to; what
the target says does not change. Use text like that to be generated. Special and stop tokens come
first, whatever their counts. Files are read as the trainer reads them. The exit status is 0, or 2
for bad input.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from longspec_jax.commands import command_name
from longspec_jax.drafters.vocabulary import most_frequent, save_draft_vocabulary
from longspec_jax.extras import missing_packages
from longspec_jax.weights.hf import load_stop_tokens
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.json_files import read_json

from .config import DataConfig
from .data.loading import load_documents
from .data.tokenizer import encode_documents, load_tokenizer

SHARES = (32, 16, 8, 4, 2)
"""Fractions of the vocabulary whose coverage of the corpus is printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    if (missing := missing_packages("train")) is not None:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It misses PyTorch; we do not.
    try:
        for line in run(arguments):
            print(line, flush=True)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Count, save, and say what a smaller vocabulary would cover."""
    folder = Path(arguments.draft).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--draft={arguments.draft} is not a folder; the table is saved beside the draft's "
            "weights: name the folder they are in, a hub draft's after downloading it"
        )
    target = local_folder(arguments.target, arguments.revision)
    vocab_size = target_config(read_json(target / "config.json"), "float32").vocab_size
    tokenizer = load_tokenizer(target)
    documents = load_documents(
        DataConfig.whole(arguments.files or "", arguments.hub or "", arguments.split)
    )
    counts = count_tokens(documents.texts(), tokenizer, vocab_size)
    always = {*tokenizer.all_special_ids, *load_stop_tokens(target)}
    table = most_frequent(counts, arguments.size, sorted(always))
    file = save_draft_vocabulary(folder, table, vocab_size)
    seen = (counts > 0).sum()
    yield f"{len(documents)} documents, {counts.sum()} tokens, {seen} of {vocab_size} seen"
    yield f"{file}: {len(table)} tokens"
    for size in sorted({len(table), *(vocab_size // share for share in SHARES)}):
        if size <= len(table):
            covered = counts[table[:size]].sum() / counts.sum()
            yield f"--drafter_option=vocabulary={size}: {covered:.2%} of the corpus"


def count_tokens(texts: Iterable[str], tokenizer: Any, vocab_size: int) -> Int[np.ndarray, " V"]:
    """How often every token of the vocabulary occurs in the texts.

    Args:
      texts: documents.
      tokenizer: a transformers tokenizer, the target's.
      vocab_size: width of the target's logits, which may exceed the tokenizer's entries.
    """
    counts = np.zeros(vocab_size, np.int64)
    for ids in encode_documents(tokenizer, texts):
        found = np.bincount(ids)
        if len(found) > vocab_size:
            raise ValueError(
                f"the tokenizer gives token {len(found) - 1} and the target has {vocab_size}; use "
                "the tokenizer that belongs to this target"
            )
        counts[: len(found)] += found
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(__package__, "vocabulary"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help="folder or hub id: config and tokenizer")
    parser.add_argument("--revision", help="version of the target on the hub")
    parser.add_argument("--draft", required=True, help="folder of its draft, where the table goes")
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--files", help="comma-separated json, jsonl, text or parquet files")
    corpus.add_argument("--hub", help="a data set on the hub, owner/name or owner/name/file")
    parser.add_argument("--split", default="train", help="split of a hub data set")
    parser.add_argument("--size", type=int, help="tokens to keep; all of them, in order, if absent")
    return parser


if __name__ == "__main__":
    sys.exit(main())
