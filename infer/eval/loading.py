"""Rows of a task, from a file or from the hub, and the fields of a row.

A file is JSON lines, Parquet, or a zip archive with a file of the task's name; a folder holds one
of these. No code of a data set is run.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec_jax.checks import first_line, shown

from .tasks import Hub

Row = tuple[str, dict[str, Any]]
"""File and line of a row, and its fields."""
ENDINGS = (".jsonl", ".parquet")
OFFLINE = (
    "download it elsewhere and name the file with --data=FILE, or name a mirror with HF_ENDPOINT"
)
DATASETS = "the datasets package (pip install datasets); JSON lines need nothing: --data=FILE.jsonl"
"""The package that is missing besides the core, and the alternative."""


def rows(task: str, source: Path | Hub) -> list[Row]:
    """All rows of a task.

    Raises:
      OSError: if they cannot be read or fetched.
      ValueError: for a file that cannot be read.
    """
    read = _from_hub(task, source) if isinstance(source, Hub) else _local(task, source)
    found = list(read)
    if not found:
        raise ValueError(f"--task={task}: {source} holds no rows")
    return found


def _local(task: str, path: Path) -> Iterator[Row]:
    if path.is_dir():
        inside = [
            folder / name
            for folder in (path, path / "data")
            for name in (*(f"{task}{ending}" for ending in ENDINGS), "data.zip")
        ]
        found = next(filter(Path.is_file, inside), None)
        if found is None:
            raise FileNotFoundError(
                f"--data={path} holds no {task}.jsonl, {task}.parquet or data.zip; name the file "
                "itself, or the folder that holds it"
            )
        path = found
    if not path.is_file():
        raise FileNotFoundError(f"--data={path}: there is no such file")
    if path.suffix == ".zip":
        yield from _zipped(task, path)
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        yield from json_lines(path.read_bytes(), str(path))


def _zipped(task: str, path: Path) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if Path(name).name == f"{task}.jsonl"]
            if not names:
                raise FileNotFoundError(f"{path} holds no {task}.jsonl; name another archive")
            data = archive.read(names[0])
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} is not a whole zip archive ({error}); download it again"
        ) from None
    yield from json_lines(data, f"{path}:{names[0]}")


def json_lines(data: bytes, where: str) -> Iterator[Row]:
    """The objects of JSON lines, without empty lines.

    Raises:
      ValueError: for a line that is not an object, naming it.
    """
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{place} is not JSON ({error}); correct or remove the line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place} must be an object with named fields; correct the line")
        yield place, row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading Parquet needs {DATASETS}") from None
    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}; download it again") from None
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _from_hub(task: str, hub: Hub) -> Iterator[Row]:
    try:
        if hub.archive is None:
            from datasets import load_dataset

            for number, row in enumerate(load_dataset(hub.dataset, split=hub.split)):
                yield f"{hub.dataset}, row {number}", dict(row)
            return
        from huggingface_hub import hf_hub_download

        archive = hf_hub_download(hub.dataset, hub.archive, repo_type="dataset")
    except ModuleNotFoundError:
        raise ValueError(f"loading {hub.dataset} from the hub needs {DATASETS}") from None
    except Exception as error:  # Both have errors of their own for what is absent or unreachable.
        raise OSError(
            f"{hub.dataset} cannot be loaded from the hub: {first_line(error)[:200]}; {OFFLINE}"
        ) from error
    yield from _zipped(task, Path(archive))


def text_field(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field of a row that must be text with something in it.

    Raises:
      ValueError: if it is missing, no text, or empty.
    """
    if name not in row:
        found = ", ".join(sorted(map(str, row))) or "nothing"
        raise ValueError(
            f"{where} lacks the field {name!r}; it has {found}. Rename the field, or run the "
            "task that this file belongs to"
        )
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name!r} must be text, got {shown(value)}; convert it first")
    if not value.strip():
        raise ValueError(f"{where}: {name!r} is empty; fill it in, or remove the row")
    return value


def references(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """The references of a row; none if it has no such field.

    A field holds one reference or a list of them, each a text or a number.

    Raises:
      ValueError: for anything else.
    """
    value = row.get(name)
    if value is None:
        return ()
    found = []
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if not isinstance(each, str | int | float):
            kind = type(each).__name__
            raise ValueError(
                f"{where}: {name!r} must hold texts, not {kind}; convert it to a string or "
                "a list of strings"
            )
        found.append(str(each))
    return tuple(found)


def sample_name(row: Mapping[str, Any], number: int) -> str:
    """A row's own identifier, or its number in the file, from 0."""
    for key in ("_id", "id"):
        if isinstance(row.get(key), str | int) and str(row[key]).strip():
            return str(row[key])
    return str(number)
