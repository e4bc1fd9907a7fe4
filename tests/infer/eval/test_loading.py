"""Where rows come from, and how bad rows are reported."""

import json
import sys
import zipfile
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from infer.eval import loading
from infer.eval.loading import references, text_field
from infer.eval.tasks import LONGBENCH, TASKS, Hub

ROWS = [
    {"context": "one \u2028 line", "answers": ["a"], "_id": "x"},
    {"context": "two", "answers": []},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def values(found: list[loading.Row]) -> list[dict]:
    return [row for _, row in found]


def zipped(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/lcc.jsonl", LINES)
    return path


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "lcc.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES + b"\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "a.parquet")
    named = [tmp_path / "lcc.jsonl", tmp_path, zipped(tmp_path / "data.zip")]
    for path in named:
        assert values(loading.rows("lcc", path)) == ROWS
    assert values(loading.rows("lcc", tmp_path / "a.parquet")) == ROWS[:1]
    only = tmp_path / "only"
    only.mkdir()
    zipped(only / "data.zip")
    [(where, _), _] = loading.rows("lcc", only)
    assert where.endswith("data.zip:data/lcc.jsonl, line 1")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2 is not JSON .* correct or remove the line"),
        (b'["a"]\n', "line 1 must be an object with named fields"),
        (b"\xff\xfe\n", "line 1 is not JSON"),
        (b"\n", "holds no rows"),
    ],
)
def test_lines_that_are_no_rows(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "lcc.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words):
        loading.rows("lcc", path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no qmsum.jsonl, qmsum.parquet or data.zip"):
        loading.rows("qmsum", tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no qmsum.jsonl; name another archive"):
        loading.rows("qmsum", zipped(tmp_path / "data.zip"))
    (tmp_path / "torn.zip").write_bytes((tmp_path / "data.zip").read_bytes()[:40])
    with pytest.raises(ValueError, match="not a whole zip archive .* download it again"):
        loading.rows("lcc", tmp_path / "torn.zip")


class TestTheHub:
    """Nothing of a dataset is run, and a message says what to do without a network."""

    def test_an_archive_is_downloaded(self, tmp_path, monkeypatch) -> None:
        asked = []

        def download(dataset: str, name: str, repo_type: str) -> str:
            asked.append((dataset, name, repo_type))
            return str(zipped(tmp_path / name))

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert values(loading.rows("lcc", LONGBENCH)) == ROWS
        assert asked == [("THUDM/LongBench", "data.zip", "dataset")]

    def test_a_dataset_is_loaded_by_its_split(self, monkeypatch) -> None:
        found = []

        def load(dataset: str, split: str) -> list[dict]:
            found.append((dataset, split))
            return ROWS

        monkeypatch.setattr(datasets, "load_dataset", load)
        assert values(loading.rows("aime24", TASKS["aime24"].hub)) == ROWS
        assert found == [("AI-MO/aimo-validation-aime", "train")]

    def test_without_a_network(self, monkeypatch) -> None:
        def offline(*names: str | None, **options: str) -> None:
            raise LocalEntryNotFoundError("offline")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
        monkeypatch.setattr(datasets, "load_dataset", offline)
        for task in ("gov_report", "pg19"):
            with pytest.raises(OSError, match="--data=FILE, or name a mirror with HF_ENDPOINT"):
                loading.rows(task, TASKS[task].hub)


def test_without_the_packages_that_read_them(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in (tmp_path / "a.parquet", Hub("a/b")):
        with pytest.raises(ValueError, match=r"needs the datasets package .* --data=FILE.jsonl"):
            loading.rows("pg19", source)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x", "id": 1}, "a, line 3 lacks the field 'context'; it has id, text"),
        ({"context": " \n"}, "'context' is empty; fill it in"),
        ({"context": 5}, "'context' must be text, got 5"),
    ],
)
def test_fields_that_are_missing_or_empty(row: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        text_field(row, "context", "a, line 3")


def test_answers_of_every_form() -> None:
    assert references({}, "answers", "here") == ()
    assert references({"answer": 42}, "answer", "here") == ("42",)
    assert references({"answers": ["a", 1]}, "answers", "here") == ("a", "1")
    with pytest.raises(ValueError, match="must hold texts, not list"):
        references({"answers": [["a"]]}, "answers", "here")
