"""A row while it is answered: what is kept, what is asked, what is written."""

from collections import deque
from typing import Any

import pytest

from tests.kit import each_row
from train.answering import Conversation, Questions, seed_of
from train.data.documents import Turn

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
    assert Questions(prefix_tokens=1)(row) == kept


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
        Questions()(row)


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
