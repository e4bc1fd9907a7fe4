"""Benchmarks: ``python -m infer.bench COMMAND [options]``; ``--help`` lists the commands.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import importlib
import sys
from collections.abc import Sequence

from longspec_jax import cli

BENCHMARKS = {
    "attention": ("attention", "attention of tree nodes to a long prefix, and the rooflines"),
    "decode": ("decode", "whole rounds and plain steps of real shapes, and the gain"),
    "products": ("products", "the matmuls of a verification, beside XLA's"),
    "transformers": ("hugging_face", "plain decoding by Hugging Face transformers"),
}
"""Subcommand to the module that provides ``main(arguments)``, and what it answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    return cli.run(lambda: _run(argv), argv)


def _run(argv: Sequence[str] | None) -> int:
    from .arguments import parser

    summaries = {name: summary for name, (_, summary) in BENCHMARKS.items()}
    arguments = parser(summaries).parse_args(argv)
    module, _ = BENCHMARKS[arguments.command]
    importlib.import_module(f".{module}", __package__).main(arguments)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
