"""Gemma 4's calls and reasoning: how they are read, and the grammar of an answer of them."""

from typing import Any

import pytest

from infer.serve.command import chat_markup
from infer.serve.gemma import turns_with_responses
from infer.serve.markup import grammar_of
from infer.serve.messages import Reading
from infer.serve.tools import named
from longspec_jax.generation.template import render
from tests.serve.talker import GEMMA, GEMMA_MARKS, talking_tokenizer
from tests.serve.test_tools import (
    JSON,
    KNOWN,
    NAMED,
    NESTED,
    STRICT,
    Told,
    allows,
    assert_required_calls_parse,
    engine_of,
    read_out,
    tool,
)

TOKENIZER = talking_tokenizer(special=True, names=GEMMA_MARKS)
MARKUP = chat_markup(TOKENIZER, GEMMA)
WHY = "<|channel>thought\nwhy\n<channel|>"
CALL = '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,unit:<|"|>C<|"|>}<tool_call|>'
NOW = "<|tool_call>call:now{}<tool_call|>"
OSLO: Any = ("weather", {"city": "Oslo", "unit": "C"})
ODD = '"}]{,:\\<|"\n'
OPEN = '{"city": "Oslo", "unit": "'
EMPTY: dict[str, Any] = {"a": {}, "b": [], "c": "10:30"}


def told(text: str, tools: bool = True, thinking: bool = False) -> Told:
    reading = Reading(MARKUP, named(KNOWN) if tools else None, thinking)
    return read_out(TOKENIZER.encode(text, add_special_tokens=False), reading, TOKENIZER)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("so\n", ("so\n", "", [], 0)),
        (f"{WHY}so", ("so", "why", [], 12)),
        ("<|channel>thoughts<channel|>so", ("so", "thoughts", [], 8)),
        ("<|channel>thou", ("", "thou", [], 4)),
        ("<|channel>thought\n<channel|>so", ("so", "", [], 8)),
        (f"{WHY}{CALL}", ("", "why", [OSLO], 12)),
        (f"<|channel>thought\na {NOW}", ("", "a call:now{}", [], 0)),
        (f"I look.\n{CALL}{NOW}", ("I look.", "", [OSLO, ("now", "{}")], 0)),
        (CALL.replace("Oslo", ODD), ("", "", [("weather", {"city": ODD, "unit": "C"})], 0)),
        (
            '<|tool_call> call: now {a:3, b:[1.5,null,<|"|>x<|"|>,{<|"|>c d<|"|>:True}],',
            ("", "", [("now", {"a": 3, "b": [1.5, None, "x", {"c d": True}]})], 0),
        ),
        (f"{NOW[:-14]}{{a:{{}},b:[],c:10:30,}}", ("", "", [("now", EMPTY)], 0)),
        (CALL.replace("weather", "w"), (CALL.replace("weather", "w"), "", [], 0)),
        ("<|tool_call>so<tool_call|>", ("<|tool_call>so<tool_call|>", "", [], 0)),
        (CALL[:-13], ("", "", [OSLO], 0)),
        (CALL.removesuffix('C<|"|>}<tool_call|>'), ("", "", [("weather", OPEN)], 0)),
    ],
)
def test_calls_and_reasoning_are_read_by_their_tokens(text: str, expected: Told) -> None:
    found = told(text)
    assert found[:3] == expected[:3] and (not expected[3] or found[3] == expected[3])


def test_calls_are_text_without_tools_and_letters_of_a_mark_are_letters() -> None:
    assert told(f"{WHY}{CALL}", tools=False)[2] == []
    spelled = "".join(CALL)
    tokens = [TOKENIZER.encode(one, add_special_tokens=False)[0] for one in spelled]
    reading = Reading(MARKUP, named(KNOWN))
    assert read_out(tokens, reading, TOKENIZER) == (spelled, "", [], 0)
    quote = '<|"|>'
    inside = [TOKENIZER.encode(one, add_special_tokens=False)[0] for one in quote]
    begin, end = CALL.split("Oslo")
    around = [TOKENIZER.encode(part, add_special_tokens=False) for part in (begin, end)]
    found = read_out([*around[0], *inside, *around[1]], reading, TOKENIZER)
    assert found[2] == [("weather", {"city": quote, "unit": "C"})]


VALUES = tool(
    "values",
    {
        "type": "object",
        "required": ["n", "Z"],
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 9},
            "Z": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
            "a": {"type": ["string", "null"], "maxLength": 2},
            "k": {"const": 3},
            "list": {"items": {}, "maxItems": 2},
            "o": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "$defs": {"pair": {"properties": {"x": {"$ref": "#/$defs/pair"}}}},
    },
)
VALUED = "<|tool_call>call:values{{{}}}<tool_call|>".format


@pytest.mark.parametrize(
    "asked, right, wrong",
    [
        (
            {},
            [CALL, f"{CALL}{NOW}", CALL.replace(",unit", ",days:3,unit")],
            ["", "so", WHY, f"{CALL}\n{NOW}", CALL.replace("weather", "w"), CALL[:-1]],
        ),
        ({}, [], [NOW.replace("{", "{a:1"), CALL.replace("Oslo", "Oslo...")]),
        ({"parallel": False}, [CALL], [f"{CALL}{CALL}"]),
        ({"choice": NAMED}, [NOW], [CALL]),
        ({"thinking": None}, [f"{WHY}{CALL}", CALL], [f"why<channel|>{CALL}", WHY]),
        ({"thinking": None}, [], [f"<|channel>why<channel|>{CALL}", f"{WHY}so {CALL}"]),
        (
            {"choice": "auto", "tools": STRICT},
            ["so", "", CALL, f"so{CALL}{NOW}"],
            [CALL.replace("weather", "w"), f"so{CALL[:-12]}"],
        ),
        ({"choice": "auto", "form": JSON}, ['{"a": 3}', CALL], ["so", f'{{"a": 3}}{CALL}']),
        (
            {"tools": [VALUES]},
            [
                VALUED('a:<|"|>xy<|"|>,k:3,n:3,Z:true'),
                VALUED("n:0,Z:{x:{x:{}}}"),
                VALUED('list:[1,<|"|>a<|"|>],n:9,o:{a-b:1},Z:false'),
                VALUED("a:null,list:[{k:[]}],n:1,o:{},Z:{}"),
            ],
            [
                VALUED("n:10,Z:true"),
                VALUED("Z:true,n:3"),
                VALUED("n:3"),
                VALUED('a:<|"|>xyz<|"|>,n:3,Z:true'),
                VALUED("n:3,Z:{y:{}}"),
                VALUED("list:[1,2,3],n:3,Z:true"),
                VALUED("n:3,,Z:true"),
                VALUED("k:4,n:3,Z:true"),
            ],
        ),
        (
            {"tools": [NESTED]},
            ['<|tool_call>call:list{name:<|"|>a<|"|>,next:{name:<|"|>b<|"|>}}<tool_call|>'],
            ['<|tool_call>call:list{name:<|"|>a<|"|>,next:{}}<tool_call|>'],
        ),
    ],
)
def test_a_grammar_holds_the_whole_answer(
    asked: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not allows(text, MARKUP, TOKENIZER, **asked)] == []
    assert [text for text in wrong if allows(text, MARKUP, TOKENIZER, **asked)] == []


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"a b": {}}, "the parameter 'a b' cannot be written without quotes"),
        ({"a": {"allOf": [{}]}}, "allOf cannot be written as a grammar of Gemma's calls"),
        ({"a": {"enum": [[1]]}}, "choices of lists and objects"),
        ({"a": {"$ref": "#/properties/a"}}, "is no definition of the schema"),
        ({"a": {"type": "strin"}}, "'strin' is not a type of JSON"),
        ({"a": False}, "false is no schema"),
        ({"a": {"enum": 1}}, "enum=1 is nothing that JSON schemas have"),
        ({"a": {"type": "array", "items": {"oneOf": 3.5}}}, "oneOf=3.5 is nothing"),
        ({"a": {"type": "string", "maxLength": "9"}}, "maxLength='9' is nothing"),
        ({"a": {"type": "array", "minItems": []}}, "minItems="),
        ({"a": {"type": True}}, "type=True is nothing"),
        ({"a": {"type": [None]}}, "None is not a type of JSON"),
        ({"a": {"properties": {"b": {}}, "required": 5}}, "required=5 is nothing"),
        ({"a": {"properties": {"b": {}}, "required": [{}]}}, "{} is required and not"),
        ({"a": {"anyOf": [{}], "type": "string"}}, "anyOf next to type is not written"),
    ],
)
def test_what_is_not_written_is_refused_by_name(schema: dict[str, Any], words: str) -> None:
    given = {}, [tool("f", {"properties": schema})], "required"
    with pytest.raises(ValueError, match=f"the tool f: .*{words}"):
        grammar_of(MARKUP, *given, parallel=True, thinking=False)


def test_what_is_written_is_what_the_template_shows() -> None:
    """A call that a grammar allows and the reader reads is rendered as it was written."""
    arguments = {"Z": True, "a": "x", "list": [1, "a"], "n": 3, "o": {"a": 1.5}}
    call = {"id": "1", "type": "function", "function": {"name": "values", "arguments": arguments}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "", "reasoning": "why", "tool_calls": [call]},
        {"role": "tool", "content": "17", "tool_call_id": "1"},
    ]
    shown = render(GEMMA, {"messages": turns_with_responses(turns)})
    written = VALUED('a:<|"|>x<|"|>,list:[1,<|"|>a<|"|>],n:3,o:{a:1.5},Z:true')
    assert written in shown and allows(written, MARKUP, TOKENIZER, tools=[VALUES])
    reading = Reading(MARKUP, named([VALUES]))
    tokens = TOKENIZER.encode(written, add_special_tokens=False)
    assert read_out(tokens, reading, TOKENIZER)[2] == [("values", arguments)]
    answer = '<|tool_response>response:values{value:<|"|>17<|"|>}<tool_response|>'
    assert shown.endswith(f"{written}{answer}<|channel>thought\n<channel|>")
    with pytest.raises(ValueError, match="must follow the message that calls"):
        turns_with_responses(turns[::2])


def test_required_calls_parse_with_trees_also_where_the_reasoning_ends_in_a_draft() -> None:
    """The marks have a text of their own, as in GGUF."""
    tokenizer = talking_tokenizer(names=GEMMA_MARKS)
    engine = engine_of(tokenizer, "{}:, aC")
    given = tokenizer, chat_markup(tokenizer, GEMMA), None, "<channel|>"
    assert_required_calls_parse(engine, *given)
    engine.close()


def test_a_tokenizer_without_the_tokens_has_no_calls() -> None:
    assert chat_markup(talking_tokenizer(), GEMMA).calls is None
