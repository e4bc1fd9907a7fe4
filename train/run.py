"""Train a draft: ``python -m train.run --config=vicuna7b``, or ``longspec-train`` once installed.

Only errors and exit statuses live here; :mod:`train.arguments` reads the command line and
:mod:`train.pipeline` does the work. Nothing is imported before it is known to be installed, and
nothing slow before the arguments are read.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longspec_jax import cli
from longspec_jax.extras import missing_packages

if TYPE_CHECKING:
    from .arguments import Arguments

SENTENCES = (*cli.USER_ERRORS, FloatingPointError)
"""Errors that are one message without a traceback; the last is a training that has diverged."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    return cli.run(lambda: _command(given), given)


def _command(given: Sequence[str]) -> int:
    if (missing := missing_packages("train")) is not None:
        raise ValueError(missing)
    from . import arguments

    try:
        return _train(arguments.parse(given))
    except Exception as error:
        return _report(error)


def _train(arguments: "Arguments") -> int:
    """Train, as one process of perhaps several."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from absl import flags, logging

    from longspec_jax.compilation import keep_programs

    from . import processes

    flags.FLAGS.mark_as_parsed()  # Orbax declares flags that this command does not parse.
    # Orbax logs every step of every save, and what it raises with a traceback of its own.
    logging.set_verbosity(logging.FATAL)
    for extra in arguments.config.log.extras:
        if (missing := missing_packages(extra)) is not None:
            raise ValueError(missing)
    options = arguments.options
    if options.distributed or options.coordinator:
        processes.join(options.coordinator, options.processes, options.process)
    keep_programs()
    with processes.ending_together(_report):
        return _run(arguments)


def _run(arguments: "Arguments") -> int:
    from jax.errors import JaxRuntimeError

    from .loop import Interrupted
    from .pipeline import train

    try:
        train(arguments.config, arguments.workdir)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            "the devices' memory is full; raise a stage's accumulation, lower --config.loss_chunk, "
            f"mlp_chunk or accept_rows, or shard over more devices. {str(error).splitlines()[0]}"
        ) from error
    except Interrupted as stopped:
        cli.say(f"{stopped}; the same command resumes it")
        return stopped.status
    cli.say(f"done; see {arguments.workdir}")
    return cli.OK


def _report(error: Exception) -> int:
    """Print what ended the training, with a traceback if it is unexpected; the exit status."""
    return cli.fail(error, shows_traceback=not isinstance(error, SENTENCES))


if __name__ == "__main__":
    sys.exit(main())
