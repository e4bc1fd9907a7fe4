"""A row while it is answered, and the output file: one writer, whole lines, where to continue."""

import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.kit import each_row
from train.data.documents import Turn
from train.data.loading import check_no_input
from train.regeneration import Conversation, Output, kept_turns, seed_of

USER, SYSTEM = Turn("why", "user"), Turn("be brief", "system")
KEPT: list[tuple[dict[str, Any], list[Turn]]] = [
    ({"prompt": "why", "messages": None}, [USER]),
    ({"prompt": [{"role": "user", "content": "why"}]}, [USER]),
    ({"prompt": "other", "conversations": [{"from": "human", "value": "why"}]}, [USER]),
    ({"prompt": "why", "text": "a text"}, [USER]),
    ({"problem": "why", "qwq": "so"}, [Turn("You are a helpful assistant", "system"), USER]),
    ({"text": "a text"}, [Turn("a text")]),
]


@each_row(("row", "kept"), KEPT)
def test_what_an_assistant_said_is_left_out(row: dict[str, Any], kept: list[Turn]) -> None:
    assert kept_turns(row, prefix_tokens=1) == kept


@each_row(
    ("row", "sentence"),
    [
        ({"text": "a text"}, "asks nothing; give --prefix_tokens=NUMBER"),
        ({"messages": [{"role": "assistant", "content": "so"}]}, "no turn of the row is a user's"),
        ({"messages": []}, "messages holds no turns"),
        ({"prompt": 5}, "prompt holds a value of type int where a list belongs"),
        ({"answer": "so"}, "known formats: .*prompt"),
    ],
)
def test_rows_that_ask_nothing_are_refused(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kept_turns(row)


def test_answers_stand_between_questions_and_nothing_behind_the_last() -> None:
    talk = Conversation(3, deque([SYSTEM, USER, USER, SYSTEM]))
    assert talk.ask() and talk.messages()[-1] == {"role": "user", "content": "why"}
    talk.answer(" because\n", complete=True)
    assert talk.ask()
    talk.answer("so", complete=True)
    assert talk.answers == 2 and not talk.ask()  # A system prompt that nobody follows.
    assert [turn["role"] for turn in talk.record()["messages"]] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert talk.record()["messages"][2]["content"] == "because" and talk.record()["row"] == 3


def test_an_answer_that_was_cut_off_is_the_last() -> None:
    talk = Conversation(0, deque([USER, USER]))
    talk.ask()
    talk.answer("because", complete=False)
    assert not talk.ask() and len(talk.turns) == 2 and not talk.record()["complete"]


def test_every_answer_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(s, row, answer) for s in (0, 1) for row in range(30) for answer in range(5)}
    assert len(seeds) == 300 and all(0 <= seed < 2**32 for seed in seeds)


def test_one_file_has_one_writer(tmp_path: Path) -> None:
    output = Output(tmp_path / "out.jsonl", {})
    with pytest.raises(ValueError, match="another process is writing"):
        Output(tmp_path / "out.jsonl", {})
    output.append([{"row": 4}])
    output.close()
    again = Output(tmp_path / "out.jsonl", {})
    assert (again.rows, again.next_row) == (1, 5)
    again.close()
    (tmp_path / "out.jsonl").write_text('{"row": 4}\n{"other": 1}\n')
    with pytest.raises(ValueError, match="this command did not write the last line of"):
        Output(tmp_path / "out.jsonl", {})


def test_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    rows = [{"row": row, "text": "é" * row} for row in range(4)]
    output = Output(path, {"--seed": 1})
    output.append(rows[:2])
    output.append([])
    output.append(rows[2:])
    output.close()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        output = Output(path, {"--seed": 1})
        assert output.rows == output.next_row == whole[:length].count(b"\n")
        output.append(rows[output.next_row :])
        output.close()
        assert path.read_bytes() == whole


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = Output(path, {"--seed": 1, "--top_k": 0})
    output.append([{"row": 0}])
    output.close()
    with pytest.raises(ValueError, match="other settings: --seed=2 .was 1.; repeat them"):
        Output(path, {"--seed": 2, "--top_k": 0})
    (tmp_path / "out.jsonl.settings").unlink()
    with pytest.raises(ValueError, match="out.jsonl.settings is missing or damaged"):
        Output(path, {"--seed": 1, "--top_k": 0})


def test_an_input_by_any_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("{}\n")
    os.link(file, tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to(file)
    for name in ("chats.jsonl", "hard.jsonl", "soft.jsonl", "../" + tmp_path.name + "/chats.jsonl"):
        with pytest.raises(ValueError, match="is one of the --files"):
            check_no_input(tmp_path / name, str(file))
    check_no_input(tmp_path / "other.jsonl", str(file))
