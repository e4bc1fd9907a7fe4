"""The messages of harmony, which gpt-oss writes: each has a channel, and perhaps a recipient.

The channel ``analysis`` holds reasoning, a message to ``functions.NAME`` a call of a tool, whatever
its channel, and everything else is text. The format's tokens are special ones, without a text.
Source: OpenAI's harmony response format, 2025.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .forms import closed, json_rule, literal
from .speech import Part, Speech
from .tools import NAME, Function

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = "<|end|>", "<|call|>", "<|return|>"


@dataclass(frozen=True)
class Channels:
    """The tokens of harmony."""

    tokens: Mapping[str, int]
    """Ids by their names."""
    name: ClassVar[str] = "harmony (gpt-oss, <|channel|> and <|message|>)"

    def _begin(self, head: str) -> str:
        """What begins a message with a head, as a rule."""
        return f"{self._mark(CHANNEL)} {literal(head)} {self._mark(MESSAGE)}"

    def _mark(self, name: str) -> str:
        return f"<[{self.tokens[name]}]>"

    @property
    def text(self) -> str:
        """What begins the text of an answer, as a rule."""
        return self._begin("final")

    @property
    def thought(self) -> str:
        """A message of reasoning, and what begins the next message, as a rule."""
        next = f'{self._mark("<|end|>")} {self._mark(START)} "assistant"'
        return f"{self._begin('analysis')} ANY {next}"

    def rule(self, index: int, function: Function) -> Iterator[str]:
        """See :class:`~infer.serve.forms.CallRules`; the token after a call ends the answer."""
        head = literal(f"commentary to=functions.{function.name} ")
        json = f'{self._mark(CONSTRAIN)} "json" {self._mark(MESSAGE)}'
        yield f"inside_{index}: {self._mark(CHANNEL)} {head} {json} arguments_{index}"
        yield f"arguments_{index}: {json_rule(closed(function.parameters))}"


def channels_of(template: str, added: Mapping[str, int]) -> Channels | None:
    """The tokens of harmony, where a template writes it and the tokenizer has them."""
    names = START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS
    if not all(name in template for name in (CHANNEL, MESSAGE)) or not {*names} <= {*added}:
        return None
    return Channels({name: added[name] for name in names})


def turn_with_thinking(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message as gpt-oss's template takes it: it reads ``thinking``.

    Next to calls it takes either that or a text, both of which it shows as reasoning.
    """
    thought, content = turn.get("reasoning", ""), turn.get("content", "")
    if not thought:
        return {**turn}
    if turn.get("tool_calls") and content:
        thought, content = f"{thought}\n{content}", ""
    return {**turn, "content": content, "thinking": thought}


class ByChannels:
    """Reads an answer by its messages; members as of ``Pieces`` in :mod:`infer.serve.messages`."""

    _RECIPIENT = re.compile(rf"to=functions\.({NAME.pattern})")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def __init__(
        self, speech: Speech, channels: Channels, functions: Mapping[str, Function]
    ) -> None:
        """Begin within the head of the first message, which the prompt has begun."""
        self._speech, self._functions = speech, functions
        self._names = {token: name for name, token in channels.tokens.items()}
        self._head: str | None = ""
        """Of a message whose text has not begun."""
        self._calls, self._empty = False, True
        """Whether the message is a call, and has no arguments yet."""

    def piece(self, text: str, token: int) -> None:
        """Text that one token has completed, or a special token."""
        name = self._names.get(token)
        if name is None:
            self._text(text)
        elif name == MESSAGE and self._head is not None:
            self._begin(self._head)
        elif self._head is not None and name not in ENDS:
            self._head += name
        else:
            self._leave()

    def _text(self, text: str) -> None:
        if self._head is not None:
            self._head += text
        elif self._calls:
            self._speech.call("", text)
            self._empty = self._empty and not text.strip()
        else:
            self._speech.say(text)

    def _begin(self, head: str) -> None:
        """The text of a message begins."""
        to, channel = self._RECIPIENT.search(head), self._CHANNEL.search(head)
        self._head, self._empty = None, True
        self._calls = to is not None and to[1] in self._functions
        if to is not None and self._calls:
            self._speech.call(to[1], "")
            self._speech.begin(Part.TEXT, apart=True)
        else:
            reasons = to is None and channel is not None and channel[1] == "analysis"
            self._speech.begin(Part.REASONING if reasons else Part.TEXT, apart=True)

    def _leave(self) -> None:
        """A message ends; the head of another may follow."""
        if self._calls and self._empty:
            self._speech.call("", "{}")
        self._head, self._calls = "", False
        self._speech.begin(Part.TEXT, apart=True)

    def end(self, *, cut: bool) -> None:
        """Ends the answer; a text without the format's tokens is passed on as it is."""
        if self._calls and self._empty and not cut:
            self._speech.call("", "{}")
        if self._head is not None and CHANNEL not in self._head:
            self._speech.say(self._head)
