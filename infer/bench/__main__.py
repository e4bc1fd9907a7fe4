"""Benchmarks: ``python -m infer.bench COMMAND [options]``; ``--help`` lists the commands.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from longspec_jax import cli

BENCHMARKS = {
    "attention": ("attention", "attention of tree nodes to a long prefix, and the rooflines"),
    "decode": ("decode", "whole rounds and plain steps of real shapes, and the gain"),
    "meshes": ("meshes", "decoding on meshes of devices, and what each of them holds"),
    "paper": ("paper", "the paper's tables 1 and 4 at its acceptance lengths, beside its figures"),
    "products": ("products", "the matmuls of a verification, beside XLA's"),
    "requests": ("requests", "many requests over few row slots, and in padded batches"),
    "retrieval": ("retrieval", "partial verification over retrieved context, beside one level"),
    "transformers": ("hugging_face", "plain decoding by Hugging Face transformers"),
    "report": ("report", "merge result files and draw their chart"),
}
"""Subcommand to the module that provides ``main(arguments)``, and what it answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    return cli.run(lambda: _run(argv), argv)


def _run(argv: Sequence[str] | None) -> int:
    from .arguments import parser

    summaries = {name: summary for name, (_, summary) in BENCHMARKS.items()}
    arguments = parser(summaries).parse_args(argv)
    check_outputs(arguments)
    module, _ = BENCHMARKS[arguments.command]
    importlib.import_module(f".{module}", __package__).main(arguments)
    return cli.OK


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise if a file would be written over another one of the same command.

    Args:
      arguments: of any benchmark; ``files`` are those it reads.
    """
    outputs = {f"--{name}": getattr(arguments, name, None) for name in ("json", "chart")}
    taken = {path.resolve(): str(path) for path in getattr(arguments, "files", ())}
    for option, path in outputs.items():
        if path is None:
            continue
        if other := _same(path, taken):
            raise ValueError(f"{option}={path} would replace {other}; name another file")
        taken[path.resolve()] = f"what {option} writes"


def _same(path: Path, taken: dict[Path, str]) -> str | None:
    """Which of the files this is, by whatever name."""
    for other, words in taken.items():
        if path.resolve() == other or (path.exists() and other.exists() and path.samefile(other)):
            return words
    return None


if __name__ == "__main__":
    sys.exit(main())
