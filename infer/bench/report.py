"""Result files of the benchmarks: ``python -m infer.bench report FILE... [--json F] [--chart F]``.

A benchmark writes one object, ``{"header": ..., "rows": [...]}``, anew after every row: a run that
is cut short keeps what it measured; some add a ``summary`` when they end. Files of several runs
merge into ``{"headers": [...], "rows": [...]}``, where every row's ``run`` is the index of its
header, since the roof, the commit and the date are the run's own. Merged files merge again. This
command merges, and draws charts on a machine that has matplotlib from rows measured on one that has
not.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longspec_jax import files
from longspec_jax.extras import missing_extra
from longspec_jax.provenance import provenance

from . import charts

Row = dict[str, Any]


def run_header(device: str, method: str, **more: Any) -> Row:
    """Where, with what, how and when rows are measured.

    Args:
      device: its name.
      method: how the rows come about; spaces and line breaks are evened out.
      **more: what else the rows have in common, such as the measured roofs.
    """
    return {**provenance(device), **more, "method": " ".join(method.split())}


class Report:
    """The rows of one run, printed and written as they come; leaving it ends the files."""

    def __init__(self, header: Row, path: Path | None = None, chart: Path | None = None):
        """Print the header.

        Args:
          header: from :func:`run_header`.
          path: the JSON file to keep up to date; none if absent.
          chart: the PNG to draw when the run ends; none if absent.
        """
        self.rows: list[Row] = []
        self._summary: list[Row] = []
        self._header, self._path, self._chart = header, path, chart
        self._failure: OSError | None = None
        print(header_line(header), flush=True)

    def __enter__(self) -> "Report":
        """The report itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Print the rows that could not be written, and draw the chart of a run that ended well.

        Raises:
          OSError: if the file could not be written to the end.
        """
        if self._failure:
            self._write()
        if self._failure:  # The rows took time to measure: better printed than lost.
            print(json.dumps(self._whole), flush=True)
        if kind is not None:
            return
        if self._chart and self.rows:
            draw(self.rows, self._chart)
        if self._failure:
            raise OSError(
                f"--json={self._path} could not be written ({self._failure.strerror}); its content "
                "is the last line printed"
            )

    def add(self, row: Row, line: str) -> None:
        """Print a row's line and write the file with the row."""
        self.rows.append(row)
        print(line, flush=True)
        self._write()

    def conclude(self, summary: list[Row]) -> None:
        """Print what all rows say together, and write it beside them."""
        self._summary = summary
        for part in summary:
            print(json.dumps(part), flush=True)
        self._write()

    @property
    def _whole(self) -> Row:
        summary = {"summary": self._summary} if self._summary else {}
        return {"header": self._header, **summary, "rows": self.rows}

    def _write(self) -> None:
        """Bring the file up to date; a full disk does not end the measurement."""
        if self._path is None:
            return
        failed_before, self._failure = self._failure, None
        try:
            write(self._path, self._whole)
        except OSError as error:
            self._failure = error
            if not failed_before:
                print(f"--json={self._path}: {error.strerror}; going on", file=sys.stderr)


def header_line(header: Row) -> str:
    """The header for people; the file has all of it."""
    device, versions = header.get("device", "unknown device"), header.get("versions", {})
    packages = [f"{name} {version}" for name, version in versions.items() if version]
    roofs = {"roof_tb_per_s": "TB/s", "roof_tflop_per_s": "TFLOP/s"}
    measured = [f"{header[name]:.3g} {unit}" for name, unit in roofs.items() if name in header]
    roof = [f"measured roofs {' and '.join(measured)}"] if measured else []
    return "; ".join(filter(None, [device, ", ".join(packages), *roof]))


def write(path: Path, report: Row) -> None:
    """Replace a result file; being killed halfway leaves the file before."""
    files.replace(path, (json.dumps(report, indent=1) + "\n").encode())


def read(path: Path) -> Row:
    """The report that a file holds.

    Raises:
      ValueError: if it holds none, naming the file.
    """
    try:
        report = json.loads(path.read_text("utf-8"), object_pairs_hook=_no_repeats)
        check(report)
    except OSError as error:
        raise ValueError(f"result file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"result file {path} is no UTF-8 text, so no JSON") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"result file {path} is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"result file {path} is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"result file {path}: {error}") from None
    return report


def _no_repeats(pairs: list[tuple[str, Any]]) -> Row:
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the field {twice!r} is given twice")
    return dict(pairs)


def check(report: Any) -> None:
    """Raise a ValueError unless this is what a benchmark or a merge has written."""
    if not isinstance(report, dict):
        raise ValueError(f"a result file holds one object, this one a {type(report).__name__}")
    if "rows" not in report or not ("header" in report or "headers" in report):
        raise ValueError(
            f"a result file holds rows and header or headers, this one {sorted(report)}"
        )
    headers, rows = _headers(report), report["rows"]
    for name, items in {"headers": headers, "rows": rows}.items():
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"its {name} must be a list of objects")
    if any(row.get("run", 0) not in range(len(headers)) for row in rows):
        raise ValueError(f"a row's run must be the index of one of its {len(headers)} headers")


def _headers(report: Row) -> Any:
    return report["headers"] if "headers" in report else [report["header"]]


def merge(reports: Iterable[Row]) -> Row:
    """One report of several; rows keep their order and say which header is theirs.

    Summaries are left out: they speak of one file's rows.

    Raises:
      ValueError: if one of them is not a report.
    """
    headers: list[Row] = []
    rows: list[Row] = []
    for report in reports:
        check(report)
        first = len(headers)
        headers += _headers(report)
        rows += [{**row, "run": first + row.get("run", 0)} for row in report["rows"]]
    return {"headers": headers, "rows": rows}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the chart that fits the rows; say so if matplotlib is missing, as it may be.

    Raises:
      ValueError: if there is no chart for such rows.
    """
    try:
        charts.draw(rows, path)
    except ModuleNotFoundError as error:
        print(f"no chart: {missing_extra(error) or error}")
    except KeyError as error:
        raise ValueError(f"no chart to draw: a row lacks the field {error}") from None


def main(arguments: argparse.Namespace) -> None:
    """Merge result files, and write and draw the rows."""
    merged = merge(map(read, arguments.files))
    print(f"{len(merged['rows'])} rows of {len(merged['headers'])} runs")
    if arguments.json:
        write(arguments.json, merged)
    if arguments.chart:
        dates = [header.get("date", "") for header in merged["headers"]]
        draw(sorted(merged["rows"], key=lambda row: dates[row["run"]]), arguments.chart)
