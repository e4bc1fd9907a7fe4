"""Reports of evaluation runs: ``python -m infer.report RUN... [--out FOLDER_OR_FILE]``.

    python -m infer.report runs/demo
    python -m infer.report runs/h200 runs/h200_batch8 --out=results/h200.html

Writes one self-contained HTML page with tables and charts, and all figures as CSV. This entry point
only parses; the parts import from a notebook.
"""

import argparse
import sys
from collections.abc import Sequence

from longspec_jax import cli


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = cli.Parser(
        prog=cli.command_name(__package__),
        description="Write the papers' tables and figures of evaluation runs.",
        epilog="Runs that agree in target, device, precision and options are compared\n"
        "with each other. Each of the others has tables of its own.",
    )
    options.add_argument(
        "runs", type=cli.file_path, nargs="+", metavar="RUN", help="folder of an evaluation run"
    )
    options.add_argument(
        "--out",
        type=cli.word,
        metavar="FOLDER_OR_FILE",
        help="where to write: a folder for report.html and report.csv, or one file by "
        "its ending; the folder of the first run if absent",
    )
    cli.add_traceback(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report; the exit status is 0, 2 for bad input, 1 for a failure while running."""
    return cli.run(lambda: _run(argv), argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)

    from . import page
    from .frame import read_runs

    runs = read_runs(arguments.runs)
    paths = page.targets(arguments.out or str(arguments.runs[0]))
    page.write(page.report(runs), paths)
    for path in paths:
        print(path)
    return cli.OK


if __name__ == "__main__":
    sys.exit(main())
