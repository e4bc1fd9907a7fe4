"""Tokenise a run's data once, by several processes: ``python -m train.prepare --config=vicuna7b``.

Takes the arguments of ``train.run`` and ``--workers=N``, a process for every core if absent. The
tokens are kept in the working folder under a name that data, tokenizer and template give them;
training finds them there, and makes its own if anything changed. The exit status is 0, or 2 for bad
input.
"""

import os
import sys
import time
from collections.abc import Sequence

from longspec_jax.commands import command_name
from longspec_jax.extras import missing_packages

COMMAND = command_name(__package__, "prepare")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    given = sys.argv[1:] if argv is None else list(argv)
    if {"--help", "-h"} & set(given):
        print(f"usage: {COMMAND} --config=NAME [--workers=N] [--workdir=FOLDER] [...]\n\n{__doc__}")
        return 0
    if (missing := missing_packages("train")) is not None:
        return _fail(missing)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It misses PyTorch; we do not.
    try:
        print(prepare(given))
    except (ValueError, OSError, NotImplementedError) as error:
        return _fail(str(error))
    return 0


def prepare(given: Sequence[str]) -> str:
    """Do what the arguments say; what was made, in a sentence for every stage.

    Raises:
      ValueError, OSError: for a mistake, or data that cannot be read.
    """
    from . import arguments
    from .config import from_config
    from .data.rows import Source

    workers, rest = _workers(given)
    parsed = arguments.parse(rest)
    config = from_config(parsed.config)
    sections = [stage.data_section for stage in config.stages]
    runs = zip(config.runs_of_stages(), sections, strict=True)
    stages = [(run, section) for run, section in runs if run.data.reads_documents]
    if not stages:
        raise ValueError(
            "this configuration makes its own data, there is nothing to prepare; set "
            "--config.data.files=PATHS or choose one that reads files or the hub"
        )
    parsed.workdir.mkdir(parents=True, exist_ok=True)
    said = []
    for run, section in stages:
        source = Source(run, parsed.workdir, config.target, sys.maxsize, section)
        started = time.monotonic()
        made = source.prepare(workers)
        seconds = time.monotonic() - started
        skipped = f"{made.skipped}\n" if made.skipped else ""
        found = f"{len(made)} documents, {len(made.tokens)} tokens"
        said.append(f"{skipped}{found} in {source.encoded_folder} after {seconds:.1f} s")
    return "\n".join(said)


def _workers(given: Sequence[str]) -> tuple[int, list[str]]:
    """The number of workers, and the arguments that are left."""
    flag = "--workers="
    named = [word.removeprefix(flag) for word in given if word.startswith(flag)]
    if any(not word.isdecimal() or not int(word) for word in named):
        raise ValueError(f"{flag}{named[-1]} is no number of processes; give 1 or more")
    workers = int(named[-1]) if named else len(os.sched_getaffinity(0))
    return workers, [word for word in given if not word.startswith(flag)]


def _fail(message: str) -> int:
    print(f"{COMMAND.removeprefix('python -m ')}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
