"""Benchmarks: ``python -m infer.bench attention|decode|match|products|transformers|report [options]``.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import argparse
import importlib
from collections.abc import Sequence

BENCHMARKS = {
    "attention": ".bench_attention",
    "decode": ".bench_decode",
    "match": ".bench_match",
    "products": ".bench_products",
    "transformers": ".bench_transformers",
    "report": ".bench_report",
}
"""Subcommand to the module that provides ``add_arguments(parser)`` and ``main(arguments)``."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m infer.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in BENCHMARKS.items():
        benchmark = importlib.import_module(module, __package__)
        summary = (benchmark.__doc__ or name).splitlines()[0]
        benchmark.add_arguments(commands.add_parser(name, help=summary))
    arguments = parser.parse_args(argv)
    importlib.import_module(BENCHMARKS[arguments.command], __package__).main(arguments)


if __name__ == "__main__":
    main()
