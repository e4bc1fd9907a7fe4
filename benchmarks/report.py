"""Result files of the benchmarks: one object, ``{"header": ..., "rows": [...]}``.

A file is written anew after every row: a run that is cut short keeps what it measured.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer import output
from longspec_jax import files
from longspec_jax.provenance import provenance

Row = dict[str, Any]


def run_header(device: str, method: str, **more: Any) -> Row:
    """Where, with what, how and when rows are measured."""
    return {**provenance(device), **more, "method": " ".join(method.split())}


def refusal(error: Exception) -> str:
    """Why there is no time, for a row: the first line of an error, with its kind."""
    reason = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {reason}"


class Report:
    """The rows of one run, printed and written as they come; leaving it ends the file."""

    def __init__(self, header: Row, path: Path | None = None, shown: Sequence[str] = ()):
        """Print the header.

        Args:
          header: of :func:`run_header`.
          path: the file to write, if any.
          shown: the fields that are printed of a row; the file has all.
        """
        self.rows: list[Row] = []
        self._path, self._whole = path, {"header": header, "rows": self.rows}
        self._shown = shown
        self._kept = True
        print(header_line(header), flush=True)

    def __enter__(self) -> "Report":
        """The report itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Write rows that could not be written, or to another file; they took time to measure.

        Raises:
          OSError: if they are not where they were wanted.
        """
        if self._path is None or self._kept or output.write(self._path, self._whole):
            return
        if kind is None:
            raise OSError(f"--json={self._path} could not be written; its content is kept as said")

    def add(self, row: Row) -> None:
        """Print the row and write the file with it."""
        self.rows.append(row)
        print("  ".join(f"{name} {row[name]}" for name in self._shown if name in row), flush=True)
        self._write()

    def summarise(self, rows: Sequence[Row]) -> None:
        """Write the file with a summary next to the rows, in place of an earlier one."""
        self._whole["summary"] = rows
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        kept_before, self._kept = self._kept, True
        try:
            files.replace(self._path, output.encoded(self._whole))
        except OSError as error:  # A full disk does not end the measurement.
            self._kept = False
            if kept_before:
                print(f"--json={self._path}: {error.strerror}; going on", file=sys.stderr)


def header_line(header: Row) -> str:
    """The header for people; the file has all of it."""
    device, versions = header.get("device", "unknown device"), header.get("versions", {})
    if device == "cpu":
        device = f"cpu ({os.cpu_count()} cores; a GPU measures the real shapes by default)"
    packages = [f"{name} {version}" for name, version in versions.items() if version]
    roofs = {"roof_tb_per_s": "TB/s", "roof_tflop_per_s": "TFLOP/s"}
    measured = [f"{header[name]:.3g} {unit}" for name, unit in roofs.items() if name in header]
    roof = [f"measured roofline {' and '.join(measured)}"] if measured else []
    return "; ".join(filter(None, [device, ", ".join(packages), *roof]))
