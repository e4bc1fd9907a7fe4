"""The log of a run, ``metrics.jsonl``: one JSON object a line, each with its stage and step."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longspec_jax import files

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The records of a log, without lines that a killed process or a full disk cut off."""
    return [record for record in map(_record, _lines(path)) if record is not None]


def mend(path: Path) -> int:
    """Take lines out that are no records, so that more can be appended; returns their number."""
    if not path.is_file():
        return 0
    lines = _lines(path)
    whole = [line for line in lines if _record(line) is not None]
    # A line may be whole and yet lack its end, at which the next one begins.
    if _joined(whole) != path.read_bytes():
        files.replace(path, _joined(whole))
    return len(lines) - len(whole)


def rewind(path: Path, stage: str, count: int) -> None:
    """Keep the first few records of a stage, and all of the others."""
    kept, seen = [], 0
    lines = _lines(path)
    for line in lines:
        record = _record(line)
        if record is not None and record["stage"] == stage:
            seen += 1
            if seen > count:
                continue
        kept.append(line)
    if len(kept) < len(lines):
        files.replace(path, _joined(kept))


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _record(line: str) -> Record | None:
    """The record of a line, None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"stage", "step"} <= record.keys() else None


def _joined(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
