"""Answers of a chat, read as they come: reasoning, text, and calls of tools.

What ends a stretch is a mark (:mod:`infer.serve.markup`). Newlines beside marks belong to neither
side. A call is reported when it is complete. What turns out to be no call is passed on as text.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.generation.requests import RequestOutput

from .markup import Called, Markup
from .tools import Function

MOST_CLOSINGS = 8
"""Closings of a call that are tried where they are texts, which may stand within an argument."""


class _Part(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass
class Said:
    """What an answer has gained."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    first_call: int = 0
    """Calls before these."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls as OpenAI's protocol has them. Each is whole: clients join what comes twice."""
        return [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in self.calls
        ]


@dataclass(frozen=True)
class Reading:
    """How answers of a call are read."""

    markup: Markup = Markup()
    """What the model writes."""
    functions: Mapping[str, Function] | None = None
    """That are reported when it calls them; None where calls are text."""
    thinking: bool = False
    """Whether the prompt has begun the reasoning."""


class MessageReader:
    """Reads one answer."""

    def __init__(self, reading: Reading) -> None:
        """Begin before the first token."""
        self._functions = reading.functions
        markup = reading.markup
        self._thought, self._call, self._form = markup.thought, markup.call, markup.form
        self._by_text = self._functions is not None and self._call.open.token == NO_TOKEN
        self._part = _Part.REASONING if reading.thinking else _Part.TEXT
        self._fresh = reading.thinking
        """Whether only a mark, and newlines, came last."""
        self._spoke = set[_Part]()
        """Parts of which something was said."""
        self._broke = False
        """Whether newlines beside marks were left out since."""
        self._newlines = ""
        """At the end of what was said, held back: a mark may follow."""
        self._begun = ""
        """Of a mark that is a text."""
        self._raw = ""
        """Of an open call, from its mark on."""
        self._closings = self._searched = 0
        """Where it might have ended: how often so far, and up to where that was looked for."""
        self._said = Said()
        self._thinking = reading.thinking
        self.reasoning_tokens, self.calls = 0, 0

    @property
    def thinks(self) -> bool:
        """Whether the model may reason."""
        return self._thought is not None

    def read(self, gain: RequestOutput) -> Said:
        """Read on."""
        self._said = Said(first_call=self.calls)
        self._count(gain.tokens)
        if self._thought is None and self._functions is None:
            self._said.content = gain.text
            return self._said
        for piece in gain.pieces:
            self._piece(piece.text, piece.token)
        if gain.finish is not None:
            self._end()
        return self._said

    def _count(self, tokens: Iterable[int]) -> None:
        if self._thought is None:
            return
        for token in tokens:
            if token == self._thought.open.token:
                self._thinking = True
            elif token == self._thought.close.token:
                self._thinking = False
            else:
                self.reasoning_tokens += self._thinking

    def _piece(self, text: str, token: int) -> None:
        """Text that one token has completed; what a character before it lacked may come first."""
        mark = self._mark(token)
        if mark is None or not text.endswith(mark):
            self._text(text)
            return
        self._text(text.removesuffix(mark))
        if self._part is _Part.REASONING:
            self._begin(_Part.TEXT)
        elif self._part is _Part.CALL and mark == self._call.close.text:
            self._close(len(self._raw), "")
        elif self._thought is not None and token == self._thought.open.token:
            self._give_up()
            self._begin(_Part.REASONING)
        else:
            self._give_up()
            self._part, self._raw = _Part.CALL, mark

    def _mark(self, token: int) -> str | None:
        """The text of a token that is a mark where it stands."""
        if token == NO_TOKEN:
            return None
        if self._thought is not None:
            reasons = self._part is _Part.REASONING
            mark = self._thought.close if reasons else self._thought.open
            if token == mark.token:
                return mark.text
            if reasons:
                return None
        if self._functions is not None:
            if token == self._call.open.token:
                return self._call.open.text
            if token == self._call.close.token and self._part is _Part.CALL:
                return self._call.close.text
        return None

    def _begin(self, part: _Part) -> None:
        """Behind a mark."""
        self._broke |= bool(self._newlines)
        self._part, self._fresh, self._newlines = part, True, ""

    def _text(self, text: str) -> None:
        """Text that holds no mark that is a token."""
        if self._part is _Part.CALL:
            self._raw += text
            if self._by_text:
                self._find_closing()
        elif self._by_text and self._part is _Part.TEXT:
            self._find_opening(text)
        else:
            self._say(text)

    def _find_opening(self, text: str) -> None:
        mark, text = self._call.open.text, self._begun + text
        at, self._begun = text.find(mark), ""
        if at >= 0:
            self._say(text[:at])
            self._part, self._raw, self._closings, self._searched = _Part.CALL, mark, 0, len(mark)
            self._text(text[at + len(mark) :])
            return
        held = next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))
        cut = len(text) - held
        self._begun = text[cut:]
        self._say(text[:cut])

    def _find_closing(self) -> None:
        mark = self._call.close.text
        at = self._raw.find(mark, self._searched)
        if at < 0:
            self._searched = max(self._searched, len(self._raw) - len(mark) + 1)
            return
        self._closings, self._searched = self._closings + 1, at + 1
        self._close(at, mark)

    def _close(self, at: int, mark: str) -> None:
        """A call ends in front of a mark, unless it is none."""
        inside = self._raw[len(self._call.open.text) : at]
        form, functions = self._form, self._functions
        found = None if form is None or functions is None else form.read(inside, functions)
        rest = self._raw[at + len(mark) :]
        if found is None:
            if self._by_text and self._closings < MOST_CLOSINGS:
                self._find_closing()
                return
            if not self._by_text:
                self._raw += self._call.close.text
            self._give_up()
            return
        self._said.calls = (*self._said.calls, found)
        self.calls += 1
        self._raw = ""
        self._begin(_Part.TEXT)
        if rest:
            self._text(rest)

    def _give_up(self) -> None:
        """What looked like a call is text."""
        if self._part is _Part.CALL:
            raw, self._raw, self._part = self._raw, "", _Part.TEXT
            self._say(raw)

    def _say(self, text: str) -> None:
        """Text of the part that runs."""
        whole = self._newlines + text
        if self._fresh:
            stripped = whole.lstrip("\n")
            self._broke |= stripped != whole
            whole = stripped
            if whole and self._broke and self._part in self._spoke:
                whole = "\n" + whole  # What stood on two lines stays on two.
        said = whole.rstrip("\n")
        self._newlines = whole[len(said) :]
        self._fresh = self._fresh and not said
        if said:
            self._spoke.add(self._part)
            self._broke = False
        if self._part is _Part.REASONING:
            self._said.reasoning += said
        else:
            self._said.content += said

    def _end(self) -> None:
        """Nothing more comes: no mark follows what was held back."""
        self._give_up()
        if self._begun:
            begun, self._begun = self._begun, ""
            self._say(begun)
        if self._part is _Part.REASONING:
            self._said.reasoning += self._newlines
        else:
            self._said.content += self._newlines
        self._newlines = ""
