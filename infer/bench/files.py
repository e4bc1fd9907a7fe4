"""The files a benchmark is told to write, looked at before anything is measured."""

import argparse
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ..result_file import result_file


def chart_file(text: str) -> Path:
    """A PNG file that can be drawn."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} must be the name of a .png file")
    path = result_file(text)
    if importlib.util.find_spec("matplotlib") is None:
        from longspec_jax.extras import missing_extra

        missing = missing_extra(ModuleNotFoundError(name="matplotlib"))
        raise argparse.ArgumentTypeError(
            f"{missing}; or leave --chart out, keep the rows with --json, and let the report "
            "command draw them where matplotlib is installed"
        )
    return path


def profile_folder(text: str) -> Path:
    """A folder that exists or can be made."""
    path = Path(text).expanduser()
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a folder")
    return path


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise if a file would be written over another one of the same command.

    Args:
      arguments: of any benchmark; ``files`` are those it reads.
    """
    outputs = {f"--{name}": getattr(arguments, name, None) for name in ("json", "chart")}
    taken = {path.resolve(): str(path) for path in getattr(arguments, "files", ())}
    for option, path in outputs.items():
        if path is None:
            continue
        if other := _same(path, taken):
            raise ValueError(f"{option}={path} would replace {other}; name another file")
        taken[path.resolve()] = f"what {option} writes"


def _same(path: Path, taken: dict[Path, str]) -> str | None:
    """Which of the files this is, by whatever name."""
    for other, words in taken.items():
        if path.resolve() == other or (path.exists() and other.exists() and path.samefile(other)):
            return words
    return None


def read(paths: Iterable[Path]) -> list[str]:
    """The texts of the files.

    Raises:
      ValueError: naming the first that cannot be read.
    """
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"result file {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"result file {path} is no UTF-8 text, so no JSON") from None
    return texts
