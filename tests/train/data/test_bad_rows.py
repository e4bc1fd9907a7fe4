"""Bad rows are found when data are read, named truly, refused or skipped within a budget."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest

from longspec_jax.recipes import base_config
from tests.kit import each_row
from tests.train.tiny import arguments, write_documents
from train.config import DataConfig
from train.data.documents import BadRows
from train.data.loading import Documents


def load(files: Path | str, max_bad_rows: int = 0, turn: int = 0) -> tuple[list[str], str]:
    """What a turn of every document says, and the sentence about skipped rows."""
    data = DataConfig(**{**base_config().data.to_dict(), "files": str(files)})
    bad = BadRows(max_bad_rows)
    return [turns[turn].content for turns in Documents(data, bad)], bad.summary()


GOOD = json.dumps({"text": "good"})
BAD = {
    "not JSON": (b'{"text": ', "the line is not JSON .Expecting value at character 11"),
    "a list": (b"[1]", r"the line must be one JSON object, got \[1\]"),
    "no format": (b'{"body": "x"}', "a data row has the fields .'body'.; known formats"),
    "a number": (b'{"text": 5}', "text holds a value of type int where text belongs"),
    "no turns": (b'{"messages": []}', "messages holds no turns"),
    "not UTF-8": (b'{"text": "\xff"}', "the line is not UTF-8 text"),
    "half a pair": (b'{"text": "\\ud800"}', "text holds half a surrogate pair"),
    "deep": (b'{"text": ' + b"[" * 100_000, "the line nests too deeply"),
}


@each_row("kind", BAD)
def test_the_line_of_the_file_is_named_blank_ones_counted(kind: str, tmp_path: Path) -> None:
    line, sentence = BAD[kind]
    file = tmp_path / "a.jsonl"
    lines = [GOOD.encode(), b"", b"  ", GOOD.encode(), b"\r", line, GOOD.encode()]
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=rf"^line 6 of .*a.jsonl: {sentence}") as caught:
        load(file)
    assert "--config.data.max_bad_rows=NUMBER" in str(caught.value)
    documents, skipped = load(file, max_bad_rows=1)
    assert documents == ["good"] * 3
    assert skipped.startswith("skipped 1 row that cannot be used, the first is line 6 of")


def test_the_budget_is_of_all_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f"{GOOD}\n5\n{GOOD}\n")
    documents, skipped = load(tmp_path / "*.jsonl", max_bad_rows=2)
    assert documents == ["good"] * 4
    assert skipped.startswith("skipped 2 rows that cannot be used, the first is line 2 ")
    with pytest.raises(ValueError, match="max_bad_rows=1 .*the first is line 2 of .*a.jsonl: "):
        load(tmp_path / "*.jsonl", max_bad_rows=1)
    (tmp_path / "a.jsonl").write_text("5\n6\n")
    with pytest.raises(ValueError, match="a.jsonl holds no documents but 2 that were skipped"):
        load(tmp_path / "a.jsonl", max_bad_rows=2)
    assert load(tmp_path / "b.jsonl", max_bad_rows=9)[1]
    (tmp_path / "b.jsonl").write_text(f"{GOOD}\n")
    assert not load(tmp_path / "b.jsonl", max_bad_rows=9)[1]


def test_rows_of_tables_are_looked_at_too(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "qwq": "q"},
        {"problem": None, "qwq": "q"},
        {"problem": "r", "qwq": ""},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "c.parquet"))
    with pytest.raises(ValueError, match="row 2 of .*c.parquet: a data row has the fields"):
        load(tmp_path / "c.parquet")
    assert load(tmp_path / "c.parquet", max_bad_rows=1, turn=1)[0] == ["p", "r"]
    datasets.Dataset.from_list([{"text": "x"}, {"text": None}]).to_parquet(
        str(tmp_path / "d.parquet")
    )
    with pytest.raises(ValueError, match="row 2 of .*d.parquet"):
        load(tmp_path / "d.parquet")


def test_packed_files_are_read_anew_when_their_content_changes(tmp_path: Path) -> None:
    text = f"{GOOD}\n\n" * 3
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pyarrow.output_stream(str(tmp_path / "b.jsonl.zst"), compression="zstd") as file:
        file.write(text.encode())
    assert load(tmp_path / "*.jsonl.*")[0] == ["good"] * 6
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "new"}\n\n5'))
    with pytest.raises(
        ValueError, match="line 3 of .*a.jsonl.gz: the line must be one JSON object, got "
    ):
        load(tmp_path / "a.jsonl.gz")
    assert load(tmp_path / "a.jsonl.gz", max_bad_rows=1)[0] == ["new"]


@each_row("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_damaged_packed_file_is_refused(name: str, tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"{x}"}) for x in np.random.default_rng(0).integers(9**9, size=99))
    codec = {"gz": "gzip", "zst": "zstd"}[name.rsplit(".")[-1]]
    with pyarrow.output_stream(str(tmp_path / name), compression=codec) as file:
        file.write("\n".join(lines).encode())
    whole = (tmp_path / name).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nothing packed at all"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"the data of .*{name} cannot be read"):
            load(tmp_path / name)


def test_a_run_refuses_a_bad_row_before_its_first_step(
    target: Path, tmp_path: Path, refused: Any
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 38)
    files.write_text("\n\n" + files.read_text() + '{"text": \n')
    error = refused(*arguments(target, files, tmp_path / "work")).splitlines()[-1]
    assert error.startswith(f"error: line 41 of {files}: the line is not JSON")
    assert error.endswith("--config.data.max_bad_rows=NUMBER")
    assert not (tmp_path / "work" / "metrics.jsonl").read_text()
