"""A JSON-lines file as rows at hand: one pass notes where each sound line begins, and no more.

Lines are not columns of a table, so that rows of different shapes may be mixed.
"""

import json
import mmap
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longspec_jax.checks import shown

from .bad_rows import BadRows
from .formats import Fields, Format, to_turns


@dataclass(frozen=True, eq=False)
class JsonLines:
    """The lines of a file that hold documents."""

    path: Path
    starts: np.ndarray
    """Byte at which every one of them begins, int64."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the file for itself."""
        return JsonLines, (self.path, self.starts)

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.starts)

    def __getitem__(self, index: int) -> Fields:
        """The fields of a document."""
        start = int(self.starts[index])
        end = self._bytes.find(b"\n", start)
        return parse(self._bytes[start : None if end < 0 else end])


def read_json_lines(path: Path, name: str, bad: BadRows, read: Format = to_turns) -> JsonLines:
    """Look at every line of a file once; blank ones are passed over.

    Args:
      path: the file.
      name: what it is called where a line is wrong.
      bad: takes note of lines that hold no document.
      read: the turns of a line's fields; raises ValueError for one that holds none.

    Raises:
      ValueError: if there are too many of those.
    """
    starts, at = array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                try:
                    read(parse(line))
                    starts.append(at)
                except ValueError as error:
                    bad.add(f"line {number} of {name}", error)
            at += len(line)
    return JsonLines(path, np.asarray(starts, np.int64))


def parse(line: bytes) -> Fields:
    """The fields of a line.

    Raises:
      ValueError: if it is not one JSON object.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the line is not JSON ({error.msg} at character {error.pos + 1}); write one object a "
            "line"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 text ({error.reason})") from error
    except RecursionError as error:
        raise ValueError("the line nests too deeply; write one flat object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the line must be one JSON object, got {shown(fields)}")
    return fields
