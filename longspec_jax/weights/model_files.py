"""What a model's files say, of a folder as of a GGUF file."""

from contextlib import ExitStack
from pathlib import Path

from longspec_jax.weights.checkpoint import Tensors, open_tensors
from longspec_jax.weights.gguf.file import read_gguf
from longspec_jax.weights.gguf.model import gguf_config, open_gguf
from longspec_jax.weights.json_files import JsonObject, read_json


def read_config(model: Path) -> JsonObject:
    """A folder's ``config.json``, or what it would be of a GGUF file.

    Raises:
      FileNotFoundError: if a folder has none.
      ValueError: if it is damaged, or the file is of a model that is not read.
    """
    return gguf_config(model) if model.is_file() else read_json(model / "config.json")


def read_generation_config(model: Path) -> JsonObject | None:
    """A folder's ``generation_config.json``, if it has one."""
    file = model / "generation_config.json"
    return read_json(file) if file.is_file() else None


def open_model(model: Path, stack: ExitStack) -> Tensors:
    """All tensors of a model, open until ``stack`` closes; raises as their readers do."""
    return open_gguf(model) if model.is_file() else open_tensors(model, stack)


def names_of_tensors(model: Path) -> set[str]:
    """The names of a model's tensors."""
    with ExitStack() as stack:
        return set(open_model(model, stack))


def stored_types(model: Path) -> tuple[str, ...]:
    """The types that a GGUF file's matrices are dequantised from; empty for a folder."""
    return read_gguf(model).types if model.is_file() else ()
