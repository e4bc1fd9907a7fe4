"""The fields of tools: what a model may call, what it has called, and which call a client wants."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, Tag, model_validator

from longspec_jax.checks import OneOf, Rule, Text, Whole

from .fields import OBJECT, TEXT, Body, Refused, either

MOST_TOOLS = 128
"""Of a request."""
MOST_CALLS = 256
"""Of a message."""
LONGEST_DESCRIPTION = 2**16
LONGEST_ARGUMENTS = 2**20
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""Of a tool: no character that means something in what models write around it."""
AUTO, NONE, REQUIRED = "auto", "none", "required"


class ToolName(Rule):
    """The name of a tool."""

    def refusal(self, value: object) -> str | None:
        """The characters."""
        if isinstance(value, str) and NAME.fullmatch(value):
            return None
        return "a name of 1 to 64 letters, digits, _, . and -"

    @property
    def json_schema(self) -> dict[str, Any]:
        """The same as a pattern."""
        return {"type": "string", "pattern": f"^{NAME.pattern}$"}


Name = Annotated[str, ToolName()]


class Function(Body):
    """A function that the model may call."""

    name: Name
    """What the model calls it."""
    description: Annotated[str, Text(0, LONGEST_DESCRIPTION)] = ""
    """What it does, for the model."""
    parameters: dict[str, object] = {}
    """A JSON schema of its arguments, which are an object."""
    strict: bool = False
    """true: under tool_choice auto, too, a call satisfies the schema."""

    @model_validator(mode="after")
    def _check(self) -> "Function":
        if self.parameters.get("type", "object") != "object":
            raise ValueError("must have parameters of the type object: arguments have names")
        fields, needed = self.parameters.get("properties", {}), self.parameters.get("required", [])
        if not isinstance(fields, dict) or not all(
            isinstance(x, dict | bool) for x in fields.values()
        ):
            raise ValueError("must have parameters whose properties are an object of schemas")
        if not isinstance(needed, list) or not all(isinstance(one, str) for one in needed):
            raise ValueError("must have parameters whose required is a list of names")
        return self


class Tool(Body):
    """Something that the model may call."""

    type: Annotated[str, OneOf(("function",), "; other kinds of tools are not supported")]
    """Function."""
    function: Function
    """The function."""


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    """A function by its name."""

    name: Name
    """As in tools."""


class NamedTool(Body):
    """The tool that the model must call."""

    type: Annotated[str, OneOf(("function",), "; other kinds of choices are not supported")]
    """Function."""
    function: NamedFunction
    """Which one."""


_CHOICE = 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}'
ToolChoice = Annotated[
    Annotated[str, OneOf((NONE, AUTO, REQUIRED)), Tag(TEXT)] | Annotated[NamedTool, Tag(OBJECT)],
    either(_CHOICE),
]


def read_arguments(value: object) -> dict[str, Any] | str:
    """The arguments of a call, which clients write as text: templates want the object.

    Qwen3.5's fails on a text, and Qwen2.5's would quote it once more. An object that a model has
    not ended, or has written wrong, stays a text: agents send it back with what became of it.
    """
    if not isinstance(value, str) or len(value) > LONGEST_ARGUMENTS:
        raise ValueError(f"must be text of at most {LONGEST_ARGUMENTS} characters")
    found = object_of(value) if value.strip() else {}  # None were needed.
    if found is None and not value.lstrip().startswith("{"):
        raise ValueError("must be the text of a JSON object")
    return value if found is None else found


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is not one, or holds a number that JSON lacks."""
    try:
        found = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is larger than any number")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class CalledFunction(Body):
    """A function that was called."""

    name: Name
    """As in tools."""
    arguments: Annotated[
        dict[str, Any] | str, PlainValidator(read_arguments, json_schema_input_type=str)
    ] = {}
    """A JSON object, as text."""


class ToolCall(Body):
    """A call that the model has made."""

    id: Annotated[str, Text(0, 256)] = ""
    """That the tool's message repeats."""
    index: Annotated[int, Whole(0)] = 0
    """Has no effect; streams have it."""
    type: Annotated[str, OneOf(("function",))] = "function"
    """Function."""
    function: CalledFunction
    """What was called."""


ToolCalls = Annotated[list[ToolCall], Field(max_length=MOST_CALLS, fail_fast=True)]


def check_choice(tools: Sequence[Tool], choice: str | NamedTool) -> None:
    """Refuse tools of one name, and a choice that they cannot meet.

    Raises:
      Refused: names the field.
    """
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise Refused(f"tools has the name {name} twice; names tell tools apart", "tools")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            known = ", ".join(names) or "none"
            raise Refused(
                f"tool_choice names {choice.function.name}, which is not one of tools ({known})",
                "tool_choice",
            )
    elif choice == REQUIRED and not names:
        raise Refused("tool_choice=required needs tools", "tool_choice")


def objects_of(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as a template takes them."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def turn_of(call: ToolCall) -> dict[str, Any]:
    """A call as a template takes it."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def named(tools: Sequence[Tool]) -> Mapping[str, Function]:
    """Functions by their names."""
    return {tool.function.name: tool.function for tool in tools}
