"""Documents from files or the Hugging Face hub, read one by one and never held whole.

Files of several kinds and rows of several formats may be mixed. All rows are checked once, when
they are loaded: what cannot be used is refused, or skipped within a budget, with the file, the line
and what was expected. JSON lines are read in place, because lines are not columns of a table and
rows of different shapes may be mixed; the ``datasets`` library reads everything else. Files packed
by gzip or zstd are unpacked once, so that any row can be read.
"""

import bisect
import contextlib
import glob
import importlib.util
import itertools
import json
import mmap
import shutil
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longspec_jax import files
from longspec_jax.checks import shown

from ..config import DataConfig
from ..fingerprint import content_digest, files_digest
from ..processes import reason_of
from .documents import FIELDS, PLAIN, BadRows, Fields, Format, Turn, to_turns

CODECS = {".gz": "gzip", ".zst": "zstd"}


class Fieldsets(Protocol):
    """Rows as their fields, by number."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> Fields: ...  # noqa: D105


@dataclass(frozen=True)
class Documents:
    """All documents of a run, one after another, each a list of turns."""

    parts: tuple[Fieldsets, ...]
    """Sound rows of every file or data set."""
    skipped: str = ""
    """What was left out, in one sentence; empty if nothing was."""
    read: Format = to_turns
    """The turns of a row."""

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        """Documents there are."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> list[Turn]:
        """The turns of a document."""
        part = bisect.bisect_right(self._ends, index)
        rows = self.parts[part]
        return self.read(rows[index - self._ends[part] + len(rows)])

    def __iter__(self) -> Iterator[list[Turn]]:
        """The turns of every document."""
        return map(self.__getitem__, range(len(self)))

    def texts(self) -> Iterator[str]:
        """Every document as one text."""
        for turns in self:
            yield "\n\n".join(turn.content for turn in turns)


def load_documents(
    data: DataConfig,
    read: Format = to_turns,
    bad: BadRows | None = None,
) -> Documents:
    """The documents of files or a hub data set, every one of them checked.

    Args:
      data: where they are.
      read: the turns of a row; raises ValueError for one that cannot be used.
      bad: takes note of those; by the data's own budget if absent.

    Raises:
      ValueError: if nothing is there, it cannot be read, or more rows than may be skipped are bad.
    """
    bad = bad or BadRows(data.max_bad_rows)
    check = _Check(read, bad)
    if data.files:
        parts = [check.sound(_load(_load_file, name, data), name) for name in expand(data.files)]
        if not parts:
            raise ValueError(f"files={data.files!r} names no file")
    else:
        parts = [check.sound(_load(_load_hub, data.hub, data), data.hub)]
    return Documents(tuple(parts), bad.summary(), read)


def data_digest(data: DataConfig) -> str:
    """A digest of the content of files or hub data, which are not read to their end.

    Raises:
      ValueError: if nothing is there.
    """
    if data.files:
        return files_digest(map(Path, expand(data.files)))
    return _load(_hub_digest, data.hub, data)


def _load(load: Any, name: str, data: DataConfig) -> Any:
    """Rows of a file or data set."""
    with readable(name):
        return load(name, data)


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Make one sentence of every failure to read files or a data set.

    Raises:
      ValueError: names what could not be read, and why.
    """
    try:
        yield
    except _unreadable() as error:
        reason = reason_of(error.__cause__ or error)
        raise ValueError(
            f"the data of {name} cannot be read ({reason}); files are .jsonl, .json, .parquet or "
            ".txt, packed by gzip or zstd or not, hub data sets owner/name or owner/name/file, "
            "which need a network or a filled cache"
        ) from error


def _unreadable() -> tuple[type[Exception], ...]:
    """What data that cannot be read raise; ``datasets`` is not needed to read JSON lines."""
    if importlib.util.find_spec("datasets") is None:
        return OSError, ValueError
    from datasets.exceptions import DatasetsError

    return OSError, ValueError, DatasetsError


def _load_hub(name: str, data: DataConfig) -> Any:
    """A hub data set, or one file of it."""
    from datasets import disable_progress_bars, load_dataset

    path = _hub_file(name)
    disable_progress_bars()
    return load_dataset(name, split=data.split) if path is None else _load_file(path, data)


def _hub_file(name: str) -> str | None:
    """The local copy of ``owner/name/file``; None for a whole data set."""
    from huggingface_hub import hf_hub_download

    owner, *rest = name.split("/", 2)
    if len(rest) < 2:
        return None
    return hf_hub_download(f"{owner}/{rest[0]}", rest[1], repo_type="dataset")


def _hub_digest(name: str, data: DataConfig) -> str:
    """A digest of the content of a file, or of the revision and split of a data set."""
    from datasets import load_dataset

    path = _hub_file(name)
    if path is None:
        return load_dataset(name, split=data.split)._fingerprint
    return files_digest([Path(path)])


def _load_file(name: str, data: DataConfig) -> Any:
    """One file as a table, or as the path of its lines."""
    path = unpacked(Path(name))

    def load(builder: str, **options: Any) -> Any:
        from datasets import disable_progress_bars, load_dataset

        disable_progress_bars()
        return load_dataset(builder, data_files=str(path), split="train", **options)

    if not path.stat().st_size:
        return []
    match path.suffix:
        case ".jsonl":
            return path
        case ".json":
            return load("json")
        case ".parquet":
            return load("parquet")
        case ".txt" | ".md" | ".text":
            # Packed, a file is one document; else blank lines separate documents.
            return _without_blanks(load("text", sample_by="document" if data.pack else "paragraph"))
    raise ValueError("the file is of no known kind")


def _without_blanks(rows: Any) -> Any:
    """The rows whose text is more than white space; reads the memory-mapped column once."""
    import pyarrow.compute as compute

    # pyarrow makes these functions when it is imported, where a type checker does not see them.
    trim: Any = getattr(compute, "utf8_trim_whitespace")  # noqa: B009
    differ: Any = getattr(compute, "not_equal")  # noqa: B009
    filled = differ(trim(rows.data.column("text")), "").to_numpy()
    return rows if filled.all() else rows.select(np.flatnonzero(filled))


@dataclass(frozen=True)
class _Check:
    """How rows are checked."""

    read: Format
    bad: BadRows

    def sound(self, loaded: Any, name: str) -> Fieldsets:
        """The rows that are documents, all of which are checked."""
        before = self.bad.count
        if isinstance(loaded, Path):
            rows = read_json_lines(loaded, name, self.bad, self.read)
        else:
            rows = self._table(loaded, name)
        if not len(rows):
            count = self.bad.count - before
            skipped = f" but {count} that were skipped" * bool(count)
            raise ValueError(f"{name} holds no documents{skipped}; give a file with at least one")
        return rows

    def _table(self, rows: Any, name: str) -> Fieldsets:
        """The rows of a table that are documents."""
        if self.read is to_turns and _is_text(rows):
            return rows
        sound = np.ones(len(rows), bool)
        for index, row in enumerate(rows):
            try:
                self.read(row)
            except ValueError as error:
                self.bad.add(f"row {index + 1} of {name}", error)
                sound[index] = False
        return rows if sound.all() else rows.select(np.flatnonzero(sound))


def _is_text(rows: Any) -> bool:
    """Whether a table's columns alone say that every row is plain text."""
    known = FIELDS.intersection(rows.column_names) if len(rows) else frozenset()
    if known not in {frozenset({field}) for field in PLAIN}:
        return False
    column = rows.data.column(*known)
    return str(column.type) in ("string", "large_string") and not column.null_count


def expand(files: str) -> Sequence[str]:
    """Existing files of comma-separated paths and patterns, in order."""
    found = []
    for pattern in filter(None, (part.strip() for part in files.split(","))):
        matches = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        if not matches:
            raise ValueError(f"no file matches {pattern!r}; name files that exist")
        found += matches
    return found


@dataclass(frozen=True, eq=False)
class JsonLines:
    """The lines of a file that hold documents."""

    path: Path
    starts: np.ndarray
    """Byte at which every one of them begins, int64."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the file for itself."""
        return JsonLines, (self.path, self.starts)

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.starts)

    def __getitem__(self, index: int) -> Fields:
        """The fields of a document."""
        start = int(self.starts[index])
        end = self._bytes.find(b"\n", start)
        return parse(self._bytes[start : None if end < 0 else end])


def read_json_lines(path: Path, name: str, bad: BadRows, read: Format = to_turns) -> JsonLines:
    """Look at every line of a file once; blank ones are passed over.

    Args:
      path: the file.
      name: what it is called where a line is wrong.
      bad: takes note of lines that hold no document.
      read: the turns of a line's fields; raises ValueError for one that holds none.

    Raises:
      ValueError: if there are too many of those.
    """
    starts, at = array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                try:
                    read(parse(line))
                    starts.append(at)
                except ValueError as error:
                    bad.add(f"line {number} of {name}", error)
            at += len(line)
    return JsonLines(path, np.asarray(starts, np.int64))


def parse(line: bytes) -> Fields:
    """The fields of a line.

    Raises:
      ValueError: if it is not one JSON object.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the line is not JSON ({error.msg} at character {error.pos + 1}); write one object a "
            "line"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 text ({error.reason})") from error
    except RecursionError as error:
        raise ValueError("the line nests too deeply; write one flat object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the line must be one JSON object, got {shown(fields)}")
    return fields


def unpacked(path: Path) -> Path:
    """A file as it is, or what a packed one holds, kept in the cache of the data sets.

    Raises:
      OSError, ValueError: if it is damaged.
    """
    codec = CODECS.get(path.suffix)
    if codec is None:
        return path
    import pyarrow
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE) / "unpacked"
    kept = folder / f"{content_digest(path)[:32]}{path.with_suffix('').suffix}"
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with pyarrow.input_stream(str(path), compression=codec) as packed:
            with files.replacing(kept) as unfinished, unfinished.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    return kept
