"""An agent's loop over the real engine, with OpenAI's own client, whole and streamed."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.lib.streaming.chat import ContentDeltaEvent
from pydantic import BaseModel

from infer.serve.command import served_model
from tests.infer.toys import TREE
from tests.serve.kit import Client, serving
from tests.serve.talker import HERMES, THINKING, TOOLS, XML, function, talking_spec

TALK: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
NAMED: Any = function("weather")
FORM: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}


def served(template: str, marks: bool = True) -> Any:
    spec = talking_spec(marks)
    reported = {"logprobs": 5, "enable_penalties": True, "return_trees": True, "grammars": True}
    engine = spec.engine(max_num_seqs=2, max_model_len=2048, prefixes=True, **reported)
    model = served_model(spec, engine, names=("toy",), max_len=2048, most_rows=8, template=template)
    return serving(engine, model, queue_tokens=64 * 2048, levels=TREE.num_levels)


@pytest.fixture(scope="module")
def server() -> Any:
    with served(HERMES + THINKING) as client:
        client.timeout = 300
        yield client


def client_of(server: Client) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def asked(seed: int, **fields: Any) -> dict[str, Any]:
    """A short thought, so that a random model's does not fill the context."""
    bias = {"258": 5.0, "260": 5.0}  # </think> and </tool_call>.
    own = {"model": "toy", "messages": TALK, "seed": seed, "tools": TOOLS, "max_tokens": 300}
    return own | {"logit_bias": bias} | fields


def together(answer: Callable[[int], Any], seeds: int) -> Iterator[Any]:
    """Answers of several seeds, in slots next to each other: rounds are what costs time here."""
    with ThreadPoolExecutor(seeds) as pool:
        yield from pool.map(answer, range(seeds))


def arguments_of(call: Any) -> dict[str, Any]:
    found = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert {"city", "unit"} <= found.keys() and found["unit"] in ("C", "F")
    else:
        assert call.function.name == "now" and found == {}
    return found


def test_an_agent_calls_tools_and_reads_what_they_say(server: Client) -> None:
    """Five turns, required and named in turns; reasoning, calls and results go back each time."""
    client, messages = client_of(server), [*TALK]
    for turn in range(5):
        choice = NAMED if turn % 2 else "required"
        answer = client.chat.completions.create(
            **asked(turn, messages=messages, tool_choice=choice, parallel_tool_calls=False)
        )
        [one] = answer.choices
        assert one.finish_reason == "tool_calls" and one.message.content is None
        [call] = one.message.tool_calls or []
        arguments_of(call)
        assert choice == "required" or call.function.name == "weather"
        usage: Any = answer.usage
        thought = usage.completion_tokens_details.reasoning_tokens
        extra: Any = one.message.model_extra
        assert extra.get("reasoning", "") == extra.get("reasoning_content", "")
        assert bool(extra.get("reasoning")) <= (thought > 0)
        messages += [
            one.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": f"{turn} degrees"},
        ]


@pytest.mark.full  # In the first tier test_tools reads answers the same however they come.
def test_a_stream_joins_to_the_whole_answer(server: Client) -> None:
    """By the openai client's own joining, which appends what comes twice."""
    client, seen = client_of(server), 0

    def answers(seed: int) -> tuple[Any, Any]:
        fields = asked(seed, tool_choice="required")
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            for event in stream:
                assert not (isinstance(event, ContentDeltaEvent) and event.delta)
            return whole, stream.current_completion_snapshot.choices[0]

    for whole, joined in together(answers, 3):
        calls, streamed = whole.message.tool_calls or [], joined.message.tool_calls or []
        told = [(call.function.name, call.function.arguments) for call in calls]
        assert told == [(call.function.name, call.function.arguments) for call in streamed]
        assert len({call.id for call in streamed}) == len(streamed) == len(calls)
        assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in streamed)
        assert joined.finish_reason == whole.finish_reason
        theirs: Any = joined.message.model_extra
        ours: Any = whole.message.model_extra
        assert theirs.get("reasoning_content") == ours.get("reasoning_content")
        seen += len(calls)
    assert seen >= 3


def test_arguments_are_told_as_they_are_made(server: Client) -> None:
    """By the rules of clients that join: a place in each, id and name once, no place twice."""
    client, fields = client_of(server), asked(1, tool_choice=NAMED, stream=True)
    told, chunks = dict[int, str](), 0
    for chunk in client.chat.completions.create(**fields):
        places = list[int]()
        for call in chunk.choices[0].delta.tool_calls or []:
            places.append(call.index)
            assert call.function is not None
            new = call.index not in told
            assert [bool(call.id), bool(call.function.name), bool(call.type)] == [new] * 3
            arguments = told.get(call.index, "") + (call.function.arguments or "")
            told[call.index] = arguments
        assert len({*places}) == len(places)
        chunks += bool(places)
    assert [*told] == [*range(len(told))]
    assert all("city" in json.loads(arguments) for arguments in told.values())
    assert chunks > 2 * len(told) > 0


def test_a_neighbours_tools_change_no_text(server: Client) -> None:
    """Two clients whose prompts begin alike, each with schemas of its own."""

    def answer(seed: int) -> Any:
        tools = [odd({"enum": [f"{seed % 2}x", "y"]}, additionalProperties=False)]
        fields = asked(seed, tools=tools, tool_choice="required", parallel_tool_calls=False)
        [call] = client_of(server).chat.completions.create(**fields).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["a"] in (f"{seed % 2}x", "y")
        return call.function.arguments

    alone = [answer(seed) for seed in range(2)]
    assert [*together(answer, 2)] == alone


def test_a_form_begins_behind_the_reasoning(server: Client) -> None:
    """The template opens it; without it the form is all of the text."""
    client = client_of(server)
    for seed, thinks in ((1, True), (2, True), (3, False)):
        body = {"chat_template_kwargs": {"enable_thinking": thinks}}
        answer = client.chat.completions.create(
            **asked(seed, response_format=FORM, extra_body=body, tools=[])
        )
        message = answer.choices[0].message
        assert json.loads(message.content or "").keys() == {"ok"}
        usage: Any = answer.usage
        assert (usage.completion_tokens_details.reasoning_tokens > 0) <= thinks


def test_parsed_answers_of_the_client(server: Client) -> None:
    """Its typed tools are strict."""

    class Rain(BaseModel):
        city: str
        soon: bool

    import openai

    tool = openai.pydantic_function_tool(Rain)
    tool["function"]["parameters"]["properties"]["city"]["maxLength"] = 5  # type: ignore[index]
    found = client_of(server).chat.completions.parse(
        **asked(4, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    )
    [call] = found.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Rain)


@pytest.mark.full
def test_tags_of_the_second_form_and_marks_that_are_texts() -> None:
    def called(seed: int) -> Any:
        fields = asked(seed, tool_choice=NAMED, logit_bias={}, parallel_tool_calls=False)
        return client_of(server).chat.completions.create(**fields).choices[0]

    for template, marks in ((XML, True), (HERMES, False)):
        with served(template, marks) as server:
            server.timeout = 300
            for choice in together(called, 2):
                for call in choice.message.tool_calls or []:
                    arguments_of(call)
                assert choice.finish_reason == "tool_calls"


def test_refusals_name_the_field(server: Client) -> None:
    assistant = {"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]}
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("tools", "has the name now twice", {"tools": [TOOLS[1], TOOLS[1]]}),
        (
            "tools",
            "other kinds of tools are not supported",
            {"tools": [{"type": "web", "function": {"name": "a"}}]},
        ),
        ("tools", "at most 128 items", {"tools": [TOOLS[1]] * 129}),
        (
            "tool_choice",
            "tool_choice=required needs tools",
            {"tools": [], "tool_choice": "required"},
        ),
        (
            "tool_choice",
            "is not one of tools (weather, now)",
            {"tool_choice": function("w")},
        ),
        ("tool_choice", "must be one of none, auto, required", {"tool_choice": "any"}),
        ("tools", "the tool deep: a schema of more than 32 levels", must(deep())),
        (
            "tools",
            "the tool odd: no finite text satisfies the schema: #/$defs/a needs itself",
            must(odd({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}})),
        ),
        ("tools", "the tool odd: the grammar cannot be used", must(TOOLS[1], odd({"type": "?"}))),
        (
            "tools",
            "look-around, including look-ahead and look-behind, is not supported",
            must(odd({"type": "string", "pattern": "(?=a)b"})),
        ),
        ("tools", "required is a list of names", must(odd({}, required="a"))),
        ("tools", "properties are an object of schemas", must(odd([]))),
        (
            "messages",
            "messages[0].tool_calls[0].function.arguments='[1]' must be the text of a JSON object",
            {"messages": [with_arguments("[1]")]},
        ),
        ("messages", "only an assistant's message", {"messages": [{**assistant, "role": "user"}]}),
        ("chat_template_kwargs", "'color'", {"chat_template_kwargs": {"color": 1}}),
        ("chat_template_kwargs", "'message.role'", {"chat_template_kwargs": {"message.role": 1}}),
        ("chat_template_kwargs", "another field says", {"chat_template_kwargs": {"tools": 1}}),
        ("reasoning_effort", "does not name it", {"reasoning_effort": "low"}),
    ]
    for field, words, fields in wrong:
        with pytest.raises(BadRequestError) as caught:
            client_of(server).post("/chat/completions", body=asked(0, **fields), cast_to=object)
        error: Any = caught.value.body
        assert error["param"] == field and words in error["message"], error


def with_arguments(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def must(*tools: Any) -> dict[str, Any]:
    return {"tools": [*tools], "tool_choice": "required"}


def odd(of_a: Any, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": of_a}, "required": ["a"], **more}
    return function("odd", schema)


def deep() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(17):
        schema = {"type": "object", "properties": {"a": schema}}
    return function("deep", schema)
