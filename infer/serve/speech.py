"""What an answer of a chat holds so far: text, reasoning and calls of tools, as it is sent.

Newlines next to marks belong to neither side. What begins a part, :mod:`infer.serve.messages` and
:mod:`infer.serve.harmony` find.
"""

import secrets
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class Part(Enum):
    """A part of an answer."""

    TEXT = auto()
    REASONING = auto()


@dataclass
class CallDelta:
    """What a call has gained."""

    place: int
    """Among the calls of the answer."""
    name: str = ""
    """Comes once, first."""
    arguments: str = ""
    """More of the JSON."""

    @property
    def told(self) -> dict[str, Any]:
        """As OpenAI's protocol has it: clients join what comes, so that nothing comes twice."""
        arguments = {"arguments": self.arguments}
        if not self.name:
            return {"function": arguments}
        function = {"name": self.name, **arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass
class Said:
    """What an answer has gained."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    """One of each call, whatever it has gained."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Speech:
    """Collects what an answer says, part by part."""

    def __init__(self, *, thinking: bool) -> None:
        """Begin with its text, or within its reasoning."""
        self.part = Part.REASONING if thinking else Part.TEXT
        self.said, self.calls = Said(), 0
        self._fresh = thinking
        """Whether only a mark, and newlines, came last."""
        self._spoke = set[Part]()
        """Parts that have some text."""
        self._broke = False
        """Whether newlines next to marks were left out since."""
        self._newlines = ""
        """At the end of the text, held back: a mark may follow."""

    def begin(self, part: Part, *, apart: bool = False) -> None:
        """A part begins after a mark, in a line of its own if it stands ``apart``."""
        self._broke |= apart or bool(self._newlines)
        self.part, self._fresh, self._newlines = part, True, ""

    def say(self, text: str) -> None:
        """Text of the part that runs."""
        whole = self._newlines + text
        if self._fresh:
            stripped = whole.lstrip("\n")
            self._broke |= stripped != whole
            whole = stripped
            if whole and self._broke and self.part in self._spoke:
                whole = "\n" + whole  # What stood on two lines stays on two.
        said = whole.rstrip("\n")
        self._newlines = whole[len(said) :]
        self._fresh = self._fresh and not said
        if said:
            self._spoke.add(self.part)
            self._broke = False
        self._add(said)

    def _add(self, text: str) -> None:
        if self.part is Part.REASONING:
            self.said.reasoning += text
        else:
            self.said.content += text

    def call(self, name: str, arguments: str) -> None:
        """A call begins, or goes on where there is no name."""
        self.calls += bool(name)
        place, calls = self.calls - 1, self.said.calls
        if calls and calls[-1].place == place:
            calls[-1].arguments += arguments
        elif name or arguments:
            calls.append(CallDelta(place, name, arguments))

    def end(self) -> None:
        """Ends the answer: no mark follows what was held back."""
        self._add(self._newlines)
        self._newlines = ""
