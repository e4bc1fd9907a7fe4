"""Train a draft: ``python -m train.run --config=vicuna7b``, or ``longspec-train`` once installed.

Only errors and exit codes live here; :mod:`train.arguments` reads the command line and
:mod:`train.pipeline` does the work. Nothing is imported before it is known to be installed, and
nothing slow before the arguments are.
"""

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longspec_jax.commands import command_name
from longspec_jax.extras import missing_packages

if TYPE_CHECKING:
    from .arguments import Arguments
    from .config import RunConfig

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 75
"""Exit statuses; the last is EX_TEMPFAIL of sysexits.h."""
USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)
"""What a person can mend; it is said in one sentence."""
SAID = (*USER_ERRORS, FloatingPointError)
"""What is said in one sentence; the last is a training that has diverged."""
COMMAND = command_name(__package__, "run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; user errors become one sentence and a status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if (missing := missing_packages("train")) is not None:
        return _fail(missing)
    from . import arguments

    if {"--help", "-h"} & set(given):
        print(arguments.help_text(COMMAND), end="")
        return 0
    try:
        return _train(arguments.parse(given), given)
    except SAID as error:
        return _report(error)


def _train(arguments: "Arguments", given: Sequence[str]) -> int:
    """Do what the arguments say."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # It misses PyTorch; we do not.
    from absl import flags, logging

    from longspec_jax.compilation import keep_programs

    from . import processes
    from .config import from_config

    flags.FLAGS.mark_as_parsed()  # Orbax declares flags of its own, which this command has not.
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save.
    config = from_config(arguments.config)
    for extra in config.log.extras:
        if (missing := missing_packages(extra)) is not None:
            return _fail(missing)
    if arguments.distributed or arguments.coordinator:
        processes.join(arguments.coordinator, arguments.processes, arguments.process)
    keep_programs()
    with processes.ending_together(_report):
        return _run(config, arguments, given)


def _run(config: "RunConfig", arguments: "Arguments", given: Sequence[str]) -> int:
    """Train, as one process of perhaps several."""
    from jax.errors import JaxRuntimeError

    from . import processes
    from .card import portable_command
    from .loop import Interrupted
    from .pipeline import train

    arguments.workdir.mkdir(parents=True, exist_ok=True)
    if processes.is_first():
        partial = arguments.workdir / "config.json.partial"
        partial.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        partial.replace(arguments.workdir / "config.json")
    try:
        train(config, arguments.workdir, portable_command(COMMAND, given))
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            "the devices' memory is full; raise a stage's accumulation, lower --config.loss_chunk, "
            f"mlp_chunk or accept_rows, or shard over more devices. {str(error).splitlines()[0]}"
        ) from error
    except Interrupted as stopped:
        print(f"{stopped}; the same command resumes it", file=sys.stderr)
        return INTERRUPTED
    print(f"done; see {arguments.workdir}", file=sys.stderr)
    return 0


def _report(error: Exception) -> int:
    """Tell of an error that ends all processes; the status."""
    if isinstance(error, SAID):
        return _fail(str(error), BAD_INPUT if isinstance(error, USER_ERRORS) else FAILED)
    traceback.print_exception(error)
    return FAILED


def _fail(message: str, status: int = BAD_INPUT) -> int:
    print(f"{COMMAND.removeprefix('python -m ')}: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
