"""Parameters to ``model.safetensors`` and ``config.json``, in Hugging Face's names and layouts.

One shard file is in host memory at a time. The configuration is written last, so that a folder
whose writing was interrupted does not look like a model.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from longspec_jax.weights.match import check_params
from longspec_jax.weights.stream import is_finite
from longspec_jax.weights.tables import Leaf, Part, Table

SHARD_BYTES = 4 << 30
"""Most bytes of one file; a larger model is written as several files and an index."""
_REPLACED = (
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)


def write_model(folder: Path, table: Table, params: Any, dtype: str, raw: dict[str, Any]) -> None:
    """Write a model folder, replacing the weights it may hold.

    Raises:
      ValueError: if the parameters are not those of the table, or are not finite.
    """
    found = check_params(table, params, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _REPLACED:
        for stale in folder.glob(pattern):
            stale.unlink()
    shards = list(_shards(table, jnp.dtype(dtype).itemsize))
    weight_map = {}
    for number, leaves in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        tensors = {n: t for leaf in leaves for n, t in _stored(leaf, found[leaf.path])}
        if number == 1:
            tensors |= {n: np.zeros(shape, jnp.dtype(dtype)) for n, shape in table.dead.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(np.prod(leaf.shape) for leaf in table.leaves) * jnp.dtype(dtype).itemsize
        index = {"metadata": {"total_size": int(total)}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", raw)


def _shards(table: Table, itemsize: int) -> Iterator[list[Leaf]]:
    """The parameters of every file, in the table's order."""
    shard: list[Leaf] = []
    size = 0
    for leaf in table.leaves:
        nbytes = int(np.prod(leaf.shape)) * itemsize
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(leaf)
        size += nbytes
    yield shard


def _stored(leaf: Leaf, array: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
    """The stored tensors of one parameter."""
    values = np.asarray(array)
    if not is_finite(values):
        raise ValueError(
            f"parameter {leaf.path} holds NaN or infinite values and is not saved; save an earlier "
            "step, from before the training diverged"
        )
    for part in leaf.parts:
        yield part.source, _unstack(leaf, part, values)


def _unstack(leaf: Leaf, part: Part, values: np.ndarray) -> np.ndarray:
    """The inverse of reading: one block of a parameter in its stored layout."""
    at = (slice(None),) * leaf.stack + (slice(part.start, part.start + part.depth),)
    block = values[at].transpose(np.argsort(part.order))
    return np.ascontiguousarray(block.reshape(part.shape))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object for people and for Hugging Face."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
