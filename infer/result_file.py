"""A file of results, looked at before anything is measured.

What is written replaces a file whole: being killed halfway leaves the one before.
"""

import argparse
from pathlib import Path

from longspec_jax import files


def result_file(text: str) -> Path:
    """A JSON file that can be written.

    Raises:
      argparse.ArgumentTypeError: if it cannot, with the reason.
    """
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(f"{text!r} must be the name of a file")
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is a device and no file")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist; make it first")
    try:
        files.beside(path).unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written ({error.strerror}); name a file elsewhere"
        ) from None
    return path
