"""The file that a run's numbers go to, whole or not at all, and the fields of a tree in it."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from longspec_jax import cli, files
from longspec_jax.config.tree import TreeConfig

STDOUT = Path("-")


def output_file(text: str) -> Path:
    """A JSON file of results that can be written, for ``argparse``; ``-`` is standard output."""
    return STDOUT if text == str(STDOUT) else cli.result_file(text)


def write(path: Path, values: dict[str, Any]) -> bool:
    """Write the values; if that fails, write them to another file and print its name.

    A run may take hours, and its numbers must not be lost.

    Returns:
      Whether they are where they were wanted.
    """
    try:
        data = encoded(values)
    except (TypeError, ValueError) as error:
        problem = f"--json {path}: not all of it can be written as JSON: {error}"
        _rescue(encoded(values, default=repr, allow_nan=True), problem)
        return False
    if path == STDOUT:
        sys.stdout.write(data.decode("utf-8"))
        sys.stdout.flush()
        return True
    try:
        files.replace(path, data)
    except OSError as error:
        _rescue(data, f"--json {path} cannot be written: {error.strerror or error}")
        return False
    return True


def encoded(
    values: dict[str, Any],
    default: Callable[[object], str] | None = None,
    allow_nan: bool = False,
) -> bytes:
    """The values as JSON; options as of ``json.dumps``."""
    text = json.dumps(values, indent=2, ensure_ascii=False, default=default, allow_nan=allow_nan)
    # Half a character (from the name of a file) becomes the escape that JSON has for it.
    return f"{text}\n".encode("utf-8", "backslashreplace")


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
        "lookup": None if tree is None else tree.lookup,
    }


def tree_of(row: Mapping[str, Any]) -> TreeConfig:
    """The tree of such fields; files of earlier releases may lack the later ones."""
    later = (row.get(name) for name in ("threshold", "chain", "lookup"))
    return TreeConfig(tuple(row["tree"]), row["budget"], *later)
