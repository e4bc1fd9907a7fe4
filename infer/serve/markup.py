"""What a model writes around its reasoning and its calls of tools, and the grammar of an answer.

The chat template shows which form a model was trained on: that of Hermes (Qwen2.5, Qwen3), a JSON
object between ``<tool_call>`` and ``</tool_call>``, the tags of Qwen3-Coder and Qwen3.5 between the
same marks, what Gemma 4 writes (:mod:`infer.serve.gemma`), or the messages of gpt-oss
(:mod:`infer.serve.harmony`). Reasoning stands between ``<think>`` and ``</think>`` but for the last
two.

A mark is a token where the tokenizer has one: the same letters in other tokens mean nothing. Only
marks of calls may also be plain text, as with a template that was written for another tokenizer.

A grammar is of all that a model writes, reasoning included, so that it begins with the first token:
a drafted tree that ends the reasoning goes on under the same rules.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.generation.grammar import LONGEST

from .forms import Around, CallForm, CallRules, Hermes, Tags, json_rule, literal
from .gemma import Gemma
from .harmony import Channels, channels_of
from .tools import AUTO, NONE, NamedTool, Tool

FORMS: Mapping[str, CallForm] = {
    "<|tool_call>": Gemma(),
    "<function=": Tags(),
    "<tool_call>": Hermes(),
}
"""Between the marks of a call, by what a template that has it contains; the first one counts."""
READ = *(form.name for form in reversed(FORMS.values())), Channels.name
"""Names of all forms of calls that are read."""
ANY = "/(.|\\n)*/"
"""Any text, as a rule; it holds no marks that are tokens."""


@dataclass(frozen=True)
class Mark:
    """A mark: a token of its own, or a text."""

    text: str
    token: int = NO_TOKEN
    """``NO_TOKEN`` for a text."""
    silent: bool = False
    """Whether the token has no text, as special ones."""

    @property
    def rule(self) -> str:
        """The name of its rule in a grammar."""
        return literal(self.text) if self.token == NO_TOKEN else f"<[{self.token}]>"


@dataclass(frozen=True)
class Marks:
    """What opens and what closes."""

    open: Mark
    close: Mark


@dataclass(frozen=True)
class Markup:
    """What a model writes, as far as it is known."""

    template: str = ""
    """The chat template's text."""
    thought: Marks | None = None
    """Around reasoning; None where the tokenizer has no such tokens."""
    call: Marks = Marks(*map(Mark, Around().call))
    """Around a call."""
    quote: Mark | None = None
    """On both sides of a text in a call, where that is a token."""
    form: CallForm | None = None
    """Of calls between marks; None where the template has none that is known."""
    channels: Channels | None = None
    """Of a model that writes harmony instead."""

    def names(self, variable: str) -> bool:
        """Whether the template names a variable."""
        return variable in self._words

    @functools.cached_property
    def _words(self) -> frozenset[str]:
        # Not a pattern of the variable: Python keeps patterns, and compiles a long one for minutes.
        return frozenset(re.findall(r"\w+", self.template))

    @property
    def calls(self) -> CallRules | None:
        """How calls are written; None where the template has no known form of them."""
        return self.channels or self.form

    @property
    def may_think(self) -> bool:
        """Whether the template knows of reasoning."""
        known = self.thought is not None and self.thought.close.text in self.template
        return known or self.channels is not None

    def thought_rule(self, begun: bool) -> str | None:
        """Reasoning, which the prompt may have begun, and what separates it from the answer."""
        if self.channels is not None:
            return self.channels.thought
        if self.thought is None:
            return None
        begin = "" if begun else f"{self.thought.open.rule} {literal(self.around.head)} "
        return f"{begin}ANY {self.thought.close.rule} /\\n{{0,2}}/"

    @property
    def around(self) -> Around:
        """The texts of marks, and what stands next to them."""
        return Around() if self.form is None else self.form.around


def markup_of(template: str, added: Mapping[str, int], special: Collection[int] = ()) -> Markup:
    """What a model writes.

    Args:
      template: the text of its chat template; that for messages with tools, if there are several.
      added: tokens that the tokenizer has besides those it has learned, by their texts.
      special: those without a text.
    """
    if (channels := channels_of(template, added)) is not None:
        return Markup(template, channels=channels)

    form = next((form for sign, form in FORMS.items() if sign in template), None)
    around = Around() if form is None else form.around
    if around.quote and not {*around.texts} <= {*added}:
        return Markup(template)

    def mark(text: str) -> Mark:
        return Mark(text, added[text], added[text] in special)

    def marks(texts: tuple[str, str]) -> Marks | None:
        return Marks(*map(mark, texts)) if {*texts} <= {*added} else None

    return Markup(
        template=template,
        thought=marks(around.thought),
        call=marks(around.call) or Marks(*map(Mark, around.call)),
        quote=mark(around.quote) if around.quote else None,
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
    begin = "" if markup.channels is None else f"{markup.channels.text} "
    more = f" ({literal(markup.around.between)} call)*" if parallel else ""
    if chosen and markup.calls is not None:
        calls = " | ".join(f"inside_{index}" for index in range(len(chosen)))
        if markup.channels is None:
            lines += [f"calls: call{more}", f"call: {markup.call.open.rule} inside"]
            lines += [f"inside: ({calls}) {markup.call.close.rule}"]
            lines += [] if markup.quote is None else [f"quote: {markup.quote.rule}"]
        else:
            lines += [f"calls: {calls}"]
        for index, tool in enumerate(chosen):
            try:
                for line in markup.calls.rule(index, tool.function):
                    lines += [line]
                    if (length := length + len(line)) > LONGEST:
                        # Before the next line: each may repeat the definitions of all.
                        raise ValueError(
                            f"with it the schemas of the tools make a grammar of more than "
                            f"{LONGEST} characters; pass fewer or smaller ones"
                        )
            except ValueError as error:
                raise ValueError(f"the tool {tool.function.name}: {error}") from None
    if form:
        lines += [f"form: {begin}{_form_rule(form)}"]
    if must:
        answer = "calls"
    elif not chosen:
        answer = "form"
    elif form:
        answer = "calls | form"
    elif markup.channels is not None:
        answer = f"calls | {begin}ANY"
    elif markup.call.open.token == NO_TOKEN:
        # A text that comes to the mark opens a call; what is read goes back no letter.
        opens = markup.call.open.text
        text = f"{ANY} & ~/(.|\\n)*{re.escape(opens)}(.|\\n)*/"
        lines += [f"TEXT: {text}", f"OPENED: ({text}) {literal(opens)}"]
        answer = f"TEXT | OPENED inside{more}"
    else:
        answer = "ANY calls?"
    lines += [f"answer: {answer}", f"ANY: {ANY}"]
    start = "answer"
    thought = None if thinking is False else markup.thought_rule(thinking is True)
    if thought is not None:
        lines += [f"thought: {thought}"]
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
