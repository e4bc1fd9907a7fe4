"""A hub data set as a stream: read once, in its order, in constant memory, nothing of it kept.

Training checks every row before its first step, reads rows by number afterwards, and by the same
numbers when it is resumed. A stream has none of this, and a shuffle of a few thousand rows at a
time where the others have one of all. The stream therefore ends in the tokens on disk that
:mod:`.tokens` writes, two or four bytes a token; from there on nothing differs. One that is
interrupted is read anew.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from longspec_jax import files

from ..config import DataConfig
from ..fingerprint import files_digest, fingerprint
from ..processes import reason_of
from .documents import BadRows, Fields, Turn, to_turns
from .loading import CODECS, parse, readable


@dataclass
class Stream:
    """The documents of a hub data set, one after another; bad rows are noted as they are met."""

    data: DataConfig
    revision: str | None
    """As :func:`stream_revision` gives it."""
    bad: BadRows

    def __iter__(self) -> Iterator[list[Turn]]:
        """The turns of every document.

        Raises:
          ValueError: if there is no document, it cannot be read, or too many rows are bad.
        """
        name, sound = self.data.hub, 0
        for number, row in enumerate(_rows(self.data, self.revision), 1):
            try:
                turns = to_turns(parse(row) if isinstance(row, bytes) else row)
            except ValueError as error:
                self.bad.add(f"row {number} of {name}", error)
                continue
            sound += 1
            yield turns
        if not sound:
            raise ValueError(f"{name} holds no documents; name a data set with at least one")


def stream_revision(data: DataConfig, workdir: Path) -> str:
    """The commit of the hub data set that a run reads: the newest when it began.

    It is kept in the working folder, so that a resumed run, and one that finds tokens made
    before, needs no network and never meets other data. Of a folder on this machine it is a digest.

    Raises:
      ValueError: if the hub does not answer.
    """
    folder = Path(data.hub).expanduser()
    if folder.is_dir():
        return files_digest(sorted(path for path in folder.rglob("*") if path.is_file()))
    kept = workdir / f"stream-{fingerprint({'hub': data.hub, 'split': data.split})}.json"
    if not kept.is_file():
        revision = _newest(data.hub)
        about = {"hub": data.hub, "split": data.split, "revision": revision}
        files.replace(kept, f"{json.dumps(about, indent=1)}\n".encode())
    return json.loads(kept.read_text())["revision"]


def stream_digest(data: DataConfig, workdir: Path) -> str:
    """A digest of what is streamed, of which nothing is read for it."""
    revision = stream_revision(data, workdir)
    local = Path(data.hub).expanduser().is_dir()  # A folder that is moved is the same data.
    return fingerprint({"revision": revision, "of": "" if local else data.hub})


def _newest(name: str) -> str:
    """The newest commit of a data set, or of the one that a file is of."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(_repository(name)[0]).sha
    except Exception as error:  # Networks fail in many ways.
        reason = reason_of(error)
        raise ValueError(
            f"the hub does not answer for {name} ({reason}); check the name and the network, or "
            "prepare the tokens where there is one and copy the working folder"
        ) from error
    if found is None:
        raise ValueError(f"the hub names no commit of {name}; download it and name its files")
    return found


def _repository(name: str) -> tuple[str, str | None]:
    """``owner/name`` and the file behind it, if there is one."""
    owner, *rest = name.split("/", 2)
    return "/".join([owner, *rest[:1]]), rest[1] if len(rest) > 1 else None


def _rows(data: DataConfig, revision: str | None) -> Iterator[Fields | bytes]:
    """Rows in their order: fields, or the lines of a JSON-lines file."""
    from datasets import load_dataset

    folder = Path(data.hub).expanduser()
    repository, file = (str(folder), None) if folder.is_dir() else _repository(data.hub)
    with readable(data.hub):
        if file is None:
            pinned = None if folder.is_dir() else revision
            yield from load_dataset(repository, split=data.split, revision=pinned, streaming=True)
        else:
            yield from _file_rows(f"hf://datasets/{repository}@{revision}/{file}")


def _file_rows(url: str) -> Iterator[Fields | bytes]:
    """Rows of one file."""
    from datasets import load_dataset

    name = PurePosixPath(url)
    codec = CODECS.get(name.suffix)
    kind = (name.with_suffix("") if codec else name).suffix
    if kind == ".jsonl":
        yield from _lines(url, codec)
    elif kind in (".json", ".parquet"):
        builder = kind.removeprefix(".")
        yield from load_dataset(builder, data_files=url, split="train", streaming=True)
    else:
        raise ValueError("the file is of no kind that can be streamed: .jsonl, .json or .parquet")


def _lines(url: str, codec: str | None) -> Iterator[bytes]:
    """The lines of a file, without the blank ones; ``datasets`` would take them for a table."""
    import fsspec
    import pyarrow

    with fsspec.open(url, "rb") as file:
        if codec is not None:
            file = io.BufferedReader(pyarrow.CompressedInputStream(file, codec), 1 << 20)
        yield from (line for line in file if not line.isspace())
