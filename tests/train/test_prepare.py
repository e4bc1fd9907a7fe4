"""Tokens made beforehand are those that training makes by itself."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from longspec_jax.sharding import make_mesh
from tests.train.tiny import ROOT, arguments, write_documents
from train import prepare
from train.arguments import parse
from train.data import corpus, loading
from train.data.source import Source
from train.pipeline import open_run


def test_files_of_several_kinds_are_tokenised_and_counted(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 60)
    files.write_text(files.read_text() + "\n5\n")
    chat = {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": ""}]}
    datasets.Dataset.from_list([chat] * 3).to_parquet(str(tmp_path / "chat.parquet"))
    both = Path(f"{files},{tmp_path / 'chat.parquet'}")
    given = arguments(target, both, tmp_path / "work")
    assert prepare.main([*given, "--config.data.max_bad_rows=1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("skipped 1 row that cannot be used, the first is line 62 of")
    assert said[1].startswith("63 documents, ")


def rows_of(given: list[str]) -> list[tuple[Any, ...]]:
    parsed = parse(given)
    config = parsed.config
    parsed.workdir.mkdir(exist_ok=True)
    source = Source(config, parsed.workdir, config.target, 304)
    rows = source.split(config.stages[0], make_mesh(1, 1, 1))[0]
    made = [rows[index] for index in range(len(rows))]
    return [(t.tolist(), w.tolist(), length) for t, w, length in made]


def test_prepared_rows_are_the_rows_of_training(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 20)
    expected = rows_of(arguments(target, files, tmp_path / "alone", "sft"))
    assert {length for *_, length in expected} > {40}
    given = arguments(target, files, tmp_path / "work", "sft")
    assert prepare.main(given) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_file_rows", None)  # The tokens are there.
        assert rows_of(given) == expected
        # Whatever is learned of them, and however they are cut.
        assert len(rows_of([*given, "--config.data.mask_prompts=True"])) == len(expected)
    files.write_text(files.read_text() + json.dumps({"text": "more"}))
    assert len(rows_of(given)) == len(expected) + 1


def test_a_stages_own_bad_rows_are_allowed_by_its_own_option(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_documents(tmp_path / "documents.jsonl", 3)
    files.write_text(files.read_text() + "5\n6\n")
    given = [f"--config={ROOT}/configs/vicuna7b.py", f"--config.target={target}"]
    given += [f"--config.stages.{name}.data.files={files}" for name in ("short", "long", "sft")]
    given += [f"--workdir={tmp_path / 'work'}"]
    for budget, sentence in {
        0: "--config.stages.short.data.max_bad_rows=NUMBER",
        1: "more rows than --config.stages.short.data.max_bad_rows=1 cannot be used",
    }.items():
        option = f"--config.stages.short.data.max_bad_rows={budget}"
        assert prepare.main([*given, option]) == 2
        assert sentence in capsys.readouterr().err


def test_a_corpus_is_gathered_once_and_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--config={ROOT}/configs/demo.py:tiny", f"--workdir={tmp_path}"]
    assert prepare.main(given) == 0
    made = capsys.readouterr().out
    assert f" held out in {tmp_path / 'corpus'} after " in made
    monkeypatch.setattr(corpus, "build_corpus", None)  # The texts are there.
    monkeypatch.setattr(corpus, "write_tokens", None)
    assert prepare.main(given) == 0
    assert capsys.readouterr().out.split(" after ")[0] == made.split(" after ")[0]
    open_run(parse(given).config, tmp_path).metrics.close()


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare.main([f"--workdir={tmp_path / 'work'}"]) == 2
    assert re.fullmatch("error: --config=FILE is missing.*\n", capsys.readouterr().err)
