"""Benchmarks: ``python -m infer.bench attention|decode|match|products|transformers|report [options]``.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from . import arguments as bench_arguments
from . import files as bench_files

BENCHMARKS = {
    "attention": ("attention", "attention of tree nodes to a long prefix, and the roofs"),
    "decode": ("decode", "whole rounds and plain steps of real shapes, and the gain"),
    "match": ("match", "how often output in bfloat16 is that of plain decoding"),
    "products": ("products", "the matrix products of a verification, beside XLA's"),
    "transformers": ("hugging_face", "plain decoding by Hugging Face transformers"),
    "report": ("report", "merge result files and draw their chart"),
}
"""Subcommand to the module that provides ``main(arguments)``, and what it answers."""
USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    summaries = {name: summary for name, (_, summary) in BENCHMARKS.items()}
    arguments = bench_arguments.parser(summaries).parse_args(argv)
    try:
        bench_files.check_outputs(arguments)
        module, _ = BENCHMARKS[arguments.command]
        importlib.import_module(f".{module}", __package__).main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # The reader has seen enough, as head has.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # The boundary to the shell: one message and a status.
        return _failed(error, arguments)
    return 0


def _failed(error: Exception, arguments: argparse.Namespace) -> int:
    """Say what went wrong in one line; returns the exit status."""
    if arguments.traceback:
        traceback.print_exc()
    bad_input = isinstance(error, USER_ERRORS)
    label = "error" if bad_input else f"failed while running: {type(error).__name__}"
    message = (str(error).splitlines() or [""])[0]
    if isinstance(error, ModuleNotFoundError):
        from longspec_jax.extras import missing_extra

        if missing := missing_extra(error):
            bad_input, label, message = True, "error", missing
    print(f"{label}: {message}", file=sys.stderr)
    return 2 if bad_input else 1


if __name__ == "__main__":
    sys.exit(main())
