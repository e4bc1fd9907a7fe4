"""Benchmarks: ``python -m benchmarks COMMAND [options]``; ``--help`` lists the commands.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import importlib
import sys
from collections.abc import Sequence

from longspec_jax import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    return cli.run(lambda: _run(argv), argv)


def _run(argv: Sequence[str] | None) -> int:
    from .arguments import BENCHMARKS, parser

    arguments = parser().parse_args(argv)
    module = BENCHMARKS[arguments.command][0]
    return importlib.import_module(f".{module}", __package__).main(arguments) or cli.OK


if __name__ == "__main__":
    sys.exit(main())
