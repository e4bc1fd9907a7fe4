"""Answers of a chat, read as they come: reasoning, text, and calls of tools.

A mark (:mod:`infer.serve.markup`) ends a stretch. A call is reported from its name on, and its
arguments as they are made (:mod:`infer.serve.forms`). What names no known tool is passed on as
text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.generation.text import RequestOutput

from .forms import CallForm, CallReader, overlap
from .harmony import ByChannels
from .markup import Mark, Markup
from .speech import Part, Said, Speech
from .tools import Function


@dataclass(frozen=True)
class Reading:
    """How answers of a call are read."""

    markup: Markup = Markup()
    """What the model writes."""
    functions: Mapping[str, Function] | None = None
    """That are reported when it calls them; None where calls are text."""
    thinking: bool = False
    """Whether the prompt has begun the reasoning."""


class _Pieces(Protocol):
    """What reads the pieces of an answer."""

    def piece(self, text: str, token: int) -> None:
        """Text that one token has completed; what a character before it lacked may come first."""
        ...

    def end(self, *, cut: bool) -> None:
        """Ends the answer; ``cut`` where the model would have gone on."""
        ...


class MessageReader:
    """Reads one answer."""

    def __init__(self, reading: Reading) -> None:
        """Begin before the first token."""
        markup = reading.markup
        self._speech = Speech(thinking=reading.thinking)
        self._pieces: _Pieces | None = None
        if markup.channels is not None:
            self._pieces = ByChannels(self._speech, markup.channels, reading.functions or {})
        elif markup.thought is not None or reading.functions is not None:
            self._pieces = ByMarks(self._speech, markup, reading.functions)
        self.thinks = markup.thought is not None or markup.channels is not None
        """Whether the model may reason."""
        self.reasoning_tokens = 0

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return self._speech.calls

    def read(self, gain: RequestOutput) -> Said:
        """Read on."""
        if self._pieces is None:
            return Said(content=gain.text)
        said = self._speech.said = Said()
        for piece in gain.pieces:
            reasoned = self._speech.part is Part.REASONING
            self._pieces.piece(piece.text, piece.token)
            reasons = self._speech.part is Part.REASONING
            self.reasoning_tokens += reasoned and reasons and piece.token != NO_TOKEN
        if gain.finish is not None:
            self._pieces.end(cut=gain.finish != "stop")
            self._speech.end()
        return said


class ByMarks:
    """Reads by marks around reasoning and calls; members as in :class:`_Pieces`."""

    def __init__(
        self, speech: Speech, markup: Markup, functions: Mapping[str, Function] | None
    ) -> None:
        """Begin before the first token."""
        self._speech, self._functions = speech, functions
        self._thought, self._marks, self._form = markup.thought, markup.call, markup.form
        self._quote, self._around = markup.quote, markup.around
        self._by_text = functions is not None and self._marks.open.token == NO_TOKEN
        self._begun = ""
        """Of a mark that is a text, or of what stands after the one that opens reasoning."""
        self._head = ""
        """What stands there, until it has come."""
        self._call: CallReader | None = None
        self._raw = ""
        """Of an open call, from its mark on, while it names no tool."""
        self._tail: str | None = None
        """After a whole call: spaces in front of its closing mark. None where there is none."""

    def piece(self, text: str, token: int) -> None:
        """What :class:`_Pieces` asks for."""
        mark = self._mark(token)
        if mark is None or not (mark.silent or text.endswith(mark.text)):
            self._text(text)
            return
        self._text(text.removesuffix(mark.text))
        if mark is self._quote:
            self._text(mark.text)
            return
        closes = mark is self._marks.close
        if closes and self._tail is not None:
            self._tail = None
            self._speech.begin(Part.TEXT)
        elif closes and self._call is not None:
            self._tell(self._call, self._call.close())
            self._raw += mark.text
            self._leave()
        elif self._speech.part is Part.REASONING:
            self._speech.begin(Part.TEXT)
            self._head = self._begun = ""
        else:
            self._leave()
            self._tail = None
            if self._thought is not None and mark is self._thought.open:
                self._speech.begin(Part.REASONING)
                self._head = self._around.head
            else:
                self._open(self._form)

    def _mark(self, token: int) -> Mark | None:
        """The mark that a token is where it stands."""
        if token == NO_TOKEN:
            return None
        if self._thought is not None:
            reasons = self._speech.part is Part.REASONING
            mark = self._thought.close if reasons else self._thought.open
            if token == mark.token:
                return mark
            if reasons:
                return None
        if self._functions is not None:
            if token == self._marks.open.token:
                return self._marks.open
            if self._call is not None and self._quote and token == self._quote.token:
                return self._quote
            if token == self._marks.close.token and (self._call or self._tail is not None):
                return self._marks.close
        return None

    def _text(self, text: str) -> None:
        """Text that holds no mark that is a token."""
        if self._call is not None:
            self._read(self._call, text)
        elif self._tail is not None:
            self._after_call(self._tail + text)
        elif self._by_text and self._speech.part is Part.TEXT:
            self._find_opening(text)
        elif self._head:
            self._pass_head(self._begun + text)
        else:
            self._speech.say(text)

    def _pass_head(self, text: str) -> None:
        """The beginning of reasoning, which names it."""
        head, self._begun = self._head, text
        if head.startswith(text) and head != text:
            return
        self._head = self._begun = ""
        self._speech.say(text.removeprefix(head))

    def _find_opening(self, text: str) -> None:
        mark, text = self._marks.open.text, self._begun + text
        at, self._begun = text.find(mark), ""
        if at >= 0:
            self._speech.say(text[:at])
            self._open(self._form)
            self._text(text[at + len(mark) :])
            return
        cut = len(text) - overlap(text, mark)
        self._begun = text[cut:]
        self._speech.say(text[:cut])

    def _open(self, form: CallForm | None) -> None:
        if form is not None and self._functions is not None:
            self._call, self._raw = form.reader(self._functions), self._marks.open.text

    def _read(self, call: CallReader, text: str) -> None:
        """Within a call."""
        self._tell(call, call.read(text))
        if call.name is None:
            self._raw += text
        if not call.whole:
            return
        named, rest = call.name is not None, call.rest
        self._leave()
        if named:
            self._tail = ""
            self._text(rest)

    def _tell(self, call: CallReader, arguments: str) -> None:
        """What a call has gained; its name where it has one at last."""
        if call.name is not None:
            self._speech.call(call.name if self._raw else "", arguments)
            self._raw = ""

    def _leave(self) -> None:
        """A call ends, unless it was none: then it is text."""
        if (call := self._call) is None:
            return
        self._call = None
        if call.name is not None:
            self._speech.begin(Part.TEXT)
            return
        mark, raw = self._marks.open.text, self._raw
        self._raw = ""
        self._speech.say(mark)
        self._text(raw[len(mark) :])

    def _after_call(self, text: str) -> None:
        """Text after a whole call: spaces and its closing mark, or what the model says next."""
        mark, waiting = self._marks.close.text, text.lstrip()
        self._tail = text
        if self._by_text and waiting.startswith(mark):
            self._tail, text = None, waiting[len(mark) :]
        elif waiting and not (self._by_text and mark.startswith(waiting)):
            self._tail = None
        if self._tail is None and text:
            self._text(text)

    def end(self, *, cut: bool) -> None:
        """What :class:`_Pieces` asks for."""
        if self._call is not None and not cut:
            self._tell(self._call, self._call.close())
        self._leave()
        tail, begun, self._tail, self._begun = (self._tail or "").strip(), self._begun, None, ""
        self._speech.say(tail + begun)
