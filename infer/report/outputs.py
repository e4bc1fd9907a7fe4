"""The files a report is written to: found to be writable before anything is computed."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from longspec_jax import files

from .markdown import markdown
from .page import html
from .rows import csv_text
from .sections import Report

FORMATS: Mapping[str, Callable[[Report], str]] = {
    ".html": html,
    ".md": markdown,
    ".csv": csv_text,
}
"""What writes a file, by the end of its name."""
NAME = "report"
"""Of the files in a folder."""


def targets(out: str) -> tuple[Path, ...]:
    """The files that a report is to be written to.

    Args:
      out: a file whose name says its format, or a folder for one of each, which is made.

    Raises:
      ValueError: for a file of another format, and for what cannot be written.
    """
    path = Path(out).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir() or not suffix:
        found = tuple(path / f"{NAME}{each}" for each in FORMATS)
    elif suffix in FORMATS:
        found = (path,)
    else:
        raise ValueError(
            f"--out={out} ends in {suffix}; name a folder, or a file that ends in "
            f"{', '.join(FORMATS)}"
        )
    _check(out, found[0].parent)
    for each in found:
        if each.exists() and (not each.is_file() or not os.access(each, os.W_OK)):
            raise ValueError(f"--out={out}: {each} cannot be written over; name another place")
    return found


def _check(out: str, folder: Path) -> None:
    """Raise unless files can be made in a folder, which may itself have to be made."""
    try:
        folder.mkdir(exist_ok=True)
        files.beside(folder / NAME).unlink()
    except FileNotFoundError:
        raise ValueError(f"--out={out}: its folder does not exist; make it first") from None
    except OSError as error:
        raise ValueError(
            f"--out={out} cannot be written ({error.strerror}); name another place"
        ) from None


def write(report: Report, paths: tuple[Path, ...]) -> None:
    """Write every file, whole or not at all.

    Raises:
      OSError: if one cannot be written.
    """
    for path in paths:
        text = FORMATS[path.suffix.lower()](report)
        # Half a character (of a model's text) becomes the escape that is left of it.
        files.replace(path, text.encode("utf-8", "backslashreplace"))
