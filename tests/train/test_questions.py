"""Questions of text files: the same ones every time, of all kinds, and fit to be answered."""

import json
from pathlib import Path

import pytest

from longspec_jax import cli
from longspec_jax.generation.text import loops
from tests.kit import each_row
from train import questions
from train.regeneration import kept_turns

TEXTS = ["def the_function(argument):\n    return argument\n" * 30, "A document. " * 90, "short"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def made(data: Path, *options: str) -> list[dict[str, object]]:
    out = data.with_name("questions.jsonl")
    assert questions.main([f"--files={data}", f"--out={out}", *options]) == cli.OK
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_questions_are_a_function_of_texts_and_seed(data: Path) -> None:
    first = made(data, "--count=60", "--seed=3")
    assert first == made(data, "--count=60", "--seed=3") != made(data, "--count=60", "--seed=4")
    assert len(first) == 60 and made(data, "--count=7", "--seed=3") == first[:7]


def test_questions_are_of_all_kinds_and_can_be_answered(data: Path) -> None:
    rows = made(data, "--count=300")
    texts = [row["text"] for row in rows if "text" in row]
    asked = [row["messages"][0]["content"] for row in rows if "messages" in row]  # type: ignore[index]
    assert 130 <= len(texts) <= 200 and len(texts) + len(asked) == 300
    assert all(any(text in whole for whole in TEXTS[:2]) for text in texts)
    assert {task for task in questions.TASKS for each in asked if each.startswith(task)} == set(
        questions.TASKS
    )
    assert any("```" not in each for each in asked)  # Only about a word.
    assert all(kept_turns(row, prefix_tokens=9) for row in rows)


def test_texts_that_are_too_short_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.write_text(json.dumps({"text": "short"}) + "\n")
    out = data.with_name("questions.jsonl")
    assert questions.main([f"--files={data}", f"--out={out}"]) == cli.BAD_INPUT
    assert "no document has 400 characters" in capsys.readouterr().err
    assert questions.main([f"--files={data}", f"--out={data}"]) == cli.BAD_INPUT
    assert "is one of the --files" in capsys.readouterr().err
    data.write_text("5")
    assert questions.main([f"--files={data}", f"--out={out}"]) == cli.BAD_INPUT
    assert capsys.readouterr().err.endswith("repair or remove the row\n")


@each_row(
    ("tokens", "expected"),
    [
        (list(range(16)) * 4, True),
        (list(range(16)) * 3, False),
        ([7] * 19, True),
        ([7] * 18, False),
        (list(range(200)), False),
        ([], False),
    ],
)
def test_an_answer_loops_if_it_repeats_itself(tokens: list[int], expected: bool) -> None:
    assert loops(tokens) is expected
