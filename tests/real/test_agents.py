"""Agents over a released model: calls that are required always parse, and agents read results."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.real.kit import serving
from tests.serve.talker import HERMES, function

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(7200)]


def tool(name: str, about: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return function(name, schema, description=about)


NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
TOOLS = [
    tool("add", "Adds two numbers.", a=NUMBER, b=NUMBER),
    tool("weather", "Of a city.", city={"type": "string", "maxLength": 12}, unit={"enum": ["C"]}),
]
ROOM = {"type": "object", "properties": {"room": {"enum": ["hall", "attic"]}}, "required": ["room"]}
WORDS = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 3}
MORE = [
    *TOOLS,
    tool(
        "switch", "A lamp.", on={"type": "boolean"}, where={**ROOM, "additionalProperties": False}
    ),
    tool("note", "Keeps words.", words=WORDS),
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
SATISFIES: Mapping[str, Callable[[Any], bool]] = {
    "add": lambda given: all(type(one) is int and 0 <= one <= 999 for one in given.values()),
    "weather": lambda given: len(given["city"]) <= 12 and given["unit"] == "C",
    "switch": lambda given: (
        type(given["on"]) is bool and given["where"] in ({"room": "hall"}, {"room": "attic"})
    ),
    "note": lambda given: 1 <= len(given["words"]) <= 3 and {*given["words"]} <= {"red", "blue"},
    "now": lambda given: given == {},
}
CHOICES, REQUESTS = 4, 17
"""Each request is sent three times, so that 204 calls are drawn."""
TALK = [{"role": "user", "content": "What is the weather in Oslo? And what is 17 plus 25?"}]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    """Of an answer, whose arguments parse and satisfy the schema."""
    found = list[tuple[str, Any]]()
    for call in choice.message.tool_calls or []:
        name, arguments = call.function.name, json.loads(call.function.arguments)
        [function] = [one["function"] for one in MORE if one["function"]["name"] == name]
        assert [*arguments] == function.get("parameters", {}).get("required", []), arguments
        assert SATISFIES[name](arguments), arguments
        found.append((name, arguments))
    return found


def check_draws(client: OpenAI, requests: int, most: int) -> int:
    """Draw required and named calls at temperature 1: whole, streamed and plainly they are one.

    Rows with and without speculation run next to each other.

    Args:
      client: of a server.
      requests: of several choices, each sent three times.
      most: tokens of an answer; every call must end within.

    Returns:
      How many calls were drawn.
    """

    def asked(seed: int) -> dict[str, Any]:
        tools = [MORE[seed % 5], MORE[(seed + 2) % 5]]
        name = tools[seed // 2 % 2]["function"]["name"]
        named = {"type": "function", "function": {"name": name}}
        fields = {"model": client.models.list().data[0].id, "messages": TALK, "tools": tools}
        fields |= {"tool_choice": named if seed % 2 else "required", "parallel_tool_calls": False}
        return fields | {"n": CHOICES, "seed": 100 * seed, "temperature": 1.0, "max_tokens": most}

    def told(answer: Any) -> list[tuple[str, Any]]:
        found = list[tuple[str, Any]]()
        for choice in sorted(answer.choices, key=lambda one: one.index):
            assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
            [call] = calls_of(choice)
            found.append(call)
        assert len(found) == CHOICES
        return found

    def whole(seed: int, speculation: bool) -> list[tuple[str, Any]]:
        more = {"longspec": {"speculation": speculation}}
        return told(client.chat.completions.create(**asked(seed), extra_body=more))

    def streamed(seed: int) -> list[tuple[str, Any]]:
        with client.chat.completions.stream(**asked(seed)) as stream:
            stream.until_done()
            return told(stream.current_completion_snapshot)

    def drawn(seed: int) -> int:
        ours, plain, parts = whole(seed, True), whole(seed, False), streamed(seed)
        assert ours == plain == parts, seed
        assert not seed % 2 or {name for name, _ in ours} == {
            asked(seed)["tool_choice"]["function"]["name"]
        }
        return len(ours) + len(plain) + len(parts)

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(drawn, range(requests)))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: Any) -> Iterator[OpenAI]:
    """With a joined tree; its tokenizer has no tokens of calls, so that their marks are texts."""
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES + "assistant:")
    options = ["--draft=smollm2-longspec", "--draft=ngram", "--tree=4,4@12~6", "--max_num_seqs=4"]
    with serving("smollm2", f"--chat_template={template}", *options, "--max_model_len=512") as one:
        yield one


def test_an_agent_of_five_calls(smollm2: OpenAI) -> None:
    """Each call and what it has brought go back; streamed in turns, and whole."""
    messages: list[Any] = [*TALK]
    for turn in range(5):
        fields: Any = {"model": "smollm2", "messages": messages, "tools": TOOLS[:1], "seed": turn}
        fields |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
        if turn % 2:
            with smollm2.chat.completions.stream(**fields) as stream:
                stream.until_done()
            [one] = stream.current_completion_snapshot.choices
        else:
            [one] = smollm2.chat.completions.create(**fields).choices
        [(_, arguments)] = calls_of(one)
        [call] = one.message.tool_calls or []
        function = {"name": call.function.name, "arguments": call.function.arguments}
        called = {"id": call.id, "type": "function", "function": function}
        said = str(arguments["a"] + arguments["b"])
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.id, "content": said},
        ]


def test_every_drawn_call_parses(smollm2: OpenAI) -> None:
    assert check_draws(smollm2, REQUESTS, most=100) >= 200
