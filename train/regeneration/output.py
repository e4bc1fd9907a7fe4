"""The file of regenerated rows: whole lines, in order, none of them twice.

Every line names the row it was made of, so that the last line says where to go on. What the rows
depend on lies in a small file beside it, and a run that differs in any of it is refused.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec_jax import files


class Output:
    """An output file, open for more rows; no other process may write it meanwhile."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Open a new file, or one to go on with; a line that was cut off is taken away.

        Args:
          path: the file.
          settings: what its rows depend on, as JSON values by the names of their options.

        Raises:
          ValueError: if the file is there and of other settings, or not of this command.
          OSError: if it cannot be written.
        """
        self.path = path
        settings_file = path.with_name(f"{path.name}.settings")
        if path.exists() and path.stat().st_size:
            _check_same(path, settings_file, settings)
        else:
            files.replace(settings_file, f"{json.dumps(settings, indent=1)}\n".encode())
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"another process is writing {path}; wait for it to end") from error
        self.rows, self.next_row = self._mend()

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, which are on the disk when this returns."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        if not lines:
            return
        data = memoryview("".join(lines).encode())
        while data:  # The system may take less than it is given.
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())
        self.rows += len(lines)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _mend(self) -> tuple[int, int]:
        """Cut the file behind its last whole line; how many lines there are, and the next row."""
        count, end, last = 0, 0, b""
        with self.path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    count, end, last = count + 1, end + len(line), line
        self._file.truncate(end)
        if not count:
            return 0, 0
        try:
            return count, int(json.loads(last)["row"]) + 1
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the last line of {self.path} is no row that this command wrote; remove the line, "
                "or name another --out"
            ) from error


def check_no_input(path: Path, inputs: Sequence[Path]) -> None:
    """Refuse to write where rows are read.

    Raises:
      ValueError: names the file.
    """
    for one in inputs:
        if path.resolve() == one.resolve() or (path.exists() and path.samefile(one)):
            raise ValueError(f"--out={path} is one of the --files; name another file")


def _check_same(path: Path, settings_file: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with rows that were made in another way."""
    try:
        before = json.loads(settings_file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} exists and was not written by this command ({settings_file.name} is missing or"
            " damaged); name another --out"
        ) from error
    now = json.loads(json.dumps(settings))
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if names:
        changes = ", ".join(f"{name}={now.get(name)} (was {before.get(name)})" for name in names)
        raise ValueError(
            f"{path} was written with other settings: {changes}; repeat them to go on with it, or "
            "name another --out"
        )
