"""Texts: prompts are pieces of files, both ways are decoded, and every row says what came out."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from longspec_jax import cli, demo_prompts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    long, short = folder / "long.py", folder / "short.py"
    long.write_text(next(iter(demo_prompts().values())))
    short.write_text("x = 1\n")
    return [str(long), str(short)]


@pytest.mark.slow
def test_every_row_is_a_text_beside_plain_decoding(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = [
        "--context=64",
        "--new_tokens=8",
        "--tree=4,4@6~4",
        "--tree=none@6~4",
        f"--json={out}",
    ]
    assert main(["texts", "--files", *files, "--temperature=0", *options]) == cli.OK
    found = json.loads(out.read_text())
    assert found["header"]["draft"] == ["demo"] and found["header"]["identical_promised"]
    assert [row["tree"] for row in found["rows"]] == ["4,4@6~4", "none@6~4"]
    for row in found["rows"]:
        assert row["document"] == "long.py" and row["prompt_tokens"] == 64 and row["identical"]
        assert 1 <= row["tokens_per_round"] <= 5 and row["gain"] > 0
        assert set(row["accepted_by_source"]) <= {"longspec", "ngram", "longspec+ngram"}
    assert set(found["rows"][1]["accepted_by_source"]) <= {"ngram"}


def test_files_that_are_too_short_are_refused(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["texts", "--files", files[1], "--context=64"]) == cli.BAD_INPUT
    assert "no file of --files has 64 tokens" in capsys.readouterr().err
