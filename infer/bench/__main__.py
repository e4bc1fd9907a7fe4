"""Benchmarks: ``python -m infer.bench COMMAND [options]``; ``--help`` lists the commands.

This entry point only parses; each benchmark is a module that imports from a notebook.
"""

import importlib
import sys
from collections.abc import Sequence

from .. import boundary

BENCHMARKS = {
    "attention": ("attention", "attention of tree nodes to a long prefix, and the roofs"),
    "decode": ("decode", "whole rounds and plain steps of real shapes, and the gain"),
    "contexts": ("contexts", "drafts that read all or a part of the demo's growing contexts"),
    "drafters": ("drafters", "what every kind of draft gives on the demo"),
    "match": ("match", "how often output in bfloat16 is that of plain decoding"),
    "meshes": ("meshes", "decoding on meshes of devices, and what each of them holds"),
    "needle": ("needle", "whether a draft finds in a long text what its target finds"),
    "paper": ("paper", "the paper's tables 1 and 4 at its acceptance lengths, beside its figures"),
    "products": ("products", "the matrix products of a verification, beside XLA's"),
    "requests": ("requests", "many requests over few row slots, and in padded batches"),
    "retrieval": ("retrieval", "partial verification over retrieved context, beside one level"),
    "transformers": ("hugging_face", "plain decoding by Hugging Face transformers"),
    "report": ("report", "merge result files and draw their chart"),
}
"""Subcommand to the module that provides ``main(arguments)``, and what it answers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    shows_traceback = "--traceback" in (sys.argv if argv is None else argv)
    return boundary.run(lambda: _run(argv), shows_traceback)


def _run(argv: Sequence[str] | None) -> int:
    from .arguments import parser
    from .files import check_outputs

    summaries = {name: summary for name, (_, summary) in BENCHMARKS.items()}
    arguments = parser(summaries).parse_args(argv)
    check_outputs(arguments)
    module, _ = BENCHMARKS[arguments.command]
    importlib.import_module(f".{module}", __package__).main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
