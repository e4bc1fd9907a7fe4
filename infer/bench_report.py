"""Result files of the benchmarks: ``python -m infer.bench report FILE... [--json F] [--chart F]``.

A benchmark writes one object, ``{"header": ..., "rows": [...]}``, anew after every row: a run that
is cut short keeps what it measured; some add a ``summary`` when they end. Files of several runs
merge into ``{"headers": [...], "rows": [...]}``, where every row's ``run`` is the index of its
header, since the roof, the commit and the date are the run's own. Merged files merge again. This
command merges, and draws charts on a machine that has matplotlib from rows measured on one that has
not.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import charts

Row = dict[str, Any]
PACKAGES = ("jax", "jaxlib", "jax-triton", "torch", "triton", "transformers")


def header(device: str, method: str, **more: Any) -> Row:
    """Where, with what, how and when rows are measured.

    Args:
      device: its name.
      method: how the rows come about; spaces and line breaks are evened out.
      **more: what else the rows have in common, such as the measured roofs.
    """
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "device": device,
        "versions": versions,
        "commit": os.environ.get("LONGSPEC_COMMIT") or _checked_out() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
        "method": " ".join(method.split()),
    }


def _checked_out() -> str | None:
    """The commit of the working tree; none outside one, or without git."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip()


class Report:
    """The rows of one run, printed and written as they come."""

    def __init__(self, header: Row, path: Path | None = None):
        """Print the header.

        Args:
          header: from :func:`header`.
          path: the JSON file to keep up to date; none if absent.
        """
        self.rows: list[Row] = []
        self._header, self._path = header, path
        print(json.dumps(header), flush=True)

    def add(self, row: Row, line: str) -> None:
        """Print a row's line and write the file with the row."""
        self.rows.append(row)
        print(line, flush=True)
        if self._path:
            write(self._path, {"header": self._header, "rows": self.rows})

    def conclude(self, summary: list[Row]) -> None:
        """Print what all rows say together, and write it beside them."""
        for part in summary:
            print(json.dumps(part), flush=True)
        if self._path:
            whole = {"header": self._header, "summary": summary, "rows": self.rows}
            write(self._path, whole)


def write(path: Path, report: Row) -> None:
    """Replace a result file; being killed halfway leaves the file before."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def merge(reports: Iterable[Row]) -> Row:
    """One report of several; rows keep their order and say which header is theirs.

    Summaries are left out: they speak of one file's rows.

    Raises:
      ValueError: if one of them is not a report.
    """
    headers: list[Row] = []
    rows: list[Row] = []
    for report in reports:
        if "rows" not in report or not ("header" in report or "headers" in report):
            raise ValueError(
                f"a result file holds rows and header or headers, this one {sorted(report)}"
            )
        first = len(headers)
        headers += report.get("headers") or [report["header"]]
        rows += [{**row, "run": first + row.get("run", 0)} for row in report["rows"]]
    return {"headers": headers, "rows": rows}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the chart that fits the rows; say so if matplotlib is missing, as it may be.

    Raises:
      ValueError: if there is no chart for such rows.
    """
    try:
        charts.draw(rows, path)
    except ImportError as error:
        print(
            f"no chart: {error}. The JSON holds the rows: draw them where matplotlib is installed, "
            f"with python -m infer.bench report FILE --chart {path.name}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``infer.bench report``."""
    parser.add_argument("files", type=Path, nargs="+", help="result files")
    parser.add_argument("--json", type=Path, help="write all of them as one file")
    parser.add_argument("--chart", type=Path, help="draw the rows into this PNG")


def main(arguments: argparse.Namespace) -> None:
    """Merge, write and draw what was asked for."""
    merged = merge(json.loads(path.read_text()) for path in arguments.files)
    print(f"{len(merged['rows'])} rows of {len(merged['headers'])} runs")
    if arguments.json:
        write(arguments.json, merged)
    if arguments.chart:
        dates = [header.get("date", "") for header in merged["headers"]]
        draw(sorted(merged["rows"], key=lambda row: dates[row["run"]]), arguments.chart)
