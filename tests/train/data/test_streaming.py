"""A streamed data set becomes the tokens of a downloaded one, and is read once."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

from longspec_jax.sharding import make_mesh
from tests.kit import each_row
from tests.train.tiny import run_of, source_of, write_documents
from train.data import loading
from train.data.documents import BadRows
from train.data.loading import Documents, stream_digest, stream_revision
from train.data.source import Source
from train.data.tokens import EncodedDocuments, read_encoded


def source(target: Path, workdir: Path, **data: Any) -> Source:
    return source_of(run_of(**{"hub": "", "split": "train", **data}), target, workdir)


def local_set(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A data set of two shards, as ``datasets`` finds one in a folder."""
    folder.mkdir()
    half = len(rows) // 2
    for shard, part in enumerate((rows[:half], rows[half:])):
        name = f"train-{shard:05d}-of-00002.parquet"
        datasets.Dataset.from_list(part).to_parquet(str(folder / name))
    return folder


def tokens(made: EncodedDocuments) -> list[Any]:
    return [[(turn.role, turn.ids.tolist()) for turn in made[i]] for i in range(len(made))]


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"why {i}"}, {"role": "assistant", "content": w}]}
        for i, w in enumerate(np.random.default_rng(0).integers(1000, size=count).astype(str))
    ]


def test_a_stream_gives_the_tokens_of_the_files(
    target: Path, tmp_path: Path, datasets_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.data.tokens.SHARE", 3)
    folder = local_set(tmp_path / "set", chats(11))
    streamed = source(target, tmp_path / "one", hub=str(folder), stream=True).prepare()
    assert not any(datasets_cache.glob("**/*.arrow"))  # Nothing was kept.
    loaded = source(target, tmp_path / "three", files=f"{folder}/*.parquet").prepare()
    assert tokens(streamed) == tokens(loaded) and len(loaded) == 11


def test_rows_of_a_stream_are_at_hand_by_number_and_read_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local_set(tmp_path / "set", chats(12))
    made = source(target, tmp_path / "work", hub=str(folder), stream=True)
    rows, held = made.split(made.config.stages[0], make_mesh(1, 1, 1))
    first = [row.tokens.tolist() for row in (rows[index] for index in range(len(rows)))]
    monkeypatch.setattr(loading, "_hub_rows", None)  # From here on the tokens do.
    again = source(target, tmp_path / "work", hub=str(folder), stream=True)
    rows, _ = again.split(again.config.stages[0], make_mesh(1, 1, 1))
    assert [rows[index].tokens.tolist() for index in range(len(rows))] == first and len(first) == 9
    assert again.fingerprint() == made.fingerprint()
    moved = folder.rename(tmp_path / "moved")
    assert source(target, tmp_path / "x", hub=str(moved), stream=True).fingerprint() == (
        made.fingerprint()
    )
    (moved / "more.parquet").write_bytes(b"x")
    assert source(target, tmp_path / "x", hub=str(moved), stream=True).fingerprint() != (
        made.fingerprint()
    )


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_is_streamed_whatever_its_rows_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"rows.{kind}"
    mixed = [{"text": "one\u2028line"}, {"prefix": "a", "suffix": "b"}, {"text": "x"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in mixed).encode()
    if kind == "parquet":
        datasets.Dataset.from_list([mixed[0], mixed[2]]).to_parquet(str(file))
    else:
        file.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    urls = []

    def local(url: str, pack: bool) -> Any:
        urls.append(url)
        return rows_of(str(file), pack)

    rows_of = loading._file_rows
    monkeypatch.setattr(loading, "_file_rows", local)
    data = run_of(hub=f"o/n/deep/rows.{kind}", stream=True).data
    contents = [turns[-1].content for turns in Documents(data, BadRows(0), revision="c0ffee")]
    assert contents == ["one\u2028line", *(["b"] if kind != "parquet" else []), "x"]
    assert urls == [f"hf://datasets/o/n@c0ffee/deep/rows.{kind}"]


def test_a_run_stays_with_the_revision_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked, newest = [], ["first"]

    class Hub:
        def dataset_info(self, name: str) -> Any:
            asked.append(name)
            if not newest:
                raise ConnectionError("no network\nat all")
            return SimpleNamespace(sha=newest[0])

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)

    def of(hub: str) -> Any:
        return run_of(hub=hub, stream=True).data

    assert stream_revision(of("o/n/a.jsonl"), tmp_path) == "first" and asked == ["o/n"]
    newest[0] = "second"
    assert stream_revision(of("o/n/a.jsonl"), tmp_path) == "first" and asked == ["o/n"]
    assert stream_revision(of("o/n/b.jsonl"), tmp_path) == "second"
    assert stream_revision(of("o/n/c.jsonl"), tmp_path) == "second"
    digests = {stream_digest(of(f"o/n/{file}.jsonl"), tmp_path) for file in "abc"}
    assert len(digests) == 3  # Two files of one revision are different data.
    newest.clear()
    with pytest.raises(ValueError, match="does not answer for o/m .no network.; check the name"):
        stream_revision(of("o/m"), tmp_path)


def test_bad_rows_of_a_stream_are_counted(target: Path, tmp_path: Path) -> None:
    folder = local_set(tmp_path / "set", [*chats(3), {"messages": None}, *chats(2)])
    with pytest.raises(ValueError, match="row 4 of .*set: a data row .*max_bad_rows=NUMBER"):
        source(target, tmp_path / "work", hub=str(folder), stream=True).prepare()
    made = source(target, tmp_path / "work", hub=str(folder), stream=True, max_bad_rows=1)
    assert len(made.prepare()) == 5
    assert read_encoded(made.encoded_folder).skipped.startswith("skipped 1 row that cannot be used")


@each_row(
    ("rows", "sentence"),
    [([{"messages": None}] * 2, "set holds no documents"), (None, "the data of .*set cannot be")],
)
def test_streams_without_documents_are_refused(
    rows: Any, sentence: str, target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    if rows:
        local_set(folder, rows)
    else:
        folder.mkdir()
        (folder / "train.parquet").write_bytes(b"nothing")
    made = source(target, tmp_path / "work", hub=str(folder), stream=True, max_bad_rows=9)
    with pytest.raises(ValueError, match=sentence):
        made.prepare()


def test_only_hub_data_are_streamed(tmp_path: Path, target: Path) -> None:
    file = write_documents(tmp_path / "a.jsonl", 3)
    with pytest.raises(ValueError, match="data.stream reads hub data: set --config.data.hub=NAME"):
        source(target, tmp_path / "work", files=str(file), stream=True)
