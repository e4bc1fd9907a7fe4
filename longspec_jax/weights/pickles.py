"""Files of ``torch.save`` as named tensors, without torch and without running what they hold.

Such a file is a zip archive: a pickle that describes the tensors, and an uncompressed entry of
bytes for each storage, which is mapped into memory. The pickle may only name what describes a
tensor. Anything else, and any tensor that reaches beyond its storage, is refused before a byte of
it is read. The pickle itself is bounded, and refused if it is compressed, which torch never does:
1 MB could hold gigabytes.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import jax.numpy as jnp
import numpy as np

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""torch's classes of storages by NumPy's names of their numbers."""
MOST_DESCRIPTION = 16 * 2**20
"""Bytes of the pickle. A tensor takes 150 to 250, and a file has some thousand."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of an entry of a zip archive: its mark, and the lengths of its name and of what follows that."""
Act: TypeAlias = Callable[[pickle.Unpickler], None]
_HASHED = pickle.DICT + pickle.EMPTY_SET + pickle.ADDITEMS + pickle.FROZENSET
"""Operations that hash whatever they are given; torch.save writes none of them."""


class Storage(NamedTuple):
    """The numbers of one or several tensors."""

    key: str
    dtype: str
    numbers: int
    """How many."""


class StoredTensor(NamedTuple):
    """One tensor as a pickle describes it."""

    storage: Storage
    offset: int
    """Its first number in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Numbers between neighbours on every axis."""


class TensorFile:
    """An opened file of ``torch.save``.

    Raises:
      pickle.UnpicklingError: if it holds more than tensors, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        """Read the description; the numbers are read by :meth:`read`."""
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
                [name] = [name for name in self._entries if name.endswith("/data.pkl")]
                self._folder = name.removesuffix("data.pkl")
                order = f"{self._folder}byteorder"
                if order in self._entries and self._whole(archive, order) != b"little":
                    raise pickle.UnpicklingError("its numbers are big-endian")
                self.content: object = _Reader(io.BytesIO(self._whole(archive, name))).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # Of damaged bytes a pickle raises anything.
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    def _whole(self, archive: zipfile.ZipFile, name: str) -> bytes:
        """The bytes of an entry that describes the others."""
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"{name} is compressed, which torch.save never does")
        if entry.file_size > MOST_DESCRIPTION:
            raise pickle.UnpicklingError(
                f"{name} has {entry.file_size} bytes and may have {MOST_DESCRIPTION}"
            )
        return archive.read(name)

    def read(self, tensor: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, read from the file."""
        numbers = self._mapped(tensor.storage)[tensor.offset :]
        strides = [stride * numbers.itemsize for stride in tensor.strides]
        whole = np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides, writeable=False)
        return np.ascontiguousarray(whole[index])

    def check(self, tensor: StoredTensor) -> None:
        """Raise UnpicklingError unless the file holds all numbers of a tensor."""
        storage, steps = tensor.storage, tuple(zip(tensor.shape, tensor.strides, strict=True))
        entry = self._entries.get(f"{self._folder}data/{storage.key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"storage {storage.key!r} is missing or compressed")
        last = tensor.offset + sum((size - 1) * step for size, step in steps)
        held = min(storage.numbers, entry.file_size // jnp.dtype(storage.dtype).itemsize)
        outside = last >= held and math.prod(tensor.shape) > 0
        if outside or held < storage.numbers or min((tensor.offset, *sum(steps, ()))) < 0:
            raise pickle.UnpicklingError(f"storage {storage.key!r} is shorter than its tensors")

    def _mapped(self, storage: Storage) -> np.ndarray:
        """A storage's numbers, mapped into memory."""
        entry = self._entries[f"{self._folder}data/{storage.key}"]
        with self._path.open("rb") as file:
            file.seek(entry.header_offset)
            mark, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        if mark != b"PK\x03\x04":
            raise ValueError(
                f"{self._path} is damaged: storage {storage.key!r} is not where it says"
            )
        start = entry.header_offset + _LOCAL_HEADER.size + name + extra
        dtype = jnp.dtype(storage.dtype)
        if not storage.numbers:
            return np.empty(0, dtype)
        return np.memmap(self._path, dtype, "r", start, (storage.numbers,))


def _tensor(
    storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> StoredTensor:
    """What torch makes a tensor of."""
    whole = all(type(number) is int for number in (offset, *size, *stride))
    if not whole or not isinstance(storage, Storage) or len(size) != len(stride):
        raise pickle.UnpicklingError("a tensor is described by something else than numbers")
    return StoredTensor(storage, offset, tuple(size), tuple(stride))


def _nothing() -> dict[str, object]:
    """An empty dictionary; its entries follow."""
    return {}


def _parameter(tensor: object, *_: object) -> Any:
    """What torch makes a parameter of: a tensor that wants gradients."""
    return tensor


class _Reader(pickle._Unpickler):
    """Unpickles descriptions of tensors, and nothing else."""

    stack: list[Any]

    def _set(self, found: list[Any]) -> None:
        """Put values under their names: a key of nested tuples may take for ever to hash."""
        if not all(isinstance(name, str) for name in found[::2]):
            raise pickle.UnpicklingError("a key is not a text")
        self.stack[-1].update(zip(found[::2], found[1::2], strict=True))

    def _set_one(self) -> None:
        value, name = self.stack.pop(), self.stack.pop()
        self._set([name, value])

    dispatch = {
        **{code: act for code, act in pickle._Unpickler.dispatch.items() if code not in _HASHED},
        pickle.SETITEM[0]: cast(Act, _set_one),
        pickle.SETITEMS[0]: cast(Act, lambda self: self._set(self.pop_mark())),
        # Attributes, such as the version of a module's class, are dropped.
        pickle.BUILD[0]: cast(Act, lambda self: self.stack.pop()),
    }

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may name."""
        known = {
            ("collections", "OrderedDict"): _nothing,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a tensor")
        return known[module, name]

    def persistent_load(self, pid: object) -> Storage:
        """A storage."""
        match pid:
            case ("storage", str(dtype), str(key), str(), int(count)) if dtype in STORAGES.values():
                return Storage(key, dtype, count)
        raise pickle.UnpicklingError("it names a storage of an unknown kind")
