"""Agents over a released model: calls that are required always parse, and agents read results."""

import json
from collections.abc import Iterator
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
TALK = [{"role": "user", "content": "What is the weather in Oslo? And what is 17 plus 25?"}]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    """Of an answer, whose arguments parse and satisfy the schema."""
    found = list[tuple[str, Any]]()
    for call in choice.message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "add":
            assert arguments.keys() == {"a", "b"}
            assert all(isinstance(one, int) and 0 <= one <= 999 for one in arguments.values())
        else:
            assert call.function.name == "weather" and arguments.keys() == {"city", "unit"}
            assert len(arguments["city"]) <= 12 and arguments["unit"] == "C"
        found.append((call.function.name, arguments))
    return found


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
