"""Tokenise a run's data once, on all cores; store what the draft reads of the target.

    python -m train.prepare --config=vicuna7b --workdir=runs/vicuna7b

Training does this by itself. The tokens are kept in the working folder, under a
name that is a digest of data, tokenizer and template: training uses them, and makes new ones if any
of these changed.

With --config.features.folder=FOLDER the target runs once over all rows, and what the draft reads of
it is stored there. The training with the same option then reads it instead of running the target.
Stopped, the command goes on behind the last whole shard.

The exit status is 0, or 2 for bad input.
"""

import os
import sys
import time
from collections.abc import Sequence

from longspec_jax import cli, files
from longspec_jax.extras import missing_packages

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
    """Tokenise the data of a command line, and store features; a sentence for every stage.

    Raises:
      ValueError, OSError: for a mistake, or data that cannot be read.
    """
    from . import arguments
    from .data.source import Source

    parsed = arguments.parse(given, parser())
    config = parsed.config
    sections = [stage.data_section for stage in config.stages]
    runs = zip(config.runs_of_stages(), sections, strict=True)
    stages = [(run, section) for run, section in runs if run.data.reads_documents]
    stores = bool(config.features.folder)
    if not stages and not stores:
        raise ValueError(
            "this configuration makes its own data, there is nothing to prepare; set "
            "--config.data.files=PATHS or choose one that reads files or the hub"
        )
    files.make_folder(parsed.workdir, "--workdir")
    lines = []
    for run, section in stages:
        source = Source(run, parsed.workdir, config.target, sys.maxsize, section)
        started = time.monotonic()
        made = source.prepare()
        seconds = time.monotonic() - started
        skipped = f"{made.skipped}\n" if made.skipped else ""
        found = f"{len(made)} documents, {len(made.tokens)} tokens"
        lines.append(f"{skipped}{found} in {source.encoded_folder} after {seconds:.1f} s")
    if stores:
        from .storing import store_features

        lines += store_features(config, parsed.workdir)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
