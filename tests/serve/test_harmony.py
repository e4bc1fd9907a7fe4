"""The messages of harmony: how they are read, and the grammar of an answer of them."""

from typing import Any

import pytest

from infer.serve.command import chat_markup
from infer.serve.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, turn_with_thinking
from infer.serve.messages import Reading
from infer.serve.tools import named
from tests.serve.talker import HARMONY, talking_tokenizer
from tests.serve.test_tools import JSON, KNOWN, NAMED, STRICT, Told, allows, read_out

NAMES = START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS
TOKENIZER = talking_tokenizer(special=True, names=NAMES)
MARKUP = chat_markup(TOKENIZER, HARMONY)
WHY = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WEATHER = '{"city": "Oslo", "unit": "C"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{WEATHER}"


def told(text: str, tools: bool = True) -> Told:
    reading = Reading(MARKUP, named(KNOWN) if tools else None)
    return read_out(TOKENIZER.encode(text, add_special_tokens=False), reading, TOKENIZER)


OSLO: Any = [("weather", {"city": "Oslo", "unit": "C"})]


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"{FINAL}so\n", ("so\n", "", [], 0)),
        (f"{WHY}{FINAL}so<|return|>", ("so", "why", [], 3)),
        (f"{CALL}<|call|>", ("", "", OSLO, 0)),
        (f"{WHY}{CALL}", ("", "why", OSLO, 3)),
        (f"{WHY}<|channel|>commentary<|message|>I look.<|end|>", ("I look.", "why", [], 3)),
        (CALL.replace("<|constrain|>", ""), ("", "", OSLO, 0)),
        (f" to=functions.weather<|channel|>commentary json<|message|>{WEATHER}", ("", "", OSLO, 0)),
        (CALL.replace("commentary", "analysis"), ("", "", OSLO, 0)),
        (CALL.replace("weather", "w"), (WEATHER, "", [], 0)),
        (
            CALL.replace(WEATHER, "").replace("weather", "now") + "<|call|>",
            ("", "", [("now", "{}")], 0),
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
            ("I look.", "", OSLO, 0),
        ),
        (f"{FINAL}a<|end|><|start|>assistant{FINAL}b", ("a\nb", "", [], 0)),
        ("so", ("so", "", [], 0)),
        (f"{FINAL}soSTOP", ("so", "", [], 0)),
    ],
)
def test_messages_are_read_by_their_channel_and_recipient(text: str, expected: Told) -> None:
    assert told(text) == expected


def test_a_call_is_text_where_no_tools_are_asked_for() -> None:
    assert told(f"{WHY}{CALL}", tools=False) == (WEATHER, "why", [], 3)
    assert told(CALL[:-4])[2] == [("weather", WEATHER[:-4])]


@pytest.mark.parametrize(
    "asked, right, wrong",
    [
        ({}, [CALL, f"{WHY}{CALL}"], ["", WHY, f"{FINAL}so", CALL[:-1], f"{CALL}{CALL}"]),
        ({"choice": NAMED}, [], [CALL]),
        ({"choice": "auto", "tools": STRICT}, [CALL, f"{WHY}{FINAL}so"], [CALL[:-1], "so"]),
        (
            {"choice": "auto", "tools": [], "form": JSON},
            [f'{WHY}{FINAL}{{"a": 3}}'],
            ['{"a": 3}', f"{FINAL}so"],
        ),
    ],
)
def test_a_grammar_holds_all_messages(
    asked: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [
        text for text in right if not allows(text, MARKUP, TOKENIZER, thinking=None, **asked)
    ] == []
    assert [text for text in wrong if allows(text, MARKUP, TOKENIZER, thinking=None, **asked)] == []


def test_a_template_of_harmony_reads_thinking_and_beside_calls_no_text() -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "so", "reasoning": "why"}
    assert turn_with_thinking(turn) == {**turn, "thinking": "why"}
    called = {**turn, "tool_calls": [{}]}
    assert turn_with_thinking(called) == {**called, "content": "", "thinking": "why\nso"}
    assert turn_with_thinking({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}
