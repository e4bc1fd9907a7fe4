"""Order a target's tokens by their frequency in a corpus, for a reduced draft vocabulary.

    python -m train.vocabulary --target=TARGET --draft=FOLDER --files='corpus/*.jsonl'
    python -m infer.decode --target=TARGET --draft=FOLDER --draft_option=vocabulary=16384

The table is saved next to the draft. With the option vocabulary=N the draft proposes only the first
N tokens; the target's output does not change. Use text like the text you will generate.
Special and stop tokens come first, whatever their counts. Files are read as for training.
The exit status is 0, or 2 for bad input.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from longspec_jax import cli
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.checkpoints.longspec import draft_config
from longspec_jax.drafters.checkpoints.vocabulary import save_draft_vocabulary
from longspec_jax.drafters.vocabulary import most_frequent
from longspec_jax.extras import missing_packages
from longspec_jax.files import expanded
from longspec_jax.weights.hf import load_stop_tokens
from longspec_jax.weights.hf_config import target_config
from longspec_jax.weights.hub import local_model
from longspec_jax.weights.json_files import read_json
from longspec_jax.weights.model_files import names_of_tensors, read_config

from .config import DataConfig, add_documents
from .data.documents import BadRows
from .data.loading import Documents
from .data.tokens import ModelTokenizer, encode_documents, load_tokenizer

EMBEDDING = "model.embed_tokens.weight"
"""What every language model's weights hold, and no LongSpec draft's."""
SHARES = (32, 16, 8, 4, 2)
"""Fractions of the vocabulary whose coverage of the corpus is printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    if (missing := missing_packages("train")) is not None:
        raise ValueError(missing)
    for line in run(arguments):
        print(line, flush=True)
    return cli.OK


def run(arguments: argparse.Namespace) -> Iterator[str]:
    """Count, save, and report what a smaller vocabulary would cover."""
    target = local_model(arguments.target, arguments.revision)
    config = target_config(read_config(target), "float32")
    folder, vocab_size = _draft_folder(arguments.draft, config), config.vocab_size
    tokenizer = load_tokenizer(target)
    texts = Documents(DataConfig.whole(arguments), BadRows(0, "")).texts()
    counts, documents = count_tokens(texts, tokenizer, vocab_size)
    always = {*tokenizer.all_special_ids, *load_stop_tokens(target)}
    table = most_frequent(counts, arguments.size, sorted(always))
    file = save_draft_vocabulary(folder, table, vocab_size)
    seen = (counts > 0).sum()
    yield f"{documents} documents, {counts.sum()} tokens, {seen} of {vocab_size} seen"
    yield f"{file}: {len(table)} tokens"
    for size in sorted({len(table), *(vocab_size // share for share in SHARES)}):
        if size <= len(table):
            covered = counts[table[:size]].sum() / counts.sum()
            yield f"--draft_option=vocabulary={size}: {covered:.2%} of the corpus"


def _draft_folder(name: str, target: TargetConfig) -> Path:
    """The folder of a draft that fits the target.

    Raises:
      OSError, ValueError: if it is not such a folder.
    """
    folder = expanded(name)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--draft={name} is not a folder; the table is saved next to the draft's weights: name "
            "the folder they are in, a hub draft's after downloading it"
        )
    try:
        draft_config(read_json(folder / "config.json"), target).check_fits(target)
        if EMBEDDING in names_of_tensors(folder):
            raise ValueError("it is a whole language model, and only LongSpec drafts have a table")
    except (OSError, ValueError) as error:
        raise ValueError(f"--draft={name} holds no draft for this target: {error}") from None
    return folder


def count_tokens(
    texts: Iterable[str], tokenizer: ModelTokenizer, vocab_size: int
) -> tuple[Int[np.ndarray, " V"], int]:
    """How often every token of the vocabulary occurs in the texts, and the number of texts."""
    counts, number = np.zeros(vocab_size, np.int64), 0
    for ids in encode_documents(tokenizer, texts):
        found = np.bincount(ids)
        if len(found) > vocab_size:
            raise ValueError(
                f"the tokenizer gives token {len(found) - 1} and the target has {vocab_size}; use "
                "the tokenizer that belongs to this target"
            )
        counts[: len(found)] += found
        number += 1
    return counts, number


def _parser() -> cli.Parser:
    parser = cli.Parser(prog=cli.command_name(__package__, "vocabulary"), description=__doc__)
    add_documents(parser)
    parser.add_argument(
        "--draft", required=True, help="folder of the draft, where the table is written"
    )
    parser.add_argument("--size", type=cli.COUNT, help="tokens to keep; all if absent")
    return parser


if __name__ == "__main__":
    sys.exit(main())
