"""The file that a run's numbers go to: tried before the run, written whole or not at all.

A run may take hours: its file is tried before, and if writing fails all the same the numbers go
elsewhere.
"""

import errno
import fnmatch
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec_jax import files
from longspec_jax.config import TreeConfig

STDOUT = "-"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.index.json",
    "*.safetensors",
    "*.bin",
    "*.pth",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
)
"""What is read of a model's folder; whatever else lies there is no input."""
_TRIAL = b" " * 4096
"""What is written before the run, to a file beside the wanted one that is removed again."""


@dataclass(frozen=True)
class OutputFile:
    """Where the JSON goes: a file, a device, or standard output."""

    path: Path | None
    """None for standard output."""

    @classmethod
    def tried(cls, name: str, inputs: Iterable[tuple[str, Path]]) -> "OutputFile":
        """The file of this name, found to be writable and no input.

        Args:
          name: as it was typed; ``-`` for standard output.
          inputs: files and folders that the run reads, with the option that names each.

        Raises:
          ValueError: for an input, and for a file that holds no results.
          OSError: for what cannot be written.
        """
        if name == STDOUT:
            return cls(None)
        try:
            path = files.expanded(name)
            if not _is_special(path):
                path = Path(os.path.realpath(path))  # A link stays a link.
            _refuse_inputs(name, path, inputs)
            files.refuse_foreign(path, f"--json {name}")
            _try(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"--json {name}: its folder does not exist; make it first"
            ) from None
        except OSError as error:
            raise type(error)(f"--json {name} cannot be written: {error.strerror}") from error
        return cls(path)

    def write(self, values: dict[str, Any]) -> bool:
        """Write the values; if that fails, elsewhere, and say where.

        Returns:
          Whether they are where they were wanted.
        """
        try:
            data = _encoded(values, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f"--json {self.path or STDOUT}: not all of it can be written as JSON: {error}"
            _rescue(_encoded(values, default=repr), problem)
            return False
        if self.path is None:
            sys.stdout.write(data.decode("utf-8"))
            sys.stdout.flush()
            return True
        try:
            _write(self.path, data)
        except OSError as error:
            _rescue(data, f"--json {self.path} cannot be written: {error.strerror or error}")
            return False
        return True


def _encoded(values: dict[str, Any], **options: Any) -> bytes:
    text = json.dumps(values, indent=2, ensure_ascii=False, **options) + "\n"
    # Half a character (from the name of a file) becomes the escape that JSON has for it.
    return text.encode("utf-8", "backslashreplace")


def _refuse_inputs(name: str, path: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    for option, source in inputs:
        if _is_or_holds(source, path):
            raise ValueError(
                f"--json {name} is an input of this run ({option} {source}) and would be "
                "overwritten; name another file"
            )


def _is_or_holds(source: Path, path: Path) -> bool:
    """Whether a path is this input, or is read as a part of this model, by whatever name."""
    if not source.is_dir():
        return _same(source, path)
    new_part = path.parent == Path(os.path.realpath(source)) and _is_model_file(path)
    parts = filter(_is_model_file, source.iterdir())
    return new_part or any(_same(part, path) for part in parts)


def _is_model_file(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in MODEL_FILES)


def _same(file: Path, path: Path) -> bool:
    return path.exists() and file.exists() and file.samefile(path)


def _is_special(path: Path) -> bool:
    """Whether it is a device, a pipe or an open file, which is written to and not replaced."""
    opened = str(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    return path.exists() and (opened or not stat.S_ISREG(path.stat().st_mode))


def _try(path: Path) -> None:
    """Raise if the path cannot be written."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if _is_special(path):
        _append(path, b"\n")  # JSON may begin with an empty line.
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only")
    trial = files.beside(path)
    try:
        trial.write_bytes(_TRIAL)
    finally:
        trial.unlink()


def _write(path: Path, data: bytes) -> None:
    """Write to a device, or replace a file by a whole one."""
    if _is_special(path):
        _append(path, data)
    else:
        files.replace(path, data)


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


def _rescue(data: bytes, problem: str) -> None:
    """Keep the numbers somewhere else."""
    try:
        with tempfile.NamedTemporaryFile(prefix="longspec_", suffix=".json", delete=False) as file:
            file.write(data)
        print(f"error: {problem}; the numbers are in {file.name}", file=sys.stderr)
    except OSError:
        print(f"error: {problem}; the numbers follow", file=sys.stderr)
        print(data.decode("utf-8"), file=sys.stderr)


def tree_fields(tree: TreeConfig | None) -> dict[str, Any]:
    """The fields of a tree in JSON; all null for one that is not chosen yet."""
    return {
        "tree": None if tree is None else list(tree.widths),
        "budget": None if tree is None else tree.budget,
        "threshold": None if tree is None else tree.threshold,
        "chain": None if tree is None else tree.chain,
    }


def tree_of(row: Mapping[str, Any]) -> TreeConfig:
    """The tree of such fields; files of earlier releases may lack the later ones."""
    return TreeConfig(tuple(row["tree"]), row["budget"], row.get("threshold"), row.get("chain"))
