"""Strict matching of a checkpoint, or of a parameter tree, with a name table.

Every stored tensor must be read or listed as dropped, every parameter must be filled, all shapes
must agree. What does not fit is reported together, because a wrong model is easier recognised by
all its differences than by the first.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.config import TargetConfig
from longspec_jax.sharding import path_name
from longspec_jax.weights.tables import DRAFT_PREFIXES, Table
from longspec_jax.weights.tensors import Tensors

FLOATING = ("bfloat16", "float16", "float32", "float64")
MOST_REPORTED = 8
"""Problems of one kind that are spelled out; the others are counted."""


def check_layers(config: TargetConfig, tensors: Tensors, file: Path) -> None:
    """Raise if a configuration has more layers than files could hold, before they are listed."""
    if config.num_layers > len(tensors):
        layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
        raise ValueError(
            f"{file}: num_hidden_layers={config.num_layers}, but the weights beside it hold "
            f"{len(tensors)} tensors of {len(layers)} layers; use the file that was saved with them"
        )


def check_tensors(table: Table, tensors: Tensors, origin: str, dtype: str | None = None) -> None:
    """Raise unless the tensors are exactly those of the table.

    Args:
      table: the table of the model that its configuration describes.
      tensors: the stored tensors, prefix removed.
      origin: where they come from, for the message.
      dtype: what they must be stored in; any floating dtype if absent.
    """
    parts = table.parts
    shapes = {name: part.shape for name, part in parts.items()} | table.dead
    missing = [f"missing {name} {shapes[name]}" for name in sorted(set(parts) - set(tensors))]
    unexpected, wrong = [], []
    for name, tensor in sorted(tensors.items()):
        if name not in shapes:
            if not table.drops(name):
                unexpected.append(f"unexpected {name} {tensor.shape}")
        elif tensor.shape != shapes[name]:
            wrong.append(f"{name} is {tensor.shape}, must be {shapes[name]}")
        elif name in parts and tensor.dtype not in FLOATING:
            wrong.append(f"{name} is stored as {tensor.dtype}, must be floating point")
        elif name in parts and dtype is not None and tensor.dtype != dtype:
            wrong.append(f"{name} is {tensor.dtype}, config.json says {dtype}: pass dtype=")
    _report(
        (missing, unexpected, wrong),
        f"the tensors of {origin} are not those its config.json describes",
        "The files belong to another model, are incomplete, or are not of a supported family",
    )


def check_params(table: Table, params: Any, dtype: str) -> dict[str, jax.Array]:
    """The parameters by path; raises unless they are exactly those of the table."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    found = {path_name(path): leaf for path, leaf in paths}
    shapes = {leaf.path: leaf.shape for leaf in table.leaves}
    missing = [f"missing {path} {shapes[path]}" for path in sorted(set(shapes) - set(found))]
    unexpected, wrong = [], []
    for path, leaf in sorted(found.items()):
        if path not in shapes:
            unexpected.append(f"unexpected {path} {leaf.shape}")
        elif leaf.shape != shapes[path]:
            wrong.append(f"{path} is {leaf.shape}, must be {shapes[path]}")
        elif leaf.dtype != jnp.dtype(dtype):
            wrong.append(f"{path} is {leaf.dtype}, the configuration says {dtype}")
    _report(
        (missing, unexpected, wrong),
        "the parameters do not fit their configuration",
        "Save them with the configuration they were made with, and cast them to its dtype",
    )
    return found


def strip_draft_prefix(tensors: Tensors) -> Tensors:
    """The tensors under the names of the released format, whichever prefix they carry."""

    def carried(prefix: str) -> int:
        return sum(name.startswith(f"{prefix}cross_attn.") for name in tensors)

    prefix = max(DRAFT_PREFIXES, key=carried)

    def stripped(name: str) -> str:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
        # Not a name of the format, so that it is reported instead of standing in for the draft's
        # own.
        return f"{name} (beside {prefix}*)"

    return {stripped(name): tensor for name, tensor in tensors.items()}


def _report(kinds: tuple[list[str], ...], what: str, remedy: str) -> None:
    """Raise one error for all problems, the first few of every kind spelled out."""
    lines = []
    for problems in kinds:
        lines += problems[:MOST_REPORTED]
        if len(problems) > MOST_REPORTED:
            lines.append(f"and {len(problems) - MOST_REPORTED} more like these")
    if lines:
        raise ValueError(f"{what}:\n  " + "\n  ".join(lines) + f"\n{remedy}.")
