"""What a model writes around its reasoning and its calls of tools, and the grammars of both.

The chat template shows which form a model was trained on. Two are known: that of Hermes (Qwen2.5,
Qwen3), a JSON object between ``<tool_call>`` and ``</tool_call>``, and the tags of Qwen3-Coder and
Qwen3.5 between the same marks. Reasoning stands between ``<think>`` and ``</think>``.

A mark is a token where the tokenizer has one: the same letters in other tokens mean nothing. Only
marks of calls may also be plain text, as with a template that was written for another tokenizer.

A grammar is of all that a model writes, reasoning included, so that it begins with the first token:
a drafted tree that ends the reasoning goes on under the same rules.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.generation.grammar import LONGEST, check_depth

from .tools import AUTO, NAME, NONE, Function, NamedTool, Tool, object_of

THOUGHT = "<think>", "</think>"
CALL = "<tool_call>", "</tool_call>"
XML_FUNCTION = "<function="
"""What tells the second form."""
ANY = "/(.|\\n)*/"
"""Any text, as a rule; it holds no marks that are tokens."""
COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""JSON as models were taught to write it, and with no space in which a text could go on."""
LONGEST_VALUE = 10_000
"""Largest ``maxLength`` of a text between tags that the grammar counts."""
CONSTANTS = {"None": None, "True": True, "False": False}
"""What models write like Python."""


@dataclass(frozen=True)
class Mark:
    """A mark: a token of its own, or a text."""

    text: str
    token: int = NO_TOKEN
    """``NO_TOKEN`` for a text."""

    @property
    def rule(self) -> str:
        """As a grammar names it."""
        return literal(self.text) if self.token == NO_TOKEN else f"<[{self.token}]>"


@dataclass(frozen=True)
class Marks:
    """What opens and what closes."""

    open: Mark
    close: Mark


@dataclass(frozen=True)
class Called:
    """A call that a model has written."""

    name: str
    arguments: dict[str, Any]


class ToolForm(Protocol):
    """How a call is written between its marks."""

    name: str

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """Lines of a grammar, of which the first says what stands between the marks.

        Args:
          index: of the tool, for the names of rules.
          function: that is called.

        Raises:
          ValueError: for parameters that cannot be written so.
        """
        ...

    def read(self, text: str, functions: Mapping[str, Function]) -> Called | None:
        """The call of one of these functions that a text is; None if it is none."""
        ...


class Hermes:
    """One JSON object with name and arguments."""

    name = "Hermes (<tool_call> with a JSON object)"

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """The arguments by their schema."""
        begin = literal(f'\n{{"name": "{function.name}", "arguments": ')
        end = literal("}\n")
        yield f"inside_{index}: {begin} arguments_{index} {end}"
        yield f"arguments_{index}: {json_rule(closed(function.parameters))}"

    def read(self, text: str, functions: Mapping[str, Function]) -> Called | None:
        """A whole object."""
        found = object_of(text)
        name = None if found is None else found.get("name")
        if found is None or not isinstance(name, str) or name not in functions:
            return None
        arguments = found.get("arguments")
        return Called(name, arguments) if isinstance(arguments, dict) else None


class Tags:
    """A tag for the function, and one for each parameter around its value.

    Texts stand as they are, everything else as JSON.
    """

    name = "Qwen3-Coder (<tool_call> with <function=NAME>)"
    _FUNCTION = re.compile(rf"\s*<function=({NAME.pattern})>\n?(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>(\n?)")

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """Parameters in the order of the schema."""
        schema = function.parameters
        parameters, own = properties_of(schema), list[str]()
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
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
        """A value of some types and the tag behind it."""
        end = literal("\n</parameter>")
        words = schema.get("enum") if isinstance(schema, Mapping) else None
        if "string" not in kinds:
            shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
            own = {**shared, **schema} if isinstance(schema, Mapping) else shared
            yield f"v_{rule}: j_{rule} {end}"
            yield f"j_{rule}: {json_rule(own)}"
        elif isinstance(words, list) and words and all(isinstance(one, str) for one in words):
            yield f"v_{rule}: ({' | '.join(map(literal, words))}) {end}"
        else:
            most = schema.get("maxLength") if isinstance(schema, Mapping) else None
            bound = f"{{0,{most}}}" if isinstance(most, int) and most <= LONGEST_VALUE else "*"
            yield f"v_{rule}[suffix={end}]: /(?s:.){bound}/"

    def read(self, text: str, functions: Mapping[str, Function]) -> Called | None:
        """Tags that leave nothing over; a value of no fitting type is a text."""
        found = self._FUNCTION.fullmatch(text)
        if found is None or found[1] not in functions:
            return None
        inside, at, arguments = found[2], 0, dict[str, Any]()
        schema = functions[found[1]].parameters
        parameters, known = properties_of(schema), dict[str, set[str]]()
        while (tag := self._PARAMETER.match(inside, at)) is not None:
            closing = f"{tag[2]}</parameter>"
            end = inside.find(closing, tag.end())
            if end < 0:
                return None
            types = types_of(parameters.get(tag[1]), schema, known)
            arguments[tag[1]] = value_of(inside[tag.end() : end], types)
            at = end + len(closing)
        return None if inside[at:].strip() else Called(found[1], arguments)


FORMS: tuple[ToolForm, ...] = Hermes(), Tags()
"""That are known."""


@dataclass(frozen=True)
class Markup:
    """What a model writes, as far as it is known."""

    template: str = ""
    """The chat template's text."""
    thought: Marks | None = None
    """Around reasoning; None where the tokenizer has no such tokens."""
    call: Marks = Marks(*map(Mark, CALL))
    """Around a call."""
    form: ToolForm | None = None
    """Of calls; None where the template has none that is known."""

    def names(self, variable: str) -> bool:
        """Whether the template names a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.template) is not None

    @property
    def may_think(self) -> bool:
        """Whether the template knows of reasoning."""
        return self.thought is not None and THOUGHT[1] in self.template


def markup_of(template: str, added: Mapping[str, int]) -> Markup:
    """What a model writes.

    Args:
      template: the text of its chat template; that for messages with tools, if there are several.
      added: tokens that the tokenizer has beside those it has learned, by their texts.
    """
    thought, call = (
        Marks(*(Mark(text, added.get(text, NO_TOKEN)) for text in texts))
        for texts in (THOUGHT, CALL)
    )
    form = None
    if XML_FUNCTION in template:
        form = FORMS[1]
    elif CALL[0] in template:
        form = FORMS[0]
    return Markup(
        template=template,
        thought=thought if all(text in added for text in THOUGHT) else None,
        call=call if all(text in added for text in CALL) else Marks(*map(Mark, CALL)),
        form=form,
    )


def grammar_of(
    markup: Markup,
    form: Mapping[str, Any],
    tools: Sequence[Tool],
    choice: str | NamedTool,
    *,
    parallel: bool,
    thinking: bool | None,
) -> dict[str, Any]:
    """All that a model may write, as :meth:`longspec_jax.LongSpec.grammar` takes it.

    Args:
      form: of the answer's text, likewise; empty for any.
      tools: that it may call.
      choice: of them, as a client has made it.
      parallel: whether it may call several.
      thinking: whether the prompt has begun the reasoning; None where the model itself may.

    Returns:
      Nothing where it may write anything.

    Raises:
      ValueError: for what no grammar can hold the model to.
    """
    chosen = [tool for tool in tools if _is_chosen(tool, choice)] if choice != NONE else []
    must = bool(chosen) and choice != AUTO
    if chosen and not must and not (form or not parallel or _any_strict(chosen)):
        chosen = []  # Whatever it writes is read as well as it can be.
    if not chosen and not form:
        return {}
    if not chosen and thinking is False:
        return dict(form)
    lines, length = list[str](), 0
    if chosen and markup.form is not None:
        calls = " | ".join(f"inside_{index}" for index in range(len(chosen)))
        more = ' ("\\n" call)*' if parallel else ""
        lines += [f"calls: call{more}"]
        lines += [f"call: {markup.call.open.rule} ({calls}) {markup.call.close.rule}"]
        for index, tool in enumerate(chosen):
            for line in markup.form.rule(index, tool.function):
                lines += [line]
                if (length := length + len(line)) > LONGEST:
                    # Before the next line: each may repeat the definitions of all.
                    raise ValueError(
                        f"the schemas of the tools make a grammar of more than {LONGEST} "
                        "characters; pass fewer or smaller ones"
                    )
    if form:
        lines += [f"form: {_form_rule(form)}"]
    if must:
        answer = "calls"
    elif not chosen:
        answer = "form"
    elif form:
        answer = "calls | form"
    elif markup.call.open.token == NO_TOKEN:
        raise ValueError(
            f"strict tools and parallel_tool_calls=false need the token {CALL[0]}, which this "
            "model's tokenizer lacks, where the model may answer with a text; pass "
            "tool_choice=required or a tool's name, or leave these fields out"
        )
    else:
        answer = "ANY calls?"
    lines += [f"answer: {answer}", f"ANY: {ANY}"]
    start = "answer"
    if thinking is not False and markup.thought is not None:
        begin = "" if thinking else f"{markup.thought.open.rule} "
        lines += [f"thought: {begin}ANY {markup.thought.close.rule} /\\n{{0,2}}/"]
        start = "thought answer" if thinking else "thought? answer"
    return {"lark": "\n".join([f"start: {start}", *lines])}


def _is_chosen(tool: Tool, choice: str | NamedTool) -> bool:
    return not isinstance(choice, NamedTool) or tool.function.name == choice.function.name


def _any_strict(tools: Sequence[Tool]) -> bool:
    return any(tool.function.strict for tool in tools)


def _form_rule(form: Mapping[str, Any]) -> str:
    if "regex" in form:
        # A slash that is not escaped would end the rule.
        inside = re.sub(r"\\.|/", lambda one: "\\/" if one[0] == "/" else one[0], form["regex"])
        return f"/{inside}/".replace("\n", "\\n")
    return json_rule(form["json_schema"])


def literal(text: str) -> str:
    """A text as a grammar quotes it."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: object) -> str:
    """JSON of a schema, as a rule.

    Raises:
      ValueError: for a schema of too many levels.
    """
    check_depth(schema)
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
      level: of references and choices within each other, of which 8 are followed.
    """
    if not isinstance(schema, Mapping) or level > 8:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        if reference in known:
            return known[reference]
        known[reference] = set()  # Where it refers to itself.
        place, name = reference.removeprefix("#/").partition("/")[::2]
        shared = root.get(place)
        inner = shared.get(name) if isinstance(shared, Mapping) else None
        known[reference] = types_of(inner, root, known, level + 1)
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
