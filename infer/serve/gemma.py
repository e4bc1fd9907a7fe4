"""Gemma 4's calls of tools: bare keys, and texts between tokens of their own.

    <|tool_call>call:NAME{city:<|"|>Oslo<|"|>,days:3,units:[<|"|>C<|"|>]}<tool_call|>

Source: the chat template of Gemma 4, which sorts the keys of objects by their lower-case letters.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from longspec_jax.checks import shown
from longspec_jax.generation.grammar import check_schema, referred

from .forms import LONGEST_VALUE, Around, CallReader, escaped, literal, properties_of, value_of
from .tools import NAME, Function

QUOTE = '<|"|>'
"""The token at both ends of a text; the same letters in other tokens mean nothing."""
_KEY = re.compile(r"[\w.$-]{1,256}")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_READ = (
    *("type", "nullable", "enum", "const", "anyOf", "oneOf", "$ref", *_NUMBERS),
    *("minLength", "maxLength", "items", "minItems", "maxItems", "properties", "required"),
)
_WITHOUT_EFFECT = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$schema", "$id", "pattern", "format", "additionalProperties"),
)
"""What says nothing of a value, and what does not bind."""
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), int),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "required"), list),
    **{"type": (str, list), "$ref": str, "properties": Mapping},
}
"""Of what is read here and not by the library of grammars."""


class Gemma:
    """A name, and arguments in a notation of their own."""

    name: ClassVar[str] = "Gemma 4 (<|tool_call> with call:NAME{...})"
    around: ClassVar[Around] = Around(
        thought=("<|channel>", "<channel|>"),
        head="thought\n",
        call=("<|tool_call>", "<tool_call|>"),
        between="",
        quote=QUOTE,
    )

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """Arguments by their schema, in the order in which the template shows them."""
        check_schema(function.parameters)
        rules = _Rules(index, function.parameters)
        arguments = rules.object(function.parameters) if function.parameters else '"{}"'
        yield f"inside_{index}: {literal(f'call:{function.name}')} {arguments}"
        yield from rules.lines

    def reader(self, functions: Mapping[str, Function]) -> CallReader:
        """Texts are sent as they are written, other values when they end."""
        return GemmaReader(functions)


class _Rules:
    """The grammar of the values of one tool."""

    def __init__(self, index: int, root: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._prefix, self._root = f"g_{index}", root
        self._known: dict[str, str] = {}
        """Rules of what references name, and of any value."""

    def _named(self, rule: str) -> str:
        """The name of a further rule."""
        self.lines.append(f"{self._prefix}_{len(self.lines)}: {rule}")
        return self.lines[-1].partition(":")[0]

    def _once(self, key: str, schema: object) -> str:
        """A rule that may name itself."""
        if key not in self._known:
            place = len(self.lines)
            self._known[key] = self._named("")
            self.lines[place] += self._any() if schema is None else self.value(schema)
        return self._known[key]

    def _any(self) -> str:
        number = self._named('%json {"type": ["number", "boolean", "null"]}')
        each = self._known[""]
        return f"quote ANY quote | {number} | {_list(each)} | {_object(each)}"

    def value(self, schema: object) -> str:
        """A value of a schema.

        Raises:
          ValueError: for what is not written so.
        """
        if schema is True or schema == {}:
            return self._once("", None)
        if not isinstance(schema, Mapping):
            raise ValueError(f"{json.dumps(schema)[:80]} is no schema of a value")
        if unknown := [key for key in schema if key not in (*_READ, *_WITHOUT_EFFECT)]:
            raise ValueError(
                f"{unknown[0]} cannot be written as a grammar of Gemma's calls; known are "
                f"{', '.join(_READ)}"
            )
        for key, kind in _TYPES.items():
            if key in schema and not isinstance(schema[key], kind):
                raise ValueError(f"{key}={shown(schema[key])} is nothing that JSON schemas have")
        choices = self._choices(schema) + (['"null"'] if schema.get("nullable") else [])
        return f"({' | '.join(choices)})"

    def _choices(self, schema: Mapping[str, Any]) -> list[str]:
        if isinstance(reference := schema.get("$ref"), str):
            return [self._once(reference, _referred(self._root, reference))]
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if words is not None:
            return [*map(_constant, words)]
        for several in ("anyOf", "oneOf"):
            if schema.get(several):
                if others := [key for key in schema if key in _READ and key != several]:
                    raise ValueError(f"{several} next to {others[0]} is not written; choose one")
                return [*map(self.value, schema[several])]
        found = schema.get("type") or next(
            (kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema),
            None,
        )
        if found is None:
            return [self._once("", None)]
        kinds = [found] if isinstance(found, str) else found
        return [self._of_type(kind, schema) for kind in kinds]

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                least, most = schema.get("minLength", 0), schema.get("maxLength", "")
                if not least and (most == "" or most > LONGEST_VALUE):
                    return "quote ANY quote"
                return f"quote /(?s:.){{{least},{most}}}/ quote"
            case "array":
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                return _list(self.value(schema.get("items", True)), least, most)
            case "object":
                return self.object(schema)
            case "integer" | "number" | "boolean" | "null":
                own = {key: schema[key] for key in _NUMBERS if key in schema}
                return self._named(f"%json {json.dumps({'type': kind, **own})}")
        raise ValueError(f"{kind!r} is not a type of JSON")

    def object(self, schema: Mapping[str, Any]) -> str:
        """An object: only the fields that it names, unless it names none."""
        fields, needed = properties_of(schema), schema.get("required", [])
        if unknown := [name for name in needed if not isinstance(name, str) or name not in fields]:
            raise ValueError(f"{shown(unknown[0])} is required and not one of the properties")
        if not fields:
            others = schema.get("additionalProperties", True)
            return '"{}"' if others is False else _object(self.value(others))
        rest, first = "", '""'
        # From the last: what may come after a field, and all that may come from it on.
        for name in sorted(fields, key=str.lower, reverse=True):
            if not _KEY.fullmatch(name):
                raise ValueError(f"the parameter {name[:80]!r} cannot be written without quotes")
            field = self._named(f"{literal(f'{name}:')} {self.value(fields[name])}")
            behind = f"{field} {rest}"
            first = behind if name in needed else f"({behind} | {first})"
            optional = "" if name in needed else "?"
            rest = self._named(f'("," {field}){optional} {rest}')
        return f'"{{" {first} "}}"'


def _list(value: str, least: int = 0, most: int | None = None) -> str:
    if most == 0:
        return '"[]"'
    more = f'("," {value}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    return f'"[" ({value} {more}){"" if least else "?"} "]"'


def _object(value: str) -> str:
    """The grammar of an object with any keys."""
    pair = f'/{_KEY.pattern}/ ":" {value}'
    return f'"{{" ({pair} ("," {pair})*)? "}}"'


def _constant(value: object) -> str:
    """A value, as a rule."""
    if isinstance(value, str):
        return f"quote {literal(value)} quote"
    if isinstance(value, list | dict):
        raise ValueError(f"{json.dumps(value)[:80]}: choices of lists and objects are not written")
    return literal(json.dumps(value))


def _referred(root: Mapping[str, Any], reference: str) -> object:
    found = referred(root, reference)
    shared = reference == "#" or reference.startswith(("#/$defs/", "#/definitions/"))
    if found is None or not shared:
        raise ValueError(f"{reference} is no definition of the schema")
    return found


class GemmaReader:
    """Makes JSON of a call; members as in :class:`~infer.serve.forms.CallReader`."""

    _HEAD = re.compile(rf"\s*call:\s*({NAME.pattern})\s*\{{")

    def __init__(self, functions: Mapping[str, Function]) -> None:
        """Begin after the opening mark."""
        self._functions = functions
        self.name: str | None = None
        self.whole, self.rest = False, ""
        self._bare = ""
        """Of the head, a key, or a value that is no text."""
        self._open = ""
        """Brackets that are open, the outermost first."""
        self._in_key, self._quoted, self._separator = True, False, ""

    def read(self, text: str) -> str:
        """Read on; a token at the end of a text comes by itself."""
        if text == QUOTE and self.name is not None:
            return self._quote()
        told = ""
        for at, letter in enumerate(text):
            if self.name is None:
                told += self._begin(letter)
            elif not self._quoted:
                told += self._letter(letter)
            elif self._in_key:
                self._bare += letter
            else:
                told += escaped(letter)
            if self.whole:
                self.rest = text[at + 1 :]
                break
        return told

    def _begin(self, letter: str) -> str:
        """A letter of the head, or of what is no call."""
        self._bare += letter
        found = self._HEAD.fullmatch(self._bare) if letter == "{" else None
        if found is None or found[1] not in self._functions:
            return ""
        self.name, self._bare, self._open = found[1], "", letter
        return letter

    def _quote(self) -> str:
        """A text begins or ends."""
        self._quoted = not self._quoted
        if self._in_key:
            return ""
        told, self._separator = f'{self._separator if self._quoted else ""}"', ""
        return told

    def _letter(self, letter: str) -> str:
        """A letter that is no text's."""
        if letter in "{[" and not self._in_key:
            self._open, self._in_key = self._open + letter, letter == "{"
            told, self._separator = self._separator + letter, ""
            return told
        if letter == ":" and self._in_key:
            key, self._bare, self._in_key = self._bare.strip(), "", False
            told, self._separator = f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ", ""
            return told
        if letter not in ",]}":
            self._bare += letter
            return ""
        told = self._value()
        if letter == ",":
            self._separator, self._in_key = ", ", self._open[-1] == "{"
            return told
        bracket = "}" if self._open[-1] == "{" else "]"
        self._open, self._separator, self._in_key = self._open[:-1], "", False
        self.whole = not self._open
        return told + bracket

    def _value(self) -> str:
        """What was written without quotes."""
        bare, self._bare = self._bare.strip(), ""
        if not bare or self._in_key:
            return ""
        told, self._separator = self._separator + json.dumps(value_of(bare, set())), ""
        return told

    def close(self) -> str:
        """Texts that are open stay so."""
        if self.whole or self.name is None or self._quoted:
            return ""
        told = self._value()
        return told + "".join("}" if one == "{" else "]" for one in reversed(self._open))


def turns_with_responses(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as Gemma's template takes them: what tools say belongs to the message that calls.

    Its versions differ in whether they read messages of the role ``tool``, too.

    Raises:
      ValueError: for a tool's message that answers no call.
    """
    found = list[dict[str, Any]]()
    for turn in turns:
        if turn["role"] != "tool":
            found.append({**turn})
            continue
        said = found[-1].get("tool_responses", []) if found else []
        calls = found[-1].get("tool_calls", []) if found else []
        if len(said) >= len(calls):
            raise ValueError("a tool's message must follow the message that calls the tool")
        named = (call for call in calls if call["id"] == turn.get("tool_call_id", ""))
        answered = next(named, calls[len(said)])
        response = {"name": answered["function"]["name"], "response": turn["content"]}
        found[-1]["tool_responses"] = [*said, response]
    return found
