"""Reports of evaluation runs: ``python -m infer.report RUN... [--out FOLDER_OR_FILE]``.

    python -m infer.report runs/demo
    python -m infer.report runs/h200 runs/h200_batch8 --out=results/h200.html

Writes one self-contained HTML page with tables, charts and case studies, and the tables as Markdown
and CSV. This entry point only parses; the parts import from a notebook.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from longspec_jax.checks import Whole
from longspec_jax.cli import Parser, command_name, run
from longspec_jax.cli import number as number_argument
from longspec_jax.cli import word as word_argument


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = Parser(
        prog=command_name(__package__),
        description="Write the papers' tables and figures of evaluation runs.",
        epilog="runs that agree in target, device, precision, protocol and options are compared "
        "with each other; all others stand below each other",
    )
    options.add_argument("runs", nargs="+", metavar="RUN", help="folder of an evaluation run")
    options.add_argument(
        "--out",
        type=word_argument,
        metavar="FOLDER_OR_FILE",
        help="where to write: a folder for report.html, report.md and report.csv, or one file by "
        "its ending (default: the first run's folder)",
    )
    options.add_argument(
        "--lengths",
        type=_edges,
        metavar="N,N,...",
        help="ends of the ranges of context lengths, ascending (default: the paper's: 5000,10000,"
        "15000,20000,25000,32000, and then doubling)",
    )
    options.add_argument(
        "--cases",
        type=number_argument(Whole(0)),
        metavar="N",
        help="most texts whose trees are shown, from all over the run; all if absent",
    )
    options.add_argument("--traceback", action="store_true", help="of an error, show where it was")
    return options


def _edges(text: str) -> tuple[int, ...]:
    """Ends of ranges from 0 on."""
    try:
        edges = (0, *map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas") from None
    if any(left >= right for left, right in zip(edges, edges[1:], strict=False)):
        raise argparse.ArgumentTypeError(f"{text!r} must be positive and ascend")
    return edges


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    return run(lambda: _run(argv), argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)

    from . import outputs
    from .context_bins import EDGES
    from .named_runs import named_runs
    from .sections import report

    runs = named_runs([Path(name) for name in arguments.runs])
    paths = outputs.targets(arguments.out or arguments.runs[0])
    outputs.write(report(runs, arguments.lengths or EDGES, arguments.cases), paths)
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
