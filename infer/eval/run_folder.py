"""The folder of a run: a header, a line of results per sample, the skipped samples, a summary.

Lines are appended as samples end, so a killed run continues behind its last whole line. A line that
was cut short in writing is removed before the next one is added.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec_jax import files

from .records import SCHEMA, Header, SampleRecord, SkippedSample, from_json, summary_rows

HEADER, SAMPLES, SKIPPED = "header.json", "samples.jsonl", "skipped.jsonl"
SUMMARY = "summary.json"
COMPARED = "target dtype protocol tasks temperatures seeds batch".split()
"""Fields of the header that a continued run must share, beside methods and options."""


@dataclass(frozen=True)
class Run:
    """What a folder holds."""

    name: str
    """Of the folder, or what tells it from others."""
    header: Header
    samples: tuple[SampleRecord, ...]
    skipped: tuple[SkippedSample, ...]
    torn: int
    """Bytes of a last line that was cut short; it is not counted."""


def read(folder: Path) -> Run:
    """Everything a run has written.

    Raises:
      FileNotFoundError: if this is no folder of a run.
      ValueError: for a line that is no record, naming the file, the line and the remedy.
    """
    header = read_header(folder)
    samples, torn = _lines(folder / SAMPLES, SampleRecord)
    skipped, _ = _lines(folder / SKIPPED, SkippedSample)
    keys = [record.key for record in samples]
    if len(keys) > len(set(keys)):
        [twice, *_] = [key for index, key in enumerate(keys) if key in keys[:index]]
        raise ValueError(
            f"{folder / SAMPLES} holds {twice} twice, so its figures would count it twice; remove "
            "one of the two lines"
        )
    return Run(folder.resolve().name, header, tuple(samples), tuple(skipped), torn)


def read_header(folder: Path) -> Header:
    """The header of a run."""
    path = folder / HEADER
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {HEADER}; name the folder of an evaluation run")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); start the run again in another folder"
        ) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} is of schema {schema} and this version reads {SCHEMA}; repeat the run, or "
            "read it with the version of its commit"
        )
    return from_json(Header, value, str(path))


def write_header(folder: Path, header: Header) -> None:
    """Write a header, whole or not at all."""
    text = json.dumps(dataclasses.asdict(header), indent=1, ensure_ascii=False) + "\n"
    files.replace(folder / HEADER, text.encode())


def write_summary(folder: Path, records: Sequence[SampleRecord]) -> None:
    """Write a row per task, method and temperature, under the header of the run."""
    values = {"header": dataclasses.asdict(read_header(folder)), "rows": summary_rows(records)}
    files.replace(folder / SUMMARY, (json.dumps(values, indent=1) + "\n").encode())


def differences(one: Header, other: Header) -> list[str]:
    """The options that differ, so that the second run cannot continue the first, in words."""
    left, right = (_compared(header) for header in (one, other))
    return [
        f"{name}: {left.get(name)} there, {right.get(name)} now"
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    ]


def _compared(header: Header) -> dict[str, Any]:
    """What a continued run must share with it, as JSON values."""
    values = json.loads(json.dumps(dataclasses.asdict(header)))
    methods = {f"method {name}": setting for name, setting in values["methods"].items()}
    return {**{name: values[name] for name in COMPARED}, **methods, **values["options"]}


class Writer:
    """Adds whole lines to a run's files, each on the disk before the next."""

    def __init__(self, folder: Path):
        """Open the files of a folder, and remove a last line that was cut short.

        Args:
          folder: of the run; it exists.
        """
        self._paths = {SampleRecord: folder / SAMPLES, SkippedSample: folder / SKIPPED}
        for path in self._paths.values():
            _remove_torn_line(path)

    def add(self, records: Iterable[SampleRecord] | Iterable[SkippedSample]) -> None:
        """Add the records of one call, all of them or none."""
        lines: dict[Path, list[str]] = {}
        for record in records:
            text = json.dumps(dataclasses.asdict(record), ensure_ascii=False, allow_nan=False)
            lines.setdefault(self._paths[type(record)], []).append(text + "\n")
        for path, texts in lines.items():
            data = "".join(texts).encode("utf-8", "backslashreplace")
            before = path.stat().st_size if path.exists() else 0
            with path.open("ab", buffering=0) as file:
                try:
                    left = memoryview(data)
                    while left:  # A write may take a part; the next one raises the reason.
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except BaseException:  # On a full disk no half of a call may stay.
                    file.truncate(before)
                    raise


def _remove_torn_line(path: Path) -> None:
    """Remove the bytes behind the last whole line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _lines(path: Path, kind: type[Any]) -> tuple[Sequence[Any], int]:
    """The records of a file, and the bytes of a last line that was cut short."""
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    *whole, rest = data.split(b"\n")
    records = []
    for number, line in enumerate(whole, start=1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where} is not JSON ({error}); remove the line, and the run measures it again"
            ) from None
        records.append(from_json(kind, value, where))
    return records, len(rest)
