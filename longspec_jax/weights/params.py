"""Stored tensors into parameters of any sharding, and parameters into files.

**Loading**: every device's shard is assembled from the slices of the stored tensors that fall into
it, in pieces of about a megabyte: a piece is read, checked, cast and transposed while it is in the
processor's cache. Besides the arrays themselves the host holds a few shards at a time, never a
second model.

**Saving** writes ``model.safetensors`` and ``config.json`` in Hugging Face's names and layouts. The
host's memory must hold the whole model. The configuration is written last, so that a folder whose
writing was interrupted does not look like a model.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jaxtyping import PyTree
from safetensors.numpy import save_file

from longspec_jax import files
from longspec_jax.sharding import param_shardings, path_name
from longspec_jax.weights.checkpoint import Index, Tensor, Tensors
from longspec_jax.weights.tables import Leaf, Part, Table, check_params

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and one-past-last index on every axis."""

PIECE_BYTES = 1 << 20
"""Most bytes read at once, unless one slice of a tensor's first factor is larger."""
READERS = max(4, min(8, (os.cpu_count() or 1) // 2))
"""Parameters assembled at the same time, by half of the processors: most of it is transposing, half
a gigabyte a second each."""

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, "float8_e4m3fn": 0x7F}
"""The exponent bits; a value is NaN or infinite where all of them are set. The 8-bit float has no
infinities, and its NaN has all bits but the sign."""


def load_params(table: Table, tensors: Tensors, dtype: str, mesh: Mesh | None) -> Any:
    """The parameter tree of a table, sharded by the project's rules or on the first device."""
    shardings = _shardings(table, dtype, mesh)

    def load(leaf: Leaf) -> jax.Array:
        # Devices that replicate a shard get it one by one; it is assembled once.
        shards: dict[Ranges, np.ndarray] = {}

        def shard(index: Index | None) -> np.ndarray:
            ranges = tuple(
                s.indices(size)[:2] for s, size in zip(index or (), leaf.shape, strict=True)
            )
            if ranges not in shards:
                shards[ranges] = assemble(leaf, ranges, tensors, dtype)
            return shards[ranges]

        return jax.make_array_from_callback(leaf.shape, shardings[leaf.path], shard)

    with ThreadPoolExecutor(READERS) as pool:
        arrays = pool.map(load, table.leaves)
        paths = (leaf.path for leaf in table.leaves)
        return unflatten_dict(dict(zip(paths, arrays, strict=True)), sep="/")


def assemble(leaf: Leaf, ranges: Ranges, tensors: Tensors, dtype: str) -> np.ndarray:
    """A block of a parameter, from the slices of its stored tensors that fall into it."""
    block = np.empty([stop - start for start, stop in ranges], jnp.dtype(leaf.dtype or dtype))
    first, last = ranges[leaf.stack]
    for part in leaf.parts:
        start, stop = max(first, part.start), min(last, part.start + part.depth)
        if start >= stop:
            continue
        stacked = (start - part.start, stop - part.start)
        inside = (*ranges[: leaf.stack], stacked, *ranges[leaf.stack + 1 :])
        into = block[(slice(None),) * leaf.stack + (slice(start - first, stop - first),)]
        _fill(into, part, inside, tensors[part.source])
    return block


def _fill(into: np.ndarray, part: Part, ranges: Ranges, tensor: Tensor) -> None:
    """Fill ``into`` with a part's block, in pieces along the tensor's slowest factor."""
    axis = part.order.index(0)
    for piece in _pieces(part, ranges, axis, jnp.dtype(tensor.dtype).itemsize):
        offset = ranges[axis][0]
        at = (slice(None),) * axis + (slice(piece[axis][0] - offset, piece[axis][1] - offset),)
        values = _read(part, piece, tensor)
        into[at] = _cast(values, into.dtype, part.source, tensor)


def _pieces(part: Part, ranges: Ranges, axis: int, itemsize: int) -> Iterator[Ranges]:
    """Cut a block along the axis of the tensor's slowest factor."""
    start, stop = ranges[axis]
    each = math.prod(e - b for b, e in ranges) // (stop - start) * itemsize
    step = -(-max(1, PIECE_BYTES // max(each, 1)) // part.inner) * part.inner
    for begin in range(start, stop, step):
        yield (*ranges[:axis], (begin, min(begin + step, stop)), *ranges[axis + 1 :])


def _read(part: Part, ranges: Ranges, tensor: Tensor) -> np.ndarray:
    """A block in the parameter's axis order."""
    if part.shuffle is not None:
        start, stop = ranges[part.heads]
        whole = (0, len(part.shuffle))
        ranges = (*ranges[: part.heads], whole, *ranges[part.heads + 1 :])
        unshuffled = _read(replace(part, shuffle=None), ranges, tensor)
        return unshuffled.take(part.shuffle[start:stop], axis=part.heads)
    if part.inner > 1:  # Two of the stored factors are the first axis of the parameter.
        start, stop = ranges[0]
        outer = (start // part.inner, -(-stop // part.inner))
        apart = _read(replace(part, inner=1), (outer, (0, part.inner), *ranges[1:]), tensor)
        first = outer[0] * part.inner
        return apart.reshape(-1, *apart.shape[2:])[start - first : stop - first]
    by_factor = dict(zip(part.order, ranges, strict=True))
    index, view, inner, factor = [], [], [], 0
    for group in part.groups:
        # A stored axis is cut by its slowest factor, which is what shardings split; the faster
        # ones are cut after reading.
        unit = math.prod(group[1:])
        start, stop = by_factor[factor]
        offset = 0 if index else part.first
        index.append(slice(offset + start * unit, offset + stop * unit))
        view += [stop - start, *group[1:]]
        inner += [slice(None), *(slice(*by_factor[factor + i]) for i in range(1, len(group)))]
        factor += len(group)
    return tensor.read(tuple(index)).reshape(view)[tuple(inner)].transpose(part.order)


def _cast(values: np.ndarray, dtype: np.dtype, name: str, tensor: Tensor) -> np.ndarray:
    """The values in another dtype; raises if any is not finite."""
    with np.errstate(over="ignore"):  # Reported below, as an error.
        cast = values.astype(dtype, copy=False)
    if is_finite(cast):
        return cast
    if np.isfinite(values.astype(np.float64)).all():
        largest = np.abs(values.astype(np.float64)).max()
        raise ValueError(
            f"{tensor.file}: {name} holds {largest:g}, which overflows {dtype.name}; pass "
            "dtype='bfloat16' or dtype='float32'"
        )
    raise ValueError(
        f"{tensor.file}: {name} holds NaN or infinite values; the file is damaged or its training "
        "diverged: download it again, or load another checkpoint"
    )


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; three times faster on the bits than on the numbers."""
    mask = _EXPONENT.get(values.dtype.name)
    if mask is None:  # Integers.
        return True
    bits = values.view(f"u{values.dtype.itemsize}")
    return bool(np.bitwise_and(bits, mask).max(initial=0) != mask)


def _shardings(table: Table, dtype: str, mesh: Mesh | None) -> dict[str, Sharding]:
    """The sharding of every parameter, by path."""
    if mesh is None:
        device = SingleDeviceSharding(jax.devices()[0])
        return {leaf.path: device for leaf in table.leaves}
    shapes = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or dtype) for leaf in table.leaves
    }
    tree = param_shardings(mesh, unflatten_dict(shapes, sep="/"))
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): sharding for path, sharding in paths}


_REPLACED = (
    "config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
)


def write_model(
    folder: Path,
    table: Table,
    params: PyTree,
    dtype: str,
    raw: dict[str, Any],
    more: Mapping[str, np.ndarray] = {},
) -> None:
    """Write a model folder, replacing the weights it may hold.

    Args:
      raw: the ``config.json``.
      more: tensors that are not parameters, by their stored names.

    Raises:
      ValueError: if the parameters are not those of the table, or are not finite.
    """
    found = check_params(table, params, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _REPLACED:
        for stale in folder.glob(pattern):
            stale.unlink()
    tensors = {name: t for leaf in table.leaves for name, t in _stored(leaf, found[leaf.path])}
    tensors |= {name: np.zeros(shape, jnp.dtype(dtype)) for name, shape in table.dead.items()}
    save_tensors(folder / "model.safetensors", tensors | dict(more), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def save_tensors(
    file: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write tensors to a file with the permissions of any new one, or of the one before."""
    with files.replacing(file) as unfinished:
        usual = stat.S_IMODE(unfinished.stat().st_mode)
        save_file(dict(tensors), unfinished, metadata=dict(metadata))
        unfinished.chmod(usual)  # safetensors leaves it readable only to its owner.


def _stored(leaf: Leaf, array: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
    """The stored tensors of one parameter."""
    values = np.asarray(array)
    if not is_finite(values):
        raise ValueError(
            f"parameter {leaf.path} holds NaN or infinite values and is not saved; save an earlier "
            "step, from before the training diverged"
        )
    blocks: dict[str, list[np.ndarray]] = {}
    for part in leaf.parts:
        blocks.setdefault(part.source, []).append(_unstack(leaf, part, values))
    for source, found in blocks.items():
        yield source, found[0] if len(found) == 1 else np.concatenate(found)


def _unstack(leaf: Leaf, part: Part, values: np.ndarray) -> np.ndarray:
    """The inverse of reading: one block of a parameter in its stored layout."""
    at = (slice(None),) * leaf.stack + (slice(part.start, part.start + part.depth),)
    block = values[at]
    if part.shuffle is not None:
        block = block.take(np.argsort(part.shuffle), axis=part.heads)
    if part.inner > 1:
        block = block.reshape(-1, part.inner, *block.shape[1:])
    block = block.transpose(np.argsort(part.order))
    shape = (math.prod(part.groups[0]), *part.shape[1:])
    return np.ascontiguousarray(block.reshape(shape))
