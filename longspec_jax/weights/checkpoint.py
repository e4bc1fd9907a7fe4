"""Weight files of a folder as one set of named tensors that can be read by slice.

Knows files and formats, not models. Safetensors are read through a memory map, so that a slice
costs its own bytes and nothing else. ``.bin`` and ``.pth`` files are pickles, whose code is never
run (:mod:`longspec_jax.weights.pickles`).
"""

import json
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from longspec_jax.checks import first_line
from longspec_jax.config.layers import MAX_EXPERTS
from longspec_jax.weights.json_files import read_json, what_to_do
from longspec_jax.weights.pickles import StoredTensor, TensorFile

Index: TypeAlias = tuple[slice, ...]


class Tensor(NamedTuple):
    """One stored tensor: what it is, and how to read a part of it."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy's name, such as ``bfloat16``."""
    read: Callable[[Index], np.ndarray]
    file: Path


Tensors: TypeAlias = dict[str, Tensor]

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "draft_model_weights.pth",
)
"""What weights are called, in the order of preference."""
LM_HEAD = "lm_head.weight"
MEDUSA_FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
"""What Medusa heads are called."""

_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_FLOAT8 = "F8_E4M3"
"""Safetensors' names of the floating dtypes; other names are passed on, for the error message."""


_STACKED = {"gate_up": ("gate", "up"), "down": ("down",)}
"""The matrices of an expert, by the name of what stacks them."""


def each_expert(tensors: Tensors, layers: Iterable[str]) -> Tensors:
    """The tensors, those of all experts of some layers as one for each expert and matrix.

    Stacked ones are ``[E, 2 F, D]``, gate above up, and ``[E, D, F]``, as in transformers 5.

    Args:
      layers: what the names of their tensors begin with. A file may have any number of others.
    """
    found = dict(tensors)
    for layer, (stacked, parts) in product(layers, _STACKED.items()):
        experts = f"{layer}mlp.experts"
        tensor = tensors.get(f"{experts}.{stacked}_proj")
        if tensor is None or len(tensor.shape) != 3:
            continue
        del found[f"{experts}.{stacked}_proj"]
        count, rows, columns = tensor.shape
        rows //= len(parts)
        # One too many is refused, and a tensor without bytes may name any number.
        for expert in range(min(count, MAX_EXPERTS + 1)):
            for index, part in enumerate(parts):
                read = partial(_read_expert, tensor, expert, index * rows, rows)
                one = Tensor((rows, columns), tensor.dtype, read, tensor.file)
                found[f"{experts}.{expert}.{part}_proj.weight"] = one
    return found


def _read_expert(tensor: Tensor, expert: int, first: int, rows: int, index: Index) -> np.ndarray:
    """A part of the rows of one expert that begin at ``first``."""
    start, stop, _ = index[0].indices(rows)
    return tensor.read((slice(expert, expert + 1), slice(first + start, first + stop), index[1]))[0]


def open_tensors(folder: Path, stack: ExitStack, names: Sequence[str] = WEIGHT_FILES) -> Tensors:
    """All tensors of a folder's weight files, open until ``stack`` closes.

    Args:
      folder: that holds them.
      stack: closes them.
      names: what the files may be called, in the order of preference.

    Raises:
      FileNotFoundError: if the folder holds no weights, or its index names a file that is missing.
      ValueError: if a file cannot be read, or index and files disagree.
    """
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        found = sorted(path.name for path in folder.iterdir())
        raise FileNotFoundError(
            f"{folder} holds no weights: expected one of {', '.join(names)}, found "
            f"{', '.join(found) or 'nothing'}; {what_to_do(folder)}"
        )
    if name.endswith(".index.json"):
        return _open_indexed(folder / name, stack)
    return _open_file(folder / name, stack)


def _open_indexed(index: Path, stack: ExitStack) -> Tensors:
    """The tensors of all shards that an index names."""
    shards = _weight_map(index)
    missing = {shard for shard in shards if not (index.parent / shard).is_file()}
    if missing or not shards:
        are = "are" if len(missing) > 1 else "is"
        problem = f"names {len(shards)} files, but {_some(missing)} {are} missing"
        problem = problem if shards else "names no file"
        raise FileNotFoundError(f"{index}: weight_map {problem}; download the model again")
    tensors: Tensors = {}
    for shard, listed in sorted(shards.items()):
        opened = _open_file(index.parent / shard, stack)
        # The index of a tied target may name the LM head, which its file leaves out. A target that
        # needs the head is refused for lack of it.
        listed -= {name for name in listed - set(opened) if name.endswith(LM_HEAD)}
        if listed != set(opened):
            raise ValueError(
                f"{shard} and {index.name} disagree about {_some(listed ^ set(opened))}; the files "
                "come from different saves: download the model again, or, if they were published "
                "so, write into weight_map what each file holds"
            )
        tensors |= opened
    return tensors


def _weight_map(index: Path) -> dict[str, set[str]]:
    """The tensors that each file holds, by an index; refuses one that leads out of its folder.

    The names are judged, not where they lead: the files of a hub's snapshot are links out of it.
    """
    named = read_json(index).part("weight_map")
    suffix = ".safetensors" if index.name.startswith(WEIGHT_FILES[0]) else ".bin"
    shards = defaultdict[str, set[str]](set)
    for tensor, file in named.values.items():
        if not isinstance(file, str) or not re.fullmatch(
            rf"[\w.-]{{1,200}}\{suffix}", file, re.ASCII
        ):
            raise named.error(
                tensor,
                f"must be the plain name of a {suffix} file next to the index, without any folder",
                "no other file is opened: download the model again, from a source you trust",
            )
        shards[file].add(tensor)
    return shards


def _open_file(path: Path, stack: ExitStack) -> Tensors:
    """The tensors of one file."""
    return _open_safetensors(path, stack) if path.suffix == ".safetensors" else _open_torch(path)


def _open_safetensors(path: Path, stack: ExitStack) -> Tensors:
    """The tensors of one safetensors file."""
    try:
        file = stack.enter_context(safe_open(path, framework="numpy"))
        tensors = {name: _tensor(path, file.get_slice(name)) for name in file.keys()}
        return tensors | _open_float8(path, tensors)
    except SafetensorError as error:
        if "unknown variant" in str(error):  # Of a whole header.
            raise ValueError(
                f"{path} holds numbers of a kind that safetensors {version('safetensors')} does "
                f"not know ({error}); pip install --upgrade safetensors"
            ) from error
        size = path.stat().st_size
        raise ValueError(
            f"{path} ({size} bytes) is truncated or not a safetensors file ({error}); "
            f"{_pointer_advice(path) or 'download it again'}"
        ) from error


def _tensor(path: Path, stored: Any) -> Tensor:
    """One stored tensor, not read yet."""
    kind: str = stored.get_dtype()
    dtype = _SAFETENSORS_DTYPES.get(kind, kind)
    return Tensor(tuple(stored.get_shape()), dtype, stored.__getitem__, path)


def _open_float8(path: Path, tensors: Tensors) -> Tensors:
    """The tensors of 8-bit floats, which safetensors does not slice for NumPy."""
    float8 = {name: tensor for name, tensor in tensors.items() if tensor.dtype == _FLOAT8}
    if not float8:
        return {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)

    def read(index: Index, name: str) -> np.ndarray:
        first, last = header[name]["data_offsets"]
        return data[first:last].reshape(tensors[name].shape)[index].view(jnp.float8_e4m3fn)

    return {
        name: Tensor(tensor.shape, "float8_e4m3fn", partial(read, name=name), path)
        for name, tensor in float8.items()
    }


def _pointer_advice(path: Path) -> str | None:
    """What to do if a repository was cloned without its large files."""
    with path.open("rb") as file:
        is_pointer = file.read(11) == b"version htt"
    return "it is a git-lfs pointer: run `git lfs pull` in its folder" if is_pointer else None


def _some(names: set[str]) -> str:
    """A few names, and how many more there are."""
    first, rest = sorted(names)[:8], len(names) - 8
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def _open_torch(path: Path) -> Tensors:
    """The tensors of one file of ``torch.save``.

    Raises:
      ValueError: if the file is damaged, holds anything but tensors, or is older than torch 1.6.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is truncated, or a pickle of torch before 1.6, "
            "which is not read; download it again, or convert the model to safetensors"
        )
    try:
        file = TensorFile(path)
        state = _named(path, file.content, StoredTensor)
        for tensor in state.values():
            file.check(tensor)
    except pickle.UnpicklingError as error:
        raise _damaged(path, error) from error
    return {
        name: Tensor(tensor.shape, tensor.storage.dtype, partial(file.read, tensor), path)
        for name, tensor in state.items()
    }


def _damaged(path: Path, reason: Exception | None = None) -> ValueError:
    """What is wrong with a pickle, to be raised."""
    words = f" ({first_line(reason)})" if reason else ""
    return ValueError(
        f"{path} ({path.stat().st_size} bytes) is damaged, or holds more than tensors, which is "
        f"never loaded{words}; download it again if it is damaged, else take the model's "
        "safetensors, or save only its tensors"
    )


def _named(path: Path, state: object, kind: type) -> dict[str, Any]:
    """The tensors of a file by name; raises unless it holds nothing else."""
    strange = f"a value of type {type(state).__name__}"
    if isinstance(state, dict):
        others = {k: type(v).__name__ for k, v in state.items() if not isinstance(v, kind)}
        if not others:
            return state
        strange = str(others)
    raise ValueError(f"{path} must be a flat dictionary of tensors, but holds {strange}")
