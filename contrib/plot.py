"""Draw loss and acceptance over the steps of one or more runs.

    python -m contrib.plot runs/vicuna7b-short --png curves.png
    python -m contrib.plot runs/a/metrics.jsonl runs/b/metrics.jsonl --png a_and_b.png

A column is a stage, a colour is a run. Acceptance is simulated, in tokens per target pass
(train/acceptance.py defines it). A run that is under way can be drawn. The exit status is 0, or 2
for bad input.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec_jax import cli, files
from longspec_jax.checks import shown
from longspec_jax.extras import missing_extra
from train.metrics import Record, read_records

PANELS = {
    "loss": {"loss": "-", "heldout_loss": "o--"},
    "tokens per pass": {"tau_chain": "o-", "tau_chain_far": "s--", "tau_top4": "^:"},
}
"""What is drawn in each row of the figure: names of figures, and their lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    return cli.run(lambda: _command(argv), argv)


def _command(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    runs = {}
    for path in map(files.expanded, arguments.logs):
        log = path / "metrics.jsonl" if path.is_dir() else path
        # A run is named by its folder, or by the log where several lie in one.
        name = log.parent if log.name == "metrics.jsonl" else log
        runs[str(name)] = read_records(log)
    draw(runs, arguments.png)
    return cli.OK


def draw(runs: Mapping[str, Sequence[Record]], png: Path) -> None:
    """Draw the records of runs by their names.

    Raises:
      ModuleNotFoundError: without matplotlib.
      ValueError: if no record has anything to draw.
    """
    records = [record for run in runs.values() for record in run]
    rows = [title for title, lines in PANELS.items() if any(_has(r, lines) for r in records)]
    shown = {name: line for title in rows for name, line in PANELS[title].items()}
    stages = list(dict.fromkeys(r["stage"] for r in records if _has(r, shown)))
    if not stages:
        raise ValueError(f"no run has any record of {', '.join(shown or PANELS['loss'])} to draw")
    from matplotlib.figure import Figure

    size = (5 * len(stages), 3 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(stages), squeeze=False)
    for title, panels in zip(rows, axes, strict=True):
        for stage, axis in zip(stages, panels, strict=True):
            for number, (run, its) in enumerate(runs.items()):
                mine = [record for record in its if record["stage"] == stage]
                _draw_lines(axis, mine, PANELS[title], f"C{number}", run if len(runs) > 1 else "")
            axis.set_title(stage, fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylabel(title)
            axis.grid(alpha=0.3)
            if axis.has_data():
                axis.legend(fontsize=7)
            else:
                axis.remove()
    figure.savefig(png, dpi=100)


def _draw_lines(
    axis: Any, records: Sequence[Record], lines: Mapping[str, str], color: str, run: str
) -> None:
    for name, line in lines.items():
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if points:
            label = f"{run}: {name}" if run else name
            axis.plot(*zip(*points, strict=True), line, color=color, label=label, lw=1, ms=3)


def _has(record: Record, names: Mapping[str, str]) -> bool:
    return any(record.get(name) is not None for name in names)


def chart_file(text: str) -> Path:
    """A PNG file that can be written, where matplotlib is installed."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{shown(text)} must be the name of a .png file")
    try:
        found = files.writable(cli.file_path(text), text, of_results=False)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if importlib.util.find_spec("matplotlib") is None:
        missing = missing_extra(ModuleNotFoundError(name="matplotlib"))
        raise argparse.ArgumentTypeError(str(missing))
    return found


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="python -m contrib.plot", description=__doc__)
    parser.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="working folder of a run, or its log"
    )
    parser.add_argument(
        "--png", required=True, type=chart_file, metavar="FILE", help="chart file to write"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
