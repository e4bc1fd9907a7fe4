"""Documents from files or the Hugging Face hub, memory-mapped by the ``datasets`` library.

Files of several kinds and rows of several formats may be mixed. What cannot be read is refused with
the file, the row and what to do.
"""

import bisect
import glob
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DataConfig
from .fingerprint import files_digest
from .formats import Fields, Turn, to_turns

LINE = "json_line"
"""The column of a JSON-lines file: rows of different shapes do not fit one Arrow schema, lines
do."""


@dataclass(frozen=True)
class Documents:
    """All documents of a run, one after another, each a list of turns."""

    parts: tuple[tuple[str, Any], ...]
    """Name and rows of every file or data set."""

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(rows) for _, rows in self.parts))

    def __len__(self) -> int:
        """Documents there are."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> list[Turn]:
        """The turns of a document."""
        part = bisect.bisect_right(self._ends, index)
        name, rows = self.parts[part]
        within = index - self._ends[part] + len(rows)
        try:
            return to_turns(_fields(rows[within]))
        except ValueError as error:
            raise ValueError(f"document {within + 1} of {name}: {error}") from error

    def texts(self) -> Iterator[str]:
        """Every document as one text."""
        for index in range(len(self)):
            yield "\n\n".join(turn.content for turn in self[index])


def load_documents(data: DataConfig) -> Documents:
    """The documents of files or a hub data set.

    Raises:
      ValueError: if nothing is there, or it cannot be read.
    """
    import datasets

    datasets.disable_progress_bars()
    names = _expand(data.files) if data.files else [data.hub]
    if not names:
        raise ValueError(f"--config.data.files={data.files!r} names no file")
    load = _load_file if data.files else _load_hub
    return Documents(tuple((name, _load(load, name, data)) for name in names))


def data_digest(data: DataConfig) -> str:
    """A digest of the content of files or hub data, which are not read to their end.

    Raises:
      ValueError: if nothing is there.
    """
    if data.files:
        return files_digest(map(Path, _expand(data.files)))
    if (path := _hub_file(data.hub)) is not None:
        return files_digest([Path(path)])
    # Of the hub's revision and the split.
    return _load(_load_hub, data.hub, data)._fingerprint


def _load(load: Any, name: str, data: DataConfig) -> Any:
    """Rows of a file or data set; every failure becomes one sentence."""
    from datasets.exceptions import DatasetsError

    try:
        rows = load(name, data)
    except (OSError, ValueError, DatasetsError) as error:
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the data of {name} cannot be read ({reason}); files are .jsonl, .json, .parquet or "
            ".txt, hub data sets owner/name or owner/name/file, which need a network or a filled "
            "cache"
        ) from error
    if not len(rows):
        raise ValueError(f"{name} holds no documents; give a file with at least one")
    return rows


def _load_hub(name: str, data: DataConfig) -> Any:
    """A hub data set, or one file of it."""
    from datasets import load_dataset

    path = _hub_file(name)
    return load_dataset(name, split=data.split) if path is None else _load_file(path, data)


def _hub_file(name: str) -> str | None:
    """The local copy of ``owner/name/file``; None for a whole data set."""
    from huggingface_hub import hf_hub_download

    owner, *rest = name.split("/", 2)
    if len(rest) < 2:
        return None
    return hf_hub_download(f"{owner}/{rest[0]}", rest[1], repo_type="dataset")


def _load_file(path: str, data: DataConfig) -> Any:
    """One file as a dataset."""
    from datasets import load_dataset

    def load(builder: str, **options: Any) -> Any:
        return load_dataset(builder, data_files=path, split="train", **options)

    if not Path(path).stat().st_size:
        return []
    match Path(path).suffix:
        case ".jsonl":
            return _without_blanks(load("text").rename_column("text", LINE), LINE)
        case ".json":
            return load("json")
        case ".parquet":
            return load("parquet")
        case ".txt" | ".md" | ".text":
            # Packed, a file is one document; else blank lines separate documents.
            by = "document" if data.pack else "paragraph"
            return _without_blanks(load("text", sample_by=by), "text")
    raise ValueError("the file is of no known kind")


def _without_blanks(rows: Any, column: str) -> Any:
    """The rows whose text is more than white space; reads the memory-mapped column once."""
    import pyarrow.compute as compute

    # pyarrow makes these functions when it is imported, where a type checker does not see them.
    trim: Any = getattr(compute, "utf8_trim_whitespace")  # noqa: B009
    differ: Any = getattr(compute, "not_equal")  # noqa: B009
    filled = differ(trim(rows.data.column(column)), "").to_numpy()
    return rows if filled.all() else rows.select(np.flatnonzero(filled))


def _fields(row: Fields) -> Fields:
    """The fields of a row as it was loaded, its JSON line parsed where it is one."""
    if LINE not in row:
        return row
    try:
        fields = json.loads(row[LINE])
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON ({error}); write one object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the line is a {type(fields).__name__}; write one object a line")
    return fields


def _expand(files: str) -> Sequence[str]:
    """Existing files of comma-separated paths and patterns, in order."""
    found = []
    for pattern in filter(None, (part.strip() for part in files.split(","))):
        matches = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        if not matches:
            raise ValueError(f"no file matches {pattern!r} of --config.data.files")
        found += matches
    return found
