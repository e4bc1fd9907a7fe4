"""Files that are written whole or not at all: a reader never meets half of one.

What is new goes to a file beside the old one, which it then replaces in one step. Being killed
halfway leaves the old file as it was.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Write a file, or leave the one before.

    Raises:
      OSError: if it cannot be written.
    """
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write to, which takes the place of another if nothing fails.

    Permissions are those of the file before; a link goes on to point where it did.

    Raises:
      OSError: if there can be no file.
    """
    path = path.resolve()  # What a link points at is replaced, not the link.
    unfinished = beside(path)
    try:
        yield unfinished
        if path.exists():
            unfinished.chmod(stat.S_IMODE(path.stat().st_mode))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """Make an empty file in the folder of another, under a name that nobody else has.

    Raises:
      OSError: if the folder does not exist or cannot be written to.
    """
    # Several threads and processes may write the same file.
    unfinished = path.resolve().with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    unfinished.touch(exist_ok=False)
    return unfinished
