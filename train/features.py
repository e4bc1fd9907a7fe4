"""The target's features of all rows of a stage, in files: written once, read by every epoch.

A folder has shards of rows, one after the other. A token is one record, the bytes of all its parts
side by side. Padding is not stored. With every shard ``NUMBER.bin`` lies ``NUMBER.json`` with the
checksum of every row, written when the shard is there; so a writer that was killed goes on after
its last whole shard. ``features.json`` names the folder's target, data and kind.
"""

import contextlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longspec_jax import cli, files

from .fingerprint import Fingerprint, differences

SHARD = 1 << 28
"""Bytes of a shard of full rows, about."""
PREPARE = cli.command_name(__package__, "prepare")
AGAIN = f"run the same {PREPARE} again"


@dataclass(frozen=True)
class Part:
    """One array of a token."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of a token's features."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _described(file: Path, *keys: str) -> dict[str, Any]:
    """What a file next to the features says.

    Raises:
      ValueError: if it is damaged.
    """
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(file.read_bytes())
        if isinstance(found, dict) and {*keys} <= found.keys():
            return found
    raise ValueError(f"{file} is damaged; delete this file and {AGAIN}")


@dataclass(frozen=True, eq=False)
class Features:
    """A folder of features of rows.

    Args of its methods are numbers of rows, counted as the stage's source of rows does.
    """

    folder: Path
    parts: tuple[Part, ...]
    lengths: np.ndarray
    """Tokens in front of the padding of every row."""
    shard_rows: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's record."""
        return sum(part.bytes for part in self.parts)

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-len(self.lengths) // self.shard_rows)

    def rows_of(self, shard: int) -> np.ndarray:
        """Numbers of the rows of a shard."""
        first = shard * self.shard_rows
        return np.arange(first, min(first + self.shard_rows, len(self.lengths)))

    def is_whole(self, shard: int) -> bool:
        """Whether a shard and its checksums are there, of the right size."""
        binary, about = self._paths(shard)
        size = int(self._starts[shard * self.shard_rows + len(self.rows_of(shard))])
        size -= int(self._starts[shard * self.shard_rows])
        return about.is_file() and binary.is_file() and binary.stat().st_size == size

    def write(self, shard: int, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write a shard.

        Args:
          shard: its number.
          rows: the parts of each of its rows, ``[T, ...]``, without padding.
        """
        binary, about = self._paths(shard)
        checksums = []
        with files.replacing(binary) as unfinished, unfinished.open("wb") as file:
            for row in rows:
                flat = (np.ascontiguousarray(row[part.name]) for part in self.parts)
                records = [each.reshape(len(each), -1).view(np.uint8) for each in flat]
                content = np.concatenate(records, axis=1).tobytes()
                checksums.append(zlib.crc32(content))
                file.write(content)
        files.replace(about, json.dumps({"crc32": checksums}).encode())

    def read(self, rows: Sequence[int], length: int) -> dict[str, np.ndarray]:
        """Every part of some rows, ``[rows, length, ...]``; 0 after a row's end.

        Raises:
          ValueError: if a row is damaged.
        """
        records = np.zeros((len(rows), length, self.token_bytes), np.uint8)
        for place, row in zip(records, rows, strict=True):
            stored = self._record(int(row))[:length]
            place[: len(stored)] = stored
        found, start = {}, 0
        for part in self.parts:
            cut = np.ascontiguousarray(records[:, :, start : start + part.bytes])
            found[part.name] = cut.view(_dtype(part.dtype)).reshape(*cut.shape[:2], *part.shape)
            start += part.bytes
        return found

    def _record(self, row: int) -> np.ndarray:
        """The bytes of a row, ``[T, token_bytes]``, checked."""
        shard = row // self.shard_rows
        binary, about = self._paths(shard)
        first = self._starts[shard * self.shard_rows]
        at, size = int(self._starts[row] - first), int(self._starts[row + 1] - self._starts[row])
        content = np.fromfile(binary, np.uint8, size, offset=at)
        checksums = _described(about, "crc32")["crc32"][row % self.shard_rows :]
        if len(content) != size or [zlib.crc32(content.tobytes())] != checksums[:1]:
            raise ValueError(f"{binary}: row {row} is damaged; delete this file and {AGAIN}")
        return content.reshape(-1, self.token_bytes)

    @cached_property
    def _starts(self) -> np.ndarray:
        """Bytes of all rows before each, ``[rows + 1]``."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]) * self.token_bytes

    def _paths(self, shard: int) -> tuple[Path, Path]:
        return self.folder / f"{shard:05}.bin", self.folder / f"{shard:05}.json"


def create(
    folder: Path,
    about: Fingerprint,
    parts: Sequence[Part],
    lengths: np.ndarray,
    *,
    together: int,
    longest: int,
) -> Features:
    """A folder to write to, new or begun.

    Args:
      folder: made if absent.
      about: of what its features are.
      parts: what a token's record is made of.
      lengths: tokens of every row.
      together: rows that are computed at once; a shard has a multiple of them.
      longest: tokens of the longest row.

    Raises:
      ValueError: if the folder has features of something else; names what differs.
    """
    token = sum(part.bytes for part in parts)
    shard_rows = together * max(1, SHARD // (token * longest * together))
    layout = [[part.name, part.dtype, list(part.shape)] for part in parts]
    described = {"about": about, "parts": layout, "shard_rows": shard_rows}
    file = folder / "features.json"
    if file.is_file():
        saved = _described(file, *described)
        changes = differences({**saved["about"], **saved}, {**about, **described})
        if changes:
            raise ValueError(f"{folder} has features of something else: {changes}; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(file, json.dumps(described, indent=1).encode())
    return Features(folder, tuple(parts), lengths, shard_rows)


def open_features(folder: Path, about: Fingerprint, lengths: np.ndarray) -> Features:
    """The features of a stage, complete.

    Args:
      folder: of the stage.
      about: of what they must be.
      lengths: tokens of every row.

    Raises:
      FileNotFoundError: if there are none.
      ValueError: if they are of another target, data or kind (names both), or incomplete.
    """
    file = folder / "features.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no features; {PREPARE} with the same configuration stores "
            "them, and --config.features.folder='' trains without"
        )
    saved = _described(file, "about", "parts", "shard_rows")
    if changes := differences(saved["about"], about):
        raise ValueError(
            f"{folder} has features of something else: {changes}; restore what changed, or choose "
            "another --config.features.folder"
        )
    parts = (Part(name, dtype, tuple(shape)) for name, dtype, shape in saved["parts"])
    found = Features(folder, tuple(parts), lengths, saved["shard_rows"])
    if missing := [shard for shard in range(found.shards) if not found.is_whole(shard)]:
        raise ValueError(
            f"{folder} is incomplete: {len(missing)} of {found.shards} shards are missing or cut, "
            f"the first is {missing[0]:05}.bin; {AGAIN}"
        )
    return found
