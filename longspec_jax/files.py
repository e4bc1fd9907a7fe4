"""Files that are written whole or not at all: a reader never meets half of one.

What is new goes to a file next to the old one, which it then replaces in one step, when it is on
the disk. Being killed halfway, or a loss of power, leaves the old file as it was.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_RESULT = re.compile(rb'\s*(\{\s*("(headers?|interrupted)"|\Z)|\Z)')
"""How files of results begin: those of the commands, and empty ones."""


def replace(path: Path, data: bytes) -> None:
    """Write a file, or leave the one before.

    Raises:
      OSError: if it cannot be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write to, which takes the place of another if nothing fails.

    Permissions are those of the file before; a link goes on to point where it did.

    Raises:
      OSError: if there can be no file.
    """
    path = path.resolve()  # What a link points at is replaced, not the link.
    unfinished = temporary(path)
    try:
        yield unfinished
        to_disk(unfinished)
        if path.exists():
            unfinished.chmod(stat.S_IMODE(path.stat().st_mode))
        unfinished.replace(path)
        to_disk(path.parent)
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a loss of power.

    Raises:
      OSError: if they cannot be written.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some file systems of clusters cannot do this with folders.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(opened)


def temporary(path: Path) -> Path:
    """Make an empty file in the folder of another, under a name that nobody else has.

    Raises:
      OSError: if the folder does not exist or cannot be written to.
    """
    # Several threads and processes may write the same file.
    unfinished = path.resolve().with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    unfinished.touch(exist_ok=False)
    return unfinished


def expanded(path: str | Path) -> Path:
    """A path with ``~`` and ``~user`` replaced by the home folder.

    Raises:
      ValueError: if there is no such user, or no home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path}: there is no home folder of that name; write the whole path"
        ) from None


def make_folder(folder: Path, option: str) -> None:
    """Make the folder of a run, if it is not there, and try to write in it.

    Args:
      option: which named it, for the message.

    Raises:
      ValueError: if it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary(folder / "tried").unlink()
    except OSError as error:
        raise ValueError(
            f"{option}={folder} cannot be the folder of a run ({error.strerror}); name another"
        ) from error


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, private to this user.

    Raises:
      OSError: if it cannot be made.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def not_private(folder: Path) -> str | None:
    """Why what lies in a folder may be another user's; None if it cannot be, or nothing is there.

    Root may do anything anyway. Folders above this one are not looked at.
    """
    try:
        found = folder.stat()
    except OSError:
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}"
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return f"others may write to it, mode {stat.S_IMODE(found.st_mode):o}" if writers else None


@contextlib.contextmanager
def alone(folder: Path, option: str) -> Iterator[None]:
    """Keep other processes from writing the same run; a process that dies lets them.

    Args:
      option: which named the folder, for the message.

    Raises:
      ValueError: if another process writes it.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems of clusters have no locks.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{option}={folder}: another process is writing this run; wait for it to end, "
                    "or name another folder"
                ) from None
        yield
    finally:
        os.close(lock)


def writable(path: Path, name: str, of_results: bool = True) -> Path:
    """The path of a file that can be written, found out before the work that it is for.

    Args:
      name: as the user typed it, for messages.
      of_results: whether a file that is there must hold results; a foreign one is not replaced.

    Raises:
      ValueError: if it cannot be written, with the reason.
    """
    if name in ("", "-"):
        raise ValueError(f"{name!r} must be the name of a file")
    if path.is_dir():
        raise ValueError(f"{name} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise ValueError(f"{name} is a device and no file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{name} is read-only; name another file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{name}: its folder does not exist; make it first")
    if of_results:
        refuse_foreign(path, name)
    try:
        temporary(path).unlink()
    except OSError as error:
        raise ValueError(
            f"{name} cannot be written ({error.strerror}); name another file"
        ) from None
    return path


def refuse_foreign(path: Path, name: str) -> None:
    """Refuse to replace a file that holds no results of ours.

    Raises:
      ValueError: if there is such a file.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begin = file.read(200)
    except OSError:
        return  # Whether it can be replaced is found out by writing next to it.
    if not _RESULT.match(begin):
        raise ValueError(
            f"{name} is there and holds no results, and would be replaced; name another file, or "
            "remove it first"
        )
