"""Benchmarks: ``python -m infer.bench attention|decode|match|products|transformers|report [options]``.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import argparse
import importlib
from collections.abc import Sequence

BENCHMARKS = {
    "attention": "infer.bench_attention",
    "decode": "infer.bench_decode",
    "match": "infer.bench_match",
    "products": "infer.bench_products",
    "transformers": "infer.bench_transformers",
    "report": "infer.bench_report",
}
"""Subcommand to the module that provides ``add_arguments(parser)`` and ``main(arguments)``."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m infer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in BENCHMARKS.items():
        benchmark = importlib.import_module(module)
        summary = (benchmark.__doc__ or name).splitlines()[0]
        benchmark.add_arguments(commands.add_parser(name, help=summary))
    arguments = parser.parse_args(argv)
    importlib.import_module(BENCHMARKS[arguments.command]).main(arguments)


if __name__ == "__main__":
    main()
