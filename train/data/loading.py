"""Documents from files or the Hugging Face hub, read row by row.

Files of several kinds and rows of several formats may be mixed, and files may be packed by gzip or
zstd. A row that holds no document is refused, or skipped within a budget, with the file, the line
and what was expected. Rows are read once, into the tokens on disk that :mod:`.tokens` writes;
training reads those. With the option ``stream`` hub data need no place on this machine's disk:
nothing of them is kept but the tokens.
"""

import codecs
import contextlib
import glob
import importlib
import importlib.util
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from longspec_jax import files
from longspec_jax.checks import first_line, shown
from longspec_jax.extras import missing_extra

from ..config import DataConfig
from ..fingerprint import files_digest, fingerprint
from .documents import BadRows, Fields, Format, Turn, to_turns

CODECS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Documents:
    """All documents of files or hub data, one after another, each a list of turns."""

    data: DataConfig
    bad: BadRows
    """Counts the rows that hold no document."""
    read: Format = to_turns
    """The turns of a row; raises ValueError for one that holds none."""
    revision: str | None = None
    """Of streamed hub data, as :func:`stream_revision` gives it."""

    def __iter__(self) -> Iterator[list[Turn]]:
        """Read all rows, anew in every iteration.

        Raises:
          ValueError: if a file or data set cannot be read or holds no document, or more rows than
            may be skipped are bad.
        """
        for name in expand(self.data.files) if self.data.files else [self.data.hub]:
            before, found = self.bad.count, False
            for number, row in self._rows(name):
                try:
                    turns = self.read(parse(row))
                except ValueError as error:
                    kind = "line" if isinstance(row, bytes) else "row"
                    self.bad.add(f"{kind} {number} of {name}", error)
                    continue
                found = True
                yield turns
            if not found:
                count = self.bad.count - before
                skipped = f" but {count} that were skipped" * bool(count)
                raise ValueError(f"{name} holds no documents{skipped}; name data with at least one")

    def _rows(self, name: str) -> Iterator[tuple[int, Any]]:
        """Rows with their numbers, from 1."""
        with _readable(name):
            if self.data.files:
                yield from _file_rows(name, self.data.pack)
            else:
                yield from _hub_rows(self.data, self.revision)

    def texts(self) -> Iterator[str]:
        """Every document as one text."""
        return ("\n\n".join(turn.content for turn in turns) for turns in self)


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Make one sentence of every failure to read files or a data set.

    Raises:
      ValueError: names what could not be read, and why.
    """
    try:
        yield
    except _unreadable() as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(
            f"the data of {name} cannot be read ({reason}); files are .jsonl, .json or .txt, "
            "packed by gzip or zstd or not, and .parquet; hub data sets, owner/name or "
            "owner/name/file, need a network or a filled cache"
        ) from error


def _unreadable() -> tuple[type[Exception], ...]:
    """What data that cannot be read raise; ``datasets`` is not needed to read files."""
    if importlib.util.find_spec("datasets") is None:
        return OSError, ValueError, RecursionError
    from datasets.exceptions import DatasetsError

    return OSError, ValueError, RecursionError, DatasetsError


def _installed(name: str) -> Any:
    """A module that only some data need.

    Raises:
      ValueError: says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(missing_extra(error) or str(error)) from None


def expand(files: str) -> list[str]:
    """Existing files of comma-separated paths and patterns, in order."""
    found = []
    for pattern in filter(None, (part.strip() for part in files.split(","))):
        matches = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        if not matches:
            raise ValueError(f"no file matches {pattern!r}; name files that exist")
        found += matches
    if files and not found:
        raise ValueError(f"files={files!r} names no file")
    return found


def check_no_input(out: Path, names: str) -> None:
    """Refuse to write where rows are read; names as in :func:`expand`.

    Raises:
      ValueError: names the file.
    """
    for one in map(Path, expand(names)):
        if out.resolve() == one.resolve() or (out.exists() and out.samefile(one)):
            raise ValueError(f"--out={out} is one of the --files; name another file")


# Rows of one file or data set.


def _file_rows(url: str, pack: bool) -> Iterator[tuple[int, Any]]:
    """Rows of a file on this machine or the hub; lines as bytes, others as their fields.

    A text file is one document to ``pack``; otherwise blank lines separate its documents.
    """
    name = PurePosixPath(url)
    codec = CODECS.get(name.suffix)
    kind = (name.with_suffix("") if codec else name).suffix
    with _opened(url) as file:
        if codec is not None:
            pyarrow = _installed("pyarrow")
            file = io.BufferedReader(pyarrow.CompressedInputStream(file, codec), 1 << 20)
        match kind:
            case ".jsonl":
                yield from _lines(file)
            case ".json":
                yield from _json_rows(file)
            case ".parquet":
                yield from enumerate(_parquet_rows(file), 1)
            case ".txt" | ".md" | ".text":
                texts = [file.read().decode()] if pack else _paragraphs(file)
                yield from enumerate(({"text": text} for text in texts if text.strip()), 1)
            case _:
                raise ValueError("the file is of no known kind")


def _opened(url: str) -> Any:
    """A file's bytes."""
    if not url.startswith("hf://"):
        return Path(url).open("rb")
    import fsspec

    return fsspec.open(url, "rb")


def _lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers; blank ones only count."""
    return ((number, line) for number, line in enumerate(file, 1) if not line.isspace())


def _json_rows(file: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array, which is held whole, or the lines of a file that holds none."""
    lines = _lines(file)
    first = list(itertools.islice(lines, 1))
    # Editors of Windows write a byte order mark.
    if first and first[0][1].removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return enumerate(json.loads(first[0][1] + b"".join(line for _, line in lines)), 1)
    return itertools.chain(first, lines)


def _parquet_rows(file: IO[bytes]) -> Iterator[Fields]:
    for batch in _installed("pyarrow.parquet").ParquetFile(file).iter_batches(1024):
        yield from batch.to_pylist()


def _paragraphs(file: Iterable[bytes]) -> Iterator[str]:
    for blank, lines in itertools.groupby(file, bytes.isspace):
        if not blank:
            yield b"".join(lines).decode().rstrip("\r\n")


def _hub_rows(data: DataConfig, revision: str | None) -> Iterator[tuple[int, Any]]:
    """Rows of a hub data set or of one file of it, downloaded first unless they are streamed."""
    folder = Path(data.hub).expanduser()
    repository, file = (str(folder), None) if folder.is_dir() else _repository(data.hub)
    if file is not None:
        if data.stream:
            return _file_rows(f"hf://datasets/{repository}@{revision}/{file}", data.pack)
        return _file_rows(_downloaded(repository, file), data.pack)
    datasets = _installed("datasets")
    datasets.disable_progress_bars()
    pinned = None if folder.is_dir() else revision
    rows = datasets.load_dataset(
        repository, split=data.split, revision=pinned, streaming=data.stream
    )
    return enumerate(rows, 1)


def _repository(name: str) -> tuple[str, str | None]:
    """``owner/name`` and the file after it, if there is one."""
    owner, *rest = name.split("/", 2)
    return "/".join([owner, *rest[:1]]), rest[1] if len(rest) > 1 else None


def _downloaded(repository: str, file: str) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(repository, file, repo_type="dataset")


def parse(row: object) -> Fields:
    """The fields of a line, or of a row that another format gave.

    Raises:
      ValueError: if it is not one JSON object.
    """
    fields = row
    if isinstance(row, bytes):
        try:
            fields = json.loads(row)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"the line is not JSON ({error.msg} at character {error.pos + 1}); write one "
                "object a line"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"the line is not UTF-8 text ({error.reason})") from error
        except RecursionError as error:
            raise ValueError("the line nests too deeply; write one flat object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the line must be one JSON object, got {shown(fields)}")
    return fields


# What the data are: digests and revisions, for which no row is read.


def data_digest(data: DataConfig) -> str:
    """A digest of the content of files, or of the revision and split of a hub data set.

    Raises:
      ValueError: if nothing is there.
    """
    if data.files:
        return files_digest(map(Path, expand(data.files)))
    with _readable(data.hub):
        repository, file = _repository(data.hub)
        if file is not None:
            return files_digest([Path(_downloaded(repository, file))])
        return _installed("datasets").load_dataset(data.hub, split=data.split)._fingerprint


def stream_digest(data: DataConfig, workdir: Path) -> str:
    """A digest of what is streamed."""
    revision = stream_revision(data, workdir)
    local = Path(data.hub).expanduser().is_dir()  # A folder that is moved is the same data.
    return fingerprint({"revision": revision, "of": "" if local else data.hub})


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
        about = {"hub": data.hub, "split": data.split, "revision": _newest(data.hub)}
        files.replace(kept, f"{json.dumps(about, indent=1)}\n".encode())
    return json.loads(kept.read_text())["revision"]


def _newest(name: str) -> str:
    """The newest commit of a data set, or of the one that a file is of."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(_repository(name)[0]).sha
    except Exception as error:  # Networks fail in many ways.
        reason = first_line(error)
        raise ValueError(
            f"the hub does not answer for {name} ({reason}); check the name and the network, or "
            "prepare the tokens where there is one and copy the working folder"
        ) from error
    if found is None:
        raise ValueError(f"the hub names no commit of {name}; download it and name its files")
    return found
