"""Forms of calls of tools: the grammar of each, and how it is read as it comes.

A reader turns what stands between the marks of a call into the JSON of its arguments, a fragment
for each text. It never takes back what it has told: once it has found the name of a tool, the text
is a call, and its arguments are what the model writes, whole or not. Clients check arguments, as
OpenAI's protocol asks of them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from longspec_jax.generation.grammar import check_schema, referred

from .tools import NAME, Function, object_of

COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""JSON as models were taught to write it, and with no space in which a text could go on."""
LONGEST_VALUE = 10_000
"""Largest ``maxLength`` of a text between tags that the grammar counts."""
CONSTANTS = {"None": None, "True": True, "False": False}
"""What models write like Python."""


@dataclass(frozen=True)
class Around:
    """What stands around reasoning, calls and texts, where a form has it."""

    thought: tuple[str, str] = ("<think>", "</think>")
    """Around reasoning."""
    head: str = ""
    """After what opens it."""
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """Around a call."""
    between: str = "\n"
    """Two calls."""
    quote: str = ""
    """On both sides of a text in a call, if that is a token. All of these are then needed."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All marks."""
        return *self.thought, *self.call, *filter(None, [self.quote])


class CallReader(Protocol):
    """Reads one call after its opening mark."""

    name: str | None
    """Of the tool; None while no known one was named."""
    whole: bool
    """Whether the form has ended; without a name the text is no call."""
    rest: str
    """What stands after the form's end."""

    def read(self, text: str) -> str:
        """Read on; what the JSON of the arguments has gained."""
        ...

    def close(self) -> str:
        """The closing mark has come; what the JSON of the arguments still gains."""
        ...


class CallRules(Protocol):
    """The grammar of a call."""

    name: ClassVar[str]
    """Of the form, for clients."""

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """Lines of a grammar; the first is what stands between the marks.

        Args:
          index: of the tool, for the names of rules.
          function: that is called.

        Raises:
          ValueError: for parameters that cannot be written so.
        """
        ...


class CallForm(CallRules, Protocol):
    """How a call is written between its marks."""

    around: ClassVar[Around]
    """Its marks, and those of the reasoning next to it."""

    def reader(self, functions: Mapping[str, Function]) -> CallReader:
        """What reads a call of one of these functions."""
        ...


class Hermes:
    """One JSON object with name and arguments."""

    name: ClassVar[str] = "Hermes (<tool_call> with a JSON object)"
    around: ClassVar[Around] = Around()

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """The arguments by their schema."""
        begin = literal(f'\n{{"name": "{function.name}", "arguments": ')
        end = literal("}\n")
        yield f"inside_{index}: {begin} arguments_{index} {end}"
        yield f"arguments_{index}: {json_rule(closed(function.parameters))}"

    def reader(self, functions: Mapping[str, Function]) -> CallReader:
        """Arguments are sent as they are written where the name comes first."""
        return HermesReader(functions)


class HermesReader:
    """Finds the arguments within the object; members as in :class:`CallReader`."""

    _HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"arguments"\s*:\s*')

    def __init__(self, functions: Mapping[str, Function]) -> None:
        """Begin in front of the object."""
        self._functions = functions
        self.name: str | None = None
        self.whole, self.rest = False, ""
        self._raw = ""
        """All of it, while no name is known."""
        self._depth, self._quoted, self._escaped = 0, False, False
        self._inside, self._deep = False, False
        """Whether the arguments are being read, and whether the object has held another."""

    def read(self, text: str) -> str:
        """Read on."""
        begin = end = 0 if self._inside else len(text)
        for at, letter in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
                if self._depth == 2 and not self._deep:
                    self._deep = True
                    if self._named(self._raw + text[:at], letter):
                        begin = at
            elif letter in "}]":
                self._depth -= 1
                if self._inside and self._depth <= 1:
                    self._inside, end = False, at + 1
            if self._depth <= 0 and not letter.isspace():
                self.whole, self.rest = True, text[at + 1 :]
                break
        if self._inside:
            end = len(text)
        if self.name is not None:
            return text[begin:end]
        self._raw += text[: len(text) - len(self.rest)]
        return self.close() if self.whole else ""

    def _named(self, head: str, letter: str) -> bool:
        """Whether the arguments of a known tool begin here."""
        found = self._HEAD.fullmatch(head) if letter == "{" else None
        if found is None or found[1] not in self._functions:
            return False
        self.name, self._inside = found[1], True
        return True

    def close(self) -> str:
        """An object with its name at the end is read when it is whole."""
        found = object_of(self._raw) if self.name is None else None
        name, arguments = (found or {}).get("name"), (found or {}).get("arguments")
        if not isinstance(name, str) or name not in self._functions:
            return ""
        if not isinstance(arguments, dict):
            return ""
        self.name = name
        return json.dumps(arguments, ensure_ascii=False)


class Tags:
    """A tag for the function, and one for each parameter around its value.

    Texts stand as they are, everything else as JSON.
    """

    name: ClassVar[str] = "Qwen3-Coder (<tool_call> with <function=NAME>)"
    around: ClassVar[Around] = Around()

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """Parameters in the order of the schema."""
        schema = function.parameters
        parameters, own = properties_of(schema), list[str]()
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
        if unknown := [name for name in needed if name not in parameters]:
            raise ValueError(f"{unknown[0]!r} is required and not one of the properties")
        known = dict[str, set[str]]()
        for place, name in enumerate(parameters):
            own.append(f"p_{index}_{place}" + ("" if name in needed else "?"))
        begin, end = literal(f"\n<function={function.name}>\n"), literal("</function>\n")
        yield f"inside_{index}: {begin} {' '.join(own)} {end}"
        for place, (name, one) in enumerate(parameters.items()):
            if re.search(r"[>\n]", name) or not 1 <= len(name) <= 256:
                raise ValueError(f"the parameter {name[:80]!r} cannot be written between tags")
            rule, begin = f"{index}_{place}", literal(f"<parameter={name}>\n")
            end = literal("\n")
            yield f"p_{rule}: {begin} v_{rule} {end}"
            yield from self._value(rule, one, schema, types_of(one, schema, known))

    def _value(
        self, rule: str, schema: object, root: Mapping[str, object], kinds: set[str]
    ) -> Iterator[str]:
        """A value of some types and the tag after it."""
        end = literal("\n</parameter>")
        words = schema.get("enum") if isinstance(schema, Mapping) else None
        if "string" not in kinds:
            yield f"v_{rule}: j_{rule} {end}"
            yield f"j_{rule}: {json_rule(of_parameter(schema, root))}"
        elif isinstance(words, list) and words and all(isinstance(one, str) for one in words):
            # A terminal, by its letters: of choices between rules the library has a bound.
            yield f"v_{rule}: W_{rule} {end}"
            yield f"W_{rule}: {' | '.join(map(literal, words))}"
        else:
            most = schema.get("maxLength") if isinstance(schema, Mapping) else None
            bound = f"{{0,{most}}}" if isinstance(most, int) and most <= LONGEST_VALUE else "*"
            yield f"v_{rule}[suffix={end}]: /(?s:.){bound}/"

    def reader(self, functions: Mapping[str, Function]) -> CallReader:
        """A text is sent as it is written, another value when its tag closes."""
        return TagsReader(functions)


class TagsReader:
    """Makes JSON of tags, from which it leaves when they end; as in :class:`CallReader`."""

    _FUNCTION = re.compile(rf"\s*<function=({NAME.pattern})>")
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(?:(\n)|(?=[^\n]))")
    _END = re.compile(r"\s*</function>")
    _LONGEST_TAG = 512
    """Characters in which a tag must have ended."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        """Begin in front of the function's tag."""
        self._functions = functions
        self.name: str | None = None
        self.whole, self.rest = False, ""
        self._text, self._searched = "", 0
        """What was not sent yet, up to where no closing tag begins."""
        self._closing = ""
        """Of the open value; empty between values."""
        self._types = set[str]()
        """Of the open value."""
        self._count = 0
        self._known = dict[str, set[str]]()

    def read(self, text: str) -> str:
        """Read on."""
        self._text += text
        told = ""
        while (more := self._step()) is not None:
            told += more
        return told

    def _step(self) -> str | None:
        """What the next tag or value says; None where more must come."""
        if self.whole:
            return None
        if self._closing:
            return self._value()
        if self.name is None:
            if (found := self._FUNCTION.match(self._text)) is None:
                return self._stuck()
            if found[1] not in self._functions:
                return self._finish(found.end(), "")
            self.name, self._text = found[1], self._text[found.end() :]
            return "{"
        if (found := self._PARAMETER.match(self._text)) is not None:
            return self._begin(found)
        if (found := self._END.match(self._text)) is not None:
            return self._finish(found.end(), "}")
        return self._stuck()

    def _begin(self, found: re.Match[str]) -> str:
        """A parameter's tag."""
        schema = self._functions[self.name or ""].parameters
        self._types = types_of(properties_of(schema).get(found[1]), schema, self._known)
        self._text, self._searched = self._text[found.end() :], 0
        self._closing = f"{found[2] or ''}</parameter>"
        comma, self._count = ", " if self._count else "", self._count + 1
        quote = '"' if self._is_text else ""
        return f"{comma}{json.dumps(found[1], ensure_ascii=False)}: {quote}"

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _value(self) -> str | None:
        """More of an open value, or its end."""
        at = self._text.find(self._closing, self._searched)
        if at < 0 and not self._is_text:
            self._searched = max(self._searched, len(self._text) - len(self._closing) + 1)
            return None
        cut = at if at >= 0 else len(self._text) - overlap(self._text, self._closing)
        value, self._text = self._text[:cut], self._text[cut:]
        if at < 0:
            return escaped(value) or None
        self._text, self._closing = self._text[len(self._closing) :], ""
        if self._is_text:
            return f'{escaped(value)}"'
        return json.dumps(value_of(value, self._types), ensure_ascii=False)

    def _stuck(self) -> str | None:
        """What is no tag ends the call."""
        waiting = self._text.lstrip()
        tags = ("<function=",) if self.name is None else ("<parameter=", "</function>")
        begun = any(waiting[: len(tag)] == tag[: len(waiting)] for tag in tags)
        if begun and len(self._text) < self._LONGEST_TAG:
            return None
        return self._finish(0, "" if self.name is None else "}")

    def _finish(self, at: int, told: str) -> str:
        self.whole, self.rest, self._text = True, self._text[at:], ""
        return told

    def close(self) -> str:
        """Values that are open stay so."""
        return "" if self.whole or self.name is None or self._closing else "}"


def overlap(text: str, mark: str) -> int:
    """Letters at the end of a text with which a mark may begin."""
    return next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))


def escaped(text: str) -> str:
    """A text as JSON writes it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal(text: str) -> str:
    """A text as a grammar quotes it."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: object) -> str:
    """JSON of a schema, as a rule.

    Raises:
      ValueError: for a schema of too many levels, and one without an end.
    """
    check_schema(schema)
    return f"%json {json.dumps(schema)}"


def closed(schema: Mapping[str, object]) -> dict[str, object]:
    """A schema of arguments, compact.

    There are no others than it names, unless it names none: a tool without a schema takes none.
    """
    own = {"additionalProperties": False} if properties_of(schema) or not schema else {}
    return {"type": "object", **own, **schema, "x-guidance": COMPACT}


def properties_of(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schemas of an object's fields."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


SHARED = "$defs", "definitions"
"""Where a schema has what its references name."""
WHOLE = "all-parameters"
"""Names the schema of all parameters among what that of one refers to."""


def of_parameter(schema: object, root: Mapping[str, object]) -> dict[str, object]:
    """The schema of one parameter, with what it refers to.

    A reference to the root is one to the schema of all parameters, and not to this one.
    """
    found = set[str]()

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        own = {key: moved(each) for key, each in value.items()}
        reference = value.get("$ref")
        if not isinstance(reference, str) or not re.match("#(/|$)", reference):
            return own
        if reference[2:].partition("/")[0] in SHARED:
            return own
        found.add(reference)
        return {**own, "$ref": f"#/$defs/{WHOLE}{reference[1:]}"}

    own, shared = moved(schema), {name: moved(root[name]) for name in SHARED if name in root}
    if found:
        whole = moved({name: each for name, each in root.items() if name not in SHARED})
        others = shared.get("$defs")
        shared["$defs"] = {**(others if isinstance(others, Mapping) else {}), WHOLE: whole}
    return {**shared, **own} if isinstance(own, Mapping) else shared


def types_of(
    schema: object,
    root: Mapping[str, object],
    known: dict[str, set[str]],
    level: int = 0,
) -> set[str]:
    """JSON's types that a schema allows; empty where it does not say.

    Args:
      schema: of a parameter.
      root: holds what references name.
      known: types of what they name, which is filled: each is followed once for all parameters, so
        that the work is that of reading the schema.
      level: of nested references and choices; 8 are followed.
    """
    if not isinstance(schema, Mapping) or level > 8:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        if reference in known:
            return known[reference]
        known[reference] = set()  # Where it refers to itself.
        if reference == "#":  # All parameters.
            known[reference] = {"object"}
            return known[reference]
        known[reference] = types_of(referred(root, reference), root, known, level + 1)
        return known[reference]
    own = schema.get("type")
    if isinstance(own, str):
        return {own}
    if isinstance(own, list):
        return {one for one in own if isinstance(one, str)}
    for several in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(several), list):
            return {kind for one in choices for kind in types_of(one, root, known, level + 1)}
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return {_type(one) for one in words} if isinstance(words, list) else set()


def value_of(text: str, types: set[str]) -> Any:
    """The value that a text between tags stands for, of a parameter of these types."""
    if types == {"string"}:
        return text
    if text in CONSTANTS:
        value = CONSTANTS[text]
    else:
        found = object_of(f'{{"value": {text}}}')
        if found is None or [*found] != ["value"]:
            return text
        value = found["value"]
    allowed = types | ({"integer"} if "number" in types else set())
    return value if "string" not in types or _type(value) in allowed - {"string"} else text


def _type(value: object) -> str:
    """What JSON calls the type of a value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "string")
