"""A row of the data while its questions are being answered.

What a system prompt or a user says is kept, what an assistant said is left out: after every turn of
a user stands the target's own answer, which is what later turns follow. Plain text has no turns: of
it a prefix is kept, behind which the target goes on.
"""

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..data.formats import ASKING, Fields, Turn, to_turns


@dataclass(frozen=True)
class Asking:
    """Reads what is asked in a row; may go to other processes."""

    prefix_tokens: int = 0
    """Of plain text; 0 if none is expected."""

    def __call__(self, row: Fields) -> list[Turn]:
        """The turns that are kept.

        Raises:
          ValueError: for a row of which there is nothing to answer.
        """
        kept = [turn for turn in to_turns(row, ASKING) if turn.role != "assistant"]
        if is_text(kept):
            if not self.prefix_tokens:
                raise ValueError(
                    "the row is plain text, which asks nothing; give --prefix_tokens=NUMBER to have"
                    " the target go on behind so many of its tokens"
                )
        elif not any(turn.role == "user" for turn in kept):
            raise ValueError("no turn of the row is a user's, so there is nothing to answer")
        return kept


def is_text(turns: Iterable[Turn]) -> bool:
    """Whether a row is plain text."""
    return any(not turn.role for turn in turns)


@dataclass
class Conversation:
    """A row, as far as it has been answered."""

    row: int
    """Its number among the sound rows of the data."""
    waiting: deque[Turn]
    """What is still to be said."""
    said: list[Turn] = field(default_factory=list)
    """Turns in order, answers among them; of plain text the text with what was added."""
    complete: bool = True
    """Whether the last answer came to its own end."""

    @property
    def answers(self) -> int:
        """How many there are."""
        return sum(turn.role in ("assistant", "") for turn in self.said)

    def ask(self) -> bool:
        """Go on to the next question; whether there is one."""
        while self.waiting:
            turn = self.waiting.popleft()
            self.said.append(turn)
            if turn.role in ("user", ""):
                return True
        self.unask()
        return False

    def unask(self) -> None:
        """End behind the last answer."""
        while self.said and self.said[-1].role != "assistant":
            self.said.pop()
        self.waiting.clear()

    def answer(self, text: str, *, complete: bool) -> None:
        """Take the answer to the last question; one that was cut off ends the conversation."""
        if is_text(self.said):
            self.said[-1] = Turn(text)
        else:
            self.said.append(Turn(text.strip(), "assistant"))
        self.complete = complete
        if not complete:
            self.waiting.clear()

    def messages(self) -> list[dict[str, str]]:
        """What was said, as chat templates take it."""
        return [{"role": turn.role, "content": turn.content} for turn in self.said]

    def record(self) -> dict[str, Any]:
        """The row that is written; training reads ``messages`` or ``text``."""
        said = {"text": self.said[0].content} if is_text(self.said) else None
        return {
            "row": self.row,
            "complete": self.complete,
            **(said or {"messages": self.messages()}),
        }


def seed_of(seed: int, row: int, answer: int) -> int:
    """The seed of an answer, the same whatever is answered beside it; 32 bits."""
    digest = hashlib.sha256(f"{seed}/{row}/{answer}".encode()).digest()
    return int.from_bytes(digest[:4])
