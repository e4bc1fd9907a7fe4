"""Reasoning and calls of tools: how they are read, and the grammars that hold a model to them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from infer.serve.command import chat_markup
from infer.serve.forms import types_of, value_of
from infer.serve.markup import Markup, grammar_of, markup_of
from infer.serve.messages import MessageReader, Reading
from infer.serve.protocol import Message
from infer.serve.tools import NamedTool, Tool, named, object_of
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.drafters.base import Params
from longspec_jax.generation.grammar import Grammar, compile_grammar, vocabulary_of
from longspec_jax.generation.text import RequestOutput, RowText
from tests.generation.grammars import request
from tests.lookup import LookupDrafter, LookupTarget, random_table
from tests.serve.talker import CITY, HERMES, STOP, THINKING, XML, function, talking_tokenizer


def tool(name: str, parameters: Any = None, **more: Any) -> Tool:
    return Tool.model_validate(function(name, parameters, **more))


KNOWN = [tool("weather", CITY), tool("now")]
WEATHER = '{"name": "weather", "arguments": {"city": "Oslo", "unit": "C"}}'
CALL = f"<tool_call>\n{WEATHER}\n</tool_call>"
TAGGED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=unit>\nC\n"
    "</parameter>\n</function>\n</tool_call>"
)
OSLO = {"city": "Oslo", "unit": "C"}
ODD = {"city": '"}{\\', "unit": "C"}
ARGUMENTS = '{{"city": {}, "unit": "C"}}'.format
TURNED = CALL.replace(WEATHER, '{"arguments": {"city": "Oslo", "unit": "C"}, "name": "weather"}')


def ids(text: str, marks: bool = True) -> list[int]:
    return talking_tokenizer(marks).encode(text, add_special_tokens=False)


def marked(template: str = HERMES, marks: bool = True) -> Markup:
    return markup_of(template, talking_tokenizer(marks).get_added_vocab())


def gains(tokens: Sequence[int], sizes: Sequence[int], tokenizer: Any) -> Iterator[RequestOutput]:
    """What an engine tells of tokens that come in steps of these sizes.

    Marks end as the second stop string begins.
    """
    text, left = RowText(tokenizer, [], ["STOP", ">>>"]), [*tokens]
    steps = [*sizes, len(tokens)]
    while left or steps:
        count = steps.pop(0)
        new, left = left[:count], left[count:]
        pieces = text.add(new, [False] * len(new), not left).pieces
        yield RequestOutput(
            id=0,
            tokens=tuple(new),
            text="".join(piece.text for piece in pieces),
            pieces=pieces,
            drafted=(False,) * len(new),
            rounds=(),
            finish=None if left and not text.stopped else "stop",
        )
        if text.stopped or not left:
            return


Told = tuple[str, str, list[tuple[str, Any]], int]


def told(
    text: str,
    template: str = HERMES,
    *,
    tools: bool = True,
    thinking: bool = False,
    marks: bool = True,
    tokens: list[int] | None = None,
) -> Told:
    """See :func:`read_out`."""
    given = ids(text, marks) if tokens is None else tokens
    reading = Reading(marked(template, marks), named(KNOWN) if tools else None, thinking)
    return read_out(given, reading, talking_tokenizer(marks))


def read_out(given: list[int], reading: Reading, tokenizer: Any) -> Told:
    """Content, reasoning, calls and reasoning tokens; the same however the tokens come.

    Arguments that are no JSON object are their text.
    """
    found = set[str]()
    for sizes in ([], [1] * len(given), [3, 1, 7, 2] * len(given)):
        reader = MessageReader(reading)
        content, reasoning, calls = "", "", list[tuple[str, str]]()
        for gain in gains(given, sizes, tokenizer):
            said = reader.read(gain)
            content, reasoning = content + said.content, reasoning + said.reasoning
            for call in said.calls:
                assert call.place == len(calls) - (not call.name)
                if call.name:
                    calls.append((call.name, ""))
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
        assert reader.calls == len(calls)
        found.add(json.dumps([content, reasoning, calls, reader.reasoning_tokens]))
    [one] = found
    content, reasoning, calls, count = json.loads(one)
    return content, reasoning, [(name, object_of(text) or text) for name, text in calls], count


NO_CALLS: list[Any] = []


@pytest.mark.parametrize(
    "text, options, expected",
    [
        ("so\n", {}, ("so\n", "", NO_CALLS)),
        ("\n\nso", {}, ("\n\nso", "", NO_CALLS)),
        ("why\n</think>\n\nso", {"thinking": True}, ("so", "why", NO_CALLS)),
        ("<think>\nwhy\n</think>\n\nso\n", {}, ("so\n", "why", NO_CALLS)),
        ("why é", {"thinking": True}, ("", "why é", NO_CALLS)),
        (f"why {CALL}", {"thinking": True}, ("", f"why {CALL}", NO_CALLS)),
        (f"why</think>\n\n{CALL}", {"thinking": True}, ("", "why", [("weather", OSLO)])),
        (CALL, {}, ("", "", [("weather", OSLO)])),
        (CALL, {"tools": False}, (CALL, "", NO_CALLS)),
        (f"I look.\n{CALL}\n{CALL}\n", {}, ("I look.", "", [("weather", OSLO)] * 2)),
        (f"{CALL}\n\nthere", {}, ("there", "", [("weather", OSLO)])),
        (f"Look.\n{CALL}\nThere", {}, ("Look.\nThere", "", [("weather", OSLO)])),
        ("so\n<think>why</think>\n\nnow", {}, ("so\nnow", "why", NO_CALLS)),
        (CALL.replace('"weather"', '["a"]'), {}, (CALL.replace('"weather"', '["a"]'), "", [])),
        (CALL.replace('"Oslo"', "1e999"), {}, ("", "", [("weather", ARGUMENTS("1e999"))])),
        (CALL.replace("weather", "wether"), {}, (CALL.replace("weather", "wether"), "", [])),
        (CALL[:-13], {}, ("", "", [("weather", OSLO)])),
        (CALL[:-23], {}, ("", "", [("weather", '{"city": "Oslo", "un')])),
        (f"{CALL[:-12]}so", {}, ("so", "", [("weather", OSLO)])),
        (f"{CALL[:-14]}\n{CALL}", {}, ("", "", [("weather", OSLO)] * 2)),
        (CALL.replace('"Oslo"', "NaN"), {}, ("", "", [("weather", ARGUMENTS("NaN"))])),
        (CALL.replace('"Oslo"', r'"\"}{\\"'), {}, ("", "", [("weather", ODD)])),
        (TURNED, {}, ("", "", [("weather", OSLO)])),
        (TURNED.replace("weather", "wether"), {}, (TURNED.replace("weather", "wether"), "", [])),
        ("<tool_call>so</tool_call>", {}, ("<tool_call>so</tool_call>", "", NO_CALLS)),
        (f"a</tool_call>{CALL}", {}, ("a</tool_call>", "", [("weather", OSLO)])),
        (f"é{CALL}STOP and more", {}, ("é", "", [("weather", OSLO)])),
        (TAGGED, {"template": XML}, ("", "", [("weather", OSLO)])),
        (CALL, {"template": XML}, (CALL, "", NO_CALLS)),
        (
            TAGGED.replace("</function>", ""),
            {"template": XML},
            ("", "", [("weather", OSLO)]),
        ),
        (TAGGED[:-38], {"template": XML}, ("", "", [("weather", '{"city": "Oslo", "unit": "C')])),
        (
            TAGGED.replace("C\n", "C\nso\n"),
            {"template": XML},
            ("", "", [("weather", {**OSLO, "unit": "C\nso"})]),
        ),
        (TAGGED.replace("weather", "w"), {"template": XML}, (TAGGED.replace("weather", "w"),)),
    ],
)
def test_an_answer_is_read_the_same_however_it_comes(
    text: str, options: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert told(text, **options)[: len(expected)] == expected


@pytest.mark.parametrize("text", [CALL, f"so <tool{CALL} <tool_", f"{CALL[:-1]} {CALL}"])
def test_marks_may_be_texts_where_the_tokenizer_has_no_such_tokens(text: str) -> None:
    """A closing mark within a text of the arguments does not close, and half a mark is text."""
    inside = text.replace("Oslo", "a </tool_call> b")
    content, _, calls, _ = told(inside, marks=False)
    expected = [("weather", {"city": "a </tool_call> b", "unit": "C"})]
    if text == CALL:
        assert (content, calls) == ("", expected)
    elif text.startswith("so"):
        assert (content, calls) == ("so <tool <tool_", expected)
    else:
        assert (content, calls) == ("</tool_call ", expected * 2)


def test_letters_of_a_mark_in_other_tokens_mean_nothing() -> None:
    spelled = [ids(letter)[0] for letter in f"</think>{CALL}"]
    content, reasoning, calls, count = told("", tokens=spelled, thinking=True)
    assert (content, calls, count) == ("", [], len(spelled))
    assert reasoning == f"</think>{CALL}"


def test_reasoning_tokens_are_those_between_the_marks() -> None:
    assert told("abc</think>de", thinking=True)[3] == 3
    assert told("<think>abc</think>de")[3] == 3 and told("abc")[3] == 0


@pytest.mark.parametrize(
    "text, types, value",
    [
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("None", {"integer"}, None),
        ("3", {"string", "null"}, "3"),
        ("3", {"string", "integer"}, 3),
        ("3", {"number"}, 3),
        ("True", {"boolean"}, True),
        ("true", {"boolean"}, True),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("three", {"integer"}, "three"),
        ('1}, "b": {"c": 2', set(), '1}, "b": {"c": 2'),
        ('1, "b": 2', {"integer"}, '1, "b": 2'),
    ],
)
def test_a_value_between_tags_has_the_type_of_its_schema(
    text: str, types: set[str], value: Any
) -> None:
    assert value_of(text, types) == value


def test_references_are_followed_once() -> None:
    """Choices of choices would have as many ways through them as no server can walk."""
    choice = {"anyOf": [{"$ref": f"#/$defs/{index}"} for index in range(50)]}
    root: dict[str, Any] = {"$defs": {f"{index}": choice for index in range(49)}}
    root["$defs"]["49"] = {"type": ["integer", "null"]}
    assert types_of(choice, root, {}) == {"integer", "null"}
    known = {"#/$defs/7": {"string"}}
    assert types_of({"$ref": "#/$defs/7"}, root, known) == {"string"}


def test_definitions_that_every_parameter_repeats_are_refused_early() -> None:
    """A request of 1 MB would make a grammar of 800."""
    definitions = {"a": {"type": "integer", "description": "x" * 50_000}}
    properties = {f"p{index}": {"$ref": "#/$defs/a"} for index in range(1000)}
    schema = {"properties": properties, "$defs": definitions, "required": [*properties]}
    given = {}, [tool("now", schema)], "required"
    with pytest.raises(ValueError, match="make a grammar of more than 65536 characters"):
        grammar_of(marked(XML), *given, parallel=True, thinking=False)


def test_marks_may_be_special_tokens_that_have_no_text() -> None:
    class Special:
        chat_template = HERMES + THINKING
        all_special_ids = (257, 258, 259, 260)

        def get_added_vocab(self) -> dict[str, int]:
            return talking_tokenizer().get_added_vocab()

        def get_chat_template(self, *_: Any, **__: Any) -> str:
            return self.chat_template

    markup = chat_markup(Special(), None)
    reader = MessageReader(Reading(markup, named(KNOWN), True))
    text = RowText(talking_tokenizer(special=True))
    given = ids(f"why</think>\n\nso {CALL}")
    pieces = text.add(given, [False] * len(given), True).pieces
    assert [piece.token for piece in pieces] == given and "<" not in "".join(p.text for p in pieces)
    said = reader.read(RequestOutput(0, (*given,), (), (), "stop", pieces=pieces))
    assert (said.reasoning, said.content, reader.reasoning_tokens) == ("why", "so ", 3)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("weather", OSLO)]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "reasoning": "why"},
        {"content": [], "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
        {"content": None, "tool_calls": [{"function": {"name": "now", "arguments": " {}"}}]},
        {"content": "", "tool_calls": [{"function": {"name": "now", "arguments": '{"a": NaN}'}}]},
    ],
)
def test_an_answer_may_be_sent_back(fields: dict[str, Any]) -> None:
    message = Message.model_validate({"role": "assistant", **fields})
    assert message.content == ""
    broken = '{"a": NaN}'
    expected = broken if broken in str(fields) else {}
    assert all(call.function.arguments == expected for call in message.tool_calls)


def test_a_text_between_tags_keeps_what_looks_like_tags() -> None:
    said = "if a < b:\n\n\tprint('</parameter> </function>')\n"
    content, _, [(_, found)], _ = told(TAGGED.replace("Oslo", said), template=XML)
    assert (content, found) == ("", {"city": said, "unit": "C"})


# Grammars.


def allows(text: str, markup: Markup, tokenizer: Any, **asked: Any) -> bool:
    """Whether a grammar allows all of a text, and an end after it."""
    options: dict[str, Any] = {"parallel": True, "thinking": False} | asked
    tools = options.pop("tools", KNOWN)
    form, choice = options.pop("form", {}), options.pop("choice", "required")
    source = grammar_of(markup, form, tools, choice, **options)
    state = compile_grammar(vocabulary_of(tokenizer, len(tokenizer), (STOP,)), **source).state()
    try:
        state.advance(tokenizer.encode(text, add_special_tokens=False))
    except ValueError:
        return False
    return bool(state.allowed([0], [-1])[0][STOP // 32] >> STOP % 32 & 1)


NAMED = NamedTool.model_validate(function("now"))
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
STRICT = [tool("weather", CITY, strict=True), tool("now", strict=True)]
WORDS = {"city": {"enum": [f"word {index}" for index in range(3000)]}, "unit": {"type": "string"}}
MANY = tool("many", {"type": "object", "properties": WORDS})
PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "next": {"anyOf": [{"$ref": "#"}]}},
    "required": ["name"],
    "additionalProperties": False,
}
"""Of a list that goes on with itself."""
NESTED = tool("list", PARAMETERS)
NODE = (
    "<tool_call>\n<function=list>\n<parameter=name>\na\n</parameter>\n<parameter=next>\n"
    "{}\n</parameter>\n</function>\n</tool_call>"
)
JSON = {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    "asked, right, wrong",
    [
        ({}, [CALL, f"{CALL}\n{NOW}"], ["", "so", f"so {CALL}", CALL.replace("weather", "w")]),
        ({}, [], [NOW.replace("{}", '{"a": 1}'), CALL.replace('"C"', '"C", "days": 3')]),
        ({"parallel": False}, [CALL], [f"{CALL}\n{CALL}"]),
        ({"choice": NAMED}, [NOW], [CALL]),
        ({"thinking": True}, [f"why </think>\n\n{CALL}", f"</think>{CALL}"], [CALL, f"why {CALL}"]),
        ({"thinking": None}, [f"<think>why</think>\n\n{CALL}", CALL], [f"why</think>{CALL}"]),
        (
            {"template": XML, "tools": [MANY]},
            [TAGGED.replace("weather", "many").replace("Oslo", "word 2999")],
            [TAGGED.replace("weather", "many").replace("Oslo", "word 3000")],
        ),
        ({"template": XML}, [TAGGED], [CALL, TAGGED.replace("\nC\n", "\nK\n")]),
        (
            {"choice": "auto", "tools": STRICT},
            ["so", "", CALL, f"so\n{CALL}\n{NOW}"],
            [CALL.replace("weather", "w"), f"so{CALL[:-12]}"],
        ),
        ({"choice": "auto", "parallel": False}, [f"so{CALL}"], [f"{CALL}\n{CALL}"]),
        (
            {"choice": "auto", "parallel": False, "marks": False},
            ["", "so", "so <tool_cal", CALL, f"so <{CALL}"],
            [f"{CALL}\n{CALL}", f"so{CALL[:-12]}", "so <tool_call>", f"so {CALL} so"],
        ),
        (
            {"choice": "auto", "tools": STRICT, "marks": False},
            ["so", f"so{CALL}\n{NOW}"],
            [CALL.replace("weather", "w"), f"{CALL}{CALL}"],
        ),
        (
            {"template": XML, "tools": [NESTED]},
            [NODE.format('{"name": "b", "next": {"name": "c"}}'), NODE.format('{"name": "b"}')],
            [NODE.format('{"next": {}}'), NODE.format('{"name": "b", "next": {"next": {}}}')],
        ),
        ({"choice": "auto", "form": JSON}, ['{"a": 3}', CALL], ["so", f'{{"a": 3}}{CALL}']),
        ({"choice": "none", "form": JSON, "thinking": True}, ['a</think>{"a": 3}'], ['{"a": 3}']),
        (
            {"choice": "none", "form": {"regex": "a/b\\/c\n[/]"}, "thinking": True},
            ["w</think>\n\na/b/c\n/"],
            ["w</think>\n\na/b\\/c\n/"],
        ),
    ],
)
def test_a_grammar_holds_a_model_to_its_choice(
    asked: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    marks = asked.pop("marks", True)
    markup, tokenizer = marked(asked.pop("template", HERMES), marks), talking_tokenizer(marks)
    assert [x for x in right if not allows(x, markup, tokenizer, **asked)] == []
    assert [x for x in wrong if allows(x, markup, tokenizer, **asked)] == []


def test_free_answers_need_no_grammar() -> None:
    for choice, tools in (("auto", KNOWN), ("none", STRICT), ("auto", [])):
        assert grammar_of(marked(), {}, tools, choice, parallel=True, thinking=True) == {}
    assert grammar_of(marked(), JSON, [], "auto", parallel=True, thinking=False) == JSON


TREES = PLAIN, TreeConfig((4, 4))


def engine_of(tokenizer: Any, likely: str) -> Engine:
    """Of random bytes, among which marks are likely, and so is what calls are made of."""
    size, marks = len(tokenizer), [*tokenizer.get_added_vocab().values()]
    bias = np.full(size, -2.0, np.float32)
    bias[[mark for mark in marks if mark != STOP]] = 2.5  # Drafts hold them now and then.
    bias[tokenizer.encode(likely, add_special_tokens=False)] = 1.0
    table = random_table(3, 97, size) + bias
    params = Params(table, table + random_table(4, 97, size, 0.5))
    models = LookupTarget(size), tuple(map(LookupDrafter, TREES)), params
    runner = ModelRunner(*models, slots=4, capacity=512, stop_width=1)
    return Engine(runner, chunks=(8,), readmits=True)


@pytest.fixture(scope="module")
def engine() -> Any:
    made = engine_of(talking_tokenizer(), '{"}\n aC')
    yield made
    made.close()


Drawn = tuple[tuple[int, ...], str | None]


def drawn(engine: Engine, grammar: Grammar, candidate: int) -> tuple[list[Drawn], list[Any]]:
    """Tokens and ends of four rows, and the tokens of each that were accepted from a draft."""
    asked = [request(seed, new=300) for seed in range(4)]
    prompt, state = np.asarray(ids("ab"), np.int32), grammar.state
    rows = [engine.submit(prompt, one, constraint=state(), candidate=candidate) for one in asked]
    tokens, drafted = {row: list[int]() for row in rows}, {row: list[bool]() for row in rows}
    finish = dict[int, str | None]()
    while engine.busy:
        for output in engine.step():
            tokens[output.id] += output.tokens
            drafted[output.id] += output.drafted
            finish[output.id] = output.finish
    texts = [(tuple(tokens[row]), finish[row]) for row in rows]
    return texts, [
        [token for token, draft in zip(tokens[row], drafted[row], strict=True) if draft]
        for row in rows
    ]


def assert_required_calls_parse(
    engine: Engine, tokenizer: Any, markup: Markup, thinking: bool | None, closing: str
) -> None:
    """Draws at T = 1: the text is that of plain decoding, and all of it follows the grammar.

    Where there may be reasoning, ``closing`` ends it, somewhere in a draft.
    """
    source = grammar_of(markup, {}, KNOWN, "required", parallel=False, thinking=thinking)
    grammar = compile_grammar(vocabulary_of(tokenizer, len(tokenizer), (STOP,)), **source)
    plain, _ = drawn(engine, grammar, 0)
    texts, accepted = drawn(engine, grammar, 1)
    assert texts == plain
    for tokens, finish in texts:
        reading = Reading(markup, named(KNOWN), bool(thinking))
        content, _, calls, _ = read_out([*tokens], reading, tokenizer)
        assert (finish, content, len(calls)) == ("stop", "", 1)
    end = tokenizer.get_added_vocab()[closing]
    assert thinking is None or any(end in row for row in accepted)


@pytest.mark.parametrize(
    "template, thinking",
    [
        (HERMES, True),
        pytest.param(XML, True, marks=pytest.mark.full),
        pytest.param(HERMES, None, marks=pytest.mark.full),
    ],
)
def test_required_calls_parse_with_every_tree_also_where_the_reasoning_ends_in_a_draft(
    engine: Engine, template: str, thinking: bool | None
) -> None:
    given = talking_tokenizer(), marked(template), thinking
    assert_required_calls_parse(engine, *given, "</think>")
