"""A GGUF file: its metadata, and where its tensors lie. Knows the format, not models.

Nothing in a file is believed before it is bounded by the bytes that are left, and what ggml's own
reader demands is demanded here: offsets that follow each other, names that come once, counts that
the file can hold. ``gguf.GGUFReader`` checks none of that, and takes twenty seconds for the
vocabulary of a 1.5B model; this takes less than one.

Source: ggml's ``docs/gguf.md`` and ``src/gguf.cpp``, versions 2 and 3 of the format.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longspec_jax.checks import shown
from longspec_jax.weights.json_files import JsonObject

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part of a split file."""
MAX_DIMENSIONS = 4
MAX_NAME, MAX_KEY = 64, 65_535
"""Longest name of a tensor and of a key, in bytes."""
MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    0: ("B", np.uint8),
    1: ("b", np.int8),
    2: ("H", np.uint16),
    3: ("h", np.int16),
    4: ("I", np.uint32),
    5: ("i", np.int32),
    6: ("f", np.float32),
    10: ("Q", np.uint64),
    11: ("q", np.int64),
    12: ("d", np.float64),
}
"""Types of values: how ``struct`` and NumPy call them."""
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_AGAIN = "download the file again"


class BlockType(NamedTuple):
    """How the elements of a tensor are stored, in blocks along its rows."""

    name: str
    elements: int
    """Of a block."""
    size: int
    """Bytes of a block."""


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
"""The types that are read, by their numbers in a file."""
_OTHERS = {10: "Q2_K", 11: "Q3_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_OTHERS |= {21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}
_OTHERS |= {40: "NVFP4", 41: "Q1_0"}
"""Types that are refused by name."""


class StoredTensor(NamedTuple):
    """Where a tensor lies, and how it is stored."""

    path: Path
    start: int
    """The first byte."""
    shape: tuple[int, ...]
    """The slowest axis first, as NumPy has it."""
    type: BlockType

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: blocks run along the last axis and end with it."""
        return self.shape[-1] // self.type.elements * self.type.size

    def rows(self) -> np.ndarray:
        """The stored bytes ``[*shape[:-1], row_bytes]``, mapped and not read yet."""
        shape = (*self.shape[:-1], self.row_bytes)
        return np.memmap(self.path, np.uint8, "r", offset=self.start, shape=shape)


@dataclass(frozen=True, eq=False)
class GgufFile:
    """What a GGUF file says of itself, all parts of a split one together."""

    path: Path
    metadata: JsonObject
    """Values by key; errors name the file. Numbers of 32 bits are the shortest decimals of
    them."""
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's class."""
        return self.metadata.text("general.architecture", "")

    @property
    def types(self) -> tuple[str, ...]:
        """How quantised matrices are stored, by the number of their elements, most first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1 and tensor.type.elements > 1:
                name = tensor.type.name
                sizes[name] = sizes.get(name, 0) + math.prod(tensor.shape)
        return tuple(sorted(sizes, key=lambda name: -sizes[name]))


def parts_of(path: Path) -> tuple[Path, ...]:
    """All files of a model, one of which is named: itself, or a split one's parts in order."""
    match = PART.fullmatch(path.name)
    if match is None:
        return (path,)
    name, _, count = match.groups()
    return tuple(
        path.with_name(f"{name}-{index:05}-of-{count}.gguf")
        for index in range(1, min(int(count), 99_999) + 1)
    )


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and list its tensors; the parts of a split one as one.

    Raises:
      FileNotFoundError: if a part is missing.
      ValueError: if a file is damaged, truncated, or no GGUF.
    """
    parts = parts_of(path)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise FileNotFoundError(
            f"{path} is one of {len(parts)} parts of a model, and next to it "
            f"{', '.join(missing[:4])} {'are' if len(missing) > 1 else 'is'} missing; put all "
            "parts into one folder"
        )
    stats = (part.stat() for part in parts)
    return _read(parts, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@lru_cache(maxsize=4)
def _read(parts: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> GgufFile:
    """The file of these parts; read again where size or time of one has changed."""
    first, *others = (_Part(path) for path in parts)
    metadata, tensors = JsonObject(first.metadata, str(parts[0])), dict(first.tensors)
    count = metadata.whole("split.count", 1, 0) or 1
    if count != len(parts):
        raise metadata.error(
            "split.count",
            f"says how many files the model is split into, and this is one of {len(parts)} by its "
            "name",
            "keep the names NAME-00001-of-0000N.gguf, or join them with llama-gguf-split --merge",
        )
    for other in others:
        if both := tensors.keys() & other.tensors.keys():
            raise ValueError(f"{other.path}: {both.pop()} is in another part too; {_AGAIN}")
        tensors |= other.tensors
    total = metadata.whole("split.tensors.count", len(tensors), 0)
    if others and total != len(tensors):
        raise metadata.error("split.tensors.count", f"must be {len(tensors)}, what the parts hold")
    return GgufFile(parts[0], metadata, tensors)


class _Part:
    """One file while it is parsed."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0
        with path.open("rb") as file:
            start = file.read(64)
            if start[:4] != MAGIC:
                raise ValueError(f"{path} {_not_gguf(start)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self.data:
                self.size, self.at = len(self.data), len(MAGIC)
                self.metadata, self.tensors = self._header()
            del self.data

    def _header(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        version = self._number(4)
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise self._error("is of the other byte order", "convert it on such a machine")
            named = " or ".join(map(str, VERSIONS))
            raise self._error(f"is of version {version}, not {named}", "convert the model again")
        tensors, pairs = self._number(10), self._number(10)
        # Every pair and every tensor takes some bytes: what claims more is refused at once.
        self._require(13 * pairs + 24 * tensors, f"{pairs} keys and {tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string(MAX_KEY)
            if key in metadata:
                raise self._error(f"gives the key {shown(key)} twice")
            metadata[key] = self._value(self._number(4), key)
        infos = [self._info() for _ in range(tensors)]
        names = [info[0] for info in infos]
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise self._error(f"holds the tensor {shown(twice)} twice")
        return metadata, dict(self._placed(metadata, infos))

    def _placed(
        self, metadata: Mapping[str, Any], infos: list[tuple[str, tuple[int, ...], int, int]]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors with their places; raises unless each begins where the last one ends."""
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= MAX_ALIGNMENT or align & (align - 1):
            raise self._error(f"has general.alignment={shown(align)}, no power of two")
        start, expected = _padded(self.at, align), 0
        for name, shape, kind, offset in infos:
            if kind not in TYPES:
                named = _OTHERS.get(kind, f"number {kind}")
                raise self._error(
                    f"holds {name} in the type {named}, which is not read; read are "
                    f"{', '.join(each.name for each in TYPES.values())}",
                    "choose a file of another quantisation, such as Q4_K_M",
                )
            block = TYPES[kind]
            if shape[-1] % block.elements:
                raise self._error(
                    f"holds {name} {shape} in {block.name}, whose blocks of {block.elements} do "
                    "not divide its rows"
                )
            if offset != expected:
                raise self._error(f"has {name} at {offset}, and {expected} follows the one before")
            bytes_ = math.prod(shape) // block.elements * block.size
            if start + offset + bytes_ > self.size:
                raise self._error(
                    f"ends at byte {self.size}, and {name} at {start + offset + bytes_}: it is "
                    "truncated"
                )
            yield name, StoredTensor(self.path, start + offset, shape, block)
            expected = _padded(offset + bytes_, align)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, number of the type, and offset of a tensor."""
        name = self._string(MAX_NAME)
        count = self._number(4)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._error(f"has {count} dimensions of {shown(name)}, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number(10) for _ in range(count))[::-1]
        # No type takes less than a byte for 8 elements.
        if not all(shape) or math.prod(shape) > 8 * self.size:
            raise self._error(f"has {shown(name)} of shape {shape}, more than the file holds")
        return name, shape, self._number(4), self._number(10)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _ARRAY:
            return self._array(self._number(4), self._number(10), key)
        if kind == _STRING:
            return self._string(self.size)
        return self._number(kind, key)

    def _array(self, kind: int, count: int, key: str) -> list[Any]:
        if kind == _STRING:
            self._require(8 * count, f"{count} texts of {key}")
            return [self._string(self.size) for _ in range(count)]
        if kind == _ARRAY:
            raise self._error(f"has arrays within the array {shown(key)}, which no reader needs")
        dtype = np.dtype(np.uint8 if kind == _BOOL else self._scalar(kind, key)[1])
        first = self._take(dtype.itemsize * count, f"{count} numbers of {key}")
        numbers = np.frombuffer(self.data, dtype.newbyteorder("<"), count, first).tolist()
        return list(map(bool, numbers)) if kind == _BOOL else numbers

    def _number(self, kind: int, key: str = "") -> Any:
        if kind == _BOOL:
            return bool(self.data[self._take(1, key)])
        form, _ = self._scalar(kind, key)
        size = struct.calcsize(form)
        (number,) = struct.unpack_from(f"<{form}", self.data, self._take(size, key))
        # 1e-5 was rounded to 9.999999747e-06 when it was written.
        return float(str(np.float32(number))) if kind == _FLOAT32 else number

    def _string(self, most: int) -> str:
        length = self._number(10)
        if length > most:
            raise self._error(f"has a text of {length} bytes where at most {most} may be")
        first = self._take(length, "a text")
        try:
            return self.data[first : first + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"has a text that is no UTF-8 at byte {first}") from error

    def _scalar(self, kind: int, key: str) -> tuple[str, type]:
        if kind not in _SCALARS:
            raise self._error(f"has a value of the unknown type {kind} for {shown(key)}")
        return _SCALARS[kind]

    def _take(self, size: int, what: str) -> int:
        """Where the next bytes are; moves after them."""
        self._require(size, what)
        self.at += size
        return self.at - size

    def _require(self, size: int, what: str) -> None:
        if size > self.size - self.at:
            raise self._error(f"({self.size} bytes) ends within its header, before {what}")

    def _error(self, rule: str, remedy: str = _AGAIN) -> ValueError:
        return ValueError(f"{self.path} {rule}; {remedy}")


def _padded(size: int, align: int) -> int:
    return -(-size // align) * align


def _not_gguf(start: bytes) -> str:
    """What a file is that does not begin as a GGUF does."""
    if start.startswith(b"version htt"):
        return "is a git-lfs pointer; run `git lfs pull` in its folder"
    return f"is not a GGUF file: it begins with {start[:4]!r}; {_AGAIN}"
