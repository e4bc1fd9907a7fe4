"""Tokenise a run's data once, on all cores; store what the draft reads of the target.

    python -m train.prepare --config=vicuna7b --workdir=runs/vicuna7b

Training does this by itself. The tokens are kept in the working folder, under a name that is a
digest of data, tokenizer and template: training uses them, and makes new ones if any of these
changed. A configuration that trains on installed text (--config=demo, smollm2) has its corpus
gathered and kept, in WORKDIR/corpus or --config.data.corpus.folder.

With --config.features.folder=FOLDER the target runs once over all rows, and what the draft reads of
it is stored there. The training with the same option then reads it instead of running the target.
Stopped, the command goes on after the last whole shard.

The exit status is 0, or 2 for bad input.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longspec_jax import cli, files
from longspec_jax.extras import missing_packages

if TYPE_CHECKING:
    from .config import CorpusConfig, RunConfig
    from .data.source import Source

COMMAND = cli.command_name(__package__, "prepare")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    return cli.run(lambda: _command(given), given)


def _command(given: Sequence[str]) -> int:
    if (missing := missing_packages("train")) is not None:
        raise ValueError(missing)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    print(prepare(given))
    return cli.OK


def parser() -> cli.Parser:
    """The command's parser."""
    from .arguments import parser

    return parser(COMMAND, __doc__ or "")


def prepare(given: Sequence[str]) -> str:
    """Make the tokens of a command line's data, and store features; a sentence for each of them.

    Raises:
      ValueError, OSError: for a mistake, or data that cannot be read.
    """
    from . import arguments
    from .data.source import Source
    from .pipeline import check_workdir

    parsed = arguments.parse(given, parser())
    config, workdir = parsed.config, parsed.workdir
    check_workdir(workdir)
    files.make_folder(workdir, "--workdir")
    with files.alone(workdir, "--workdir"):
        lines = [] if config.data.corpus is None else [_corpus(config, config.data.corpus, workdir)]
        for stage, run in zip(config.stages, config.runs_of_stages(), strict=True):
            if run.data.reads_documents:
                source = Source(run, workdir, config.target, sys.maxsize, stage.data_section)
                lines += _documents(source)
        if config.features.folder:
            from .storing import store_features

            lines += store_features(config, workdir)
    return "\n".join(lines)


def _corpus(config: "RunConfig", corpus: "CorpusConfig", workdir: Path) -> str:
    """Gather the run's corpus, unless it is there; a sentence about it."""
    from .data.corpus import prepare_corpus
    from .data.tokens import read_tokens

    started = time.monotonic()
    made = prepare_corpus(corpus, workdir, config.found_target(workdir), lambda values: None)
    seconds = time.monotonic() - started
    train, held_out = (len(read_tokens(path)) for path in made)
    return (
        f"{train} tokens to train on and {held_out} held out in {corpus.place(workdir)} after "
        f"{seconds:.1f} s"
    )


def _documents(source: "Source") -> Iterator[str]:
    """Tokenise the documents of a stage, unless it is done; sentences about them."""
    started = time.monotonic()
    made = source.prepare()
    seconds = time.monotonic() - started
    if made.skipped:
        yield made.skipped
    found = f"{len(made)} documents, {len(made.tokens)} tokens"
    yield f"{found} in {source.encoded_folder} after {seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
