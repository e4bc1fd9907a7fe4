"""Questions of many rows answered together, through the row slots of a ``LongSpec``.

System and user turns are kept. Assistant turns are dropped: the target answers every user turn.
Of plain text, which has no turns, a prefix is kept, and the target continues it.

Every wave answers one question of each row in hand, whichever question that row has come to; rows
that are done make room for new ones before the next wave. Tokens of an answer depend on its prompt,
the options and its seed, and in float32 on nothing beside it, so that the number of slots and of
rows in hand changes the speed alone.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longspec_jax import LongSpec
from longspec_jax.generation.endpoint import Endpoint
from longspec_jax.generation.inputs import to_prompt
from longspec_jax.generation.text import loops

from .data.documents import ASKING, BadRows, Fields, Turn, to_turns

SHORTEST = 256
"""Tokens that the longest prompt of a wave is filled up to, at least."""


@dataclass(frozen=True)
class Questions:
    """Reads the questions of a row."""

    prefix_tokens: int = 0
    """Of plain text; 0 if none is expected."""

    def __call__(self, row: Fields) -> list[Turn]:
        """The turns that are kept.

        Raises:
          ValueError: for a row with nothing to answer.
        """
        kept = [turn for turn in to_turns(row, ASKING) if turn.role != "assistant"]
        if is_text(kept):
            if not self.prefix_tokens:
                raise ValueError(
                    "the row is plain text, which asks nothing; give --prefix_tokens=NUMBER, and "
                    "the target continues that many of its tokens"
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
    """Turns that are still to come."""
    turns: list[Turn] = field(default_factory=list)
    """Turns in order, answers among them; of plain text the text with what was added."""
    complete: bool = True
    """Whether the last answer came to its own end."""

    @property
    def answers(self) -> int:
        """How many there are."""
        return sum(turn.role in ("assistant", "") for turn in self.turns)

    def ask(self) -> bool:
        """Advance to the next question; whether there is one."""
        while self.waiting:
            turn = self.waiting.popleft()
            self.turns.append(turn)
            if turn.role in ("user", ""):
                return True
        self.unask()
        return False

    def unask(self) -> None:
        """End behind the last answer."""
        while self.turns and self.turns[-1].role != "assistant":
            self.turns.pop()
        self.waiting.clear()

    def answer(self, text: str, *, complete: bool) -> None:
        """Take the answer to the last question; one that was cut off ends the conversation."""
        if is_text(self.turns):
            self.turns[-1] = Turn(text)
        else:
            self.turns.append(Turn(text.strip(), "assistant"))
        self.complete = complete
        if not complete:
            self.waiting.clear()

    def messages(self) -> list[dict[str, str]]:
        """The turns so far, as chat templates take them."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    def record(self) -> dict[str, Any]:
        """The row that is written; training reads ``messages`` or ``text``."""
        text = is_text(self.turns)
        content = {"text": self.turns[0].content} if text else {"messages": self.messages()}
        return {"row": self.row, "complete": self.complete, **content}


def seed_of(seed: int, row: int, answer: int) -> int:
    """The seed of an answer, the same whatever is answered beside it; 32 bits."""
    digest = hashlib.sha256(f"{seed}/{row}/{answer}".encode()).digest()
    return int.from_bytes(digest[:4])


@dataclass(frozen=True)
class Limits:
    """How long answers and rows may be."""

    max_new_tokens: int
    """Of an answer."""
    max_row_tokens: int
    """Of a prompt with all turns before it, and its answer."""
    prefix_tokens: int = 0
    """Of plain text that are kept."""

    @property
    def longest_prompt(self) -> int:
        """Tokens that leave room for an answer."""
        return self.max_row_tokens - self.max_new_tokens


@dataclass
class Counts:
    """What came of the rows so far."""

    answers: int = 0
    tokens: int = 0
    """Of the answers."""
    too_long: int = 0
    """Rows left out, their first question being too long."""
    shortened: int = 0
    """Rows that end before a question for which there was no room."""
    looping: int = 0
    """Answers left out because they repeat themselves; each ends its row."""
    cut: int = 0
    """Rows whose last answer was cut off."""


@dataclass
class Answering:
    """Answers conversations in their order."""

    spec: LongSpec | Endpoint
    limits: Limits
    options: dict[str, Any]
    """Sampling options of ``generate``; seeds apart."""
    seed: int
    bad: BadRows
    """Takes note of rows that the chat template cannot write."""
    at_once: int
    """Rows whose questions are answered together."""
    template: str | None = None
    """Instead of the tokenizer's own."""
    tree: Any = None
    counts: Counts = field(default_factory=Counts)

    def run(self, conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
        """Lists of answered rows, in the order they come in; one list, perhaps empty, per wave.

        Rows that are left out are not among them.

        Raises:
          ValueError: if more rows cannot be written by the template than the budget allows.
        """
        in_hand: deque[Conversation] = deque()  # Those that are done wait for the ones before.
        open_rows: list[Conversation] = []
        while True:
            questions = [each for row in open_rows if (each := self._next(row)) is not None]
            while len(questions) < self.at_once and (row := next(conversations, None)) is not None:
                if (each := self._next(row)) is not None:
                    questions.append(each)
                if row.turns:
                    in_hand.append(row)
            if questions:
                self._answer(questions)
            open_rows = [row for row, _ in questions if row.waiting]
            unfinished = {row.row for row in open_rows}
            done = []
            while in_hand and in_hand[0].row not in unfinished:
                done.append(in_hand.popleft())
            done = [row for row in done if row.turns]
            self.counts.cut += sum(not row.complete for row in done)
            yield done
            if not questions and not in_hand:
                return

    def _next(self, row: Conversation) -> tuple[Conversation, np.ndarray] | None:
        """A row with the prompt of its next question; None if there is none, or no room for it."""
        if not row.ask():
            return None
        try:
            prompt = self._prompt(row)
        except ValueError as error:
            row.unask()
            self.bad.add(f"row {row.row + 1} of the rows that can be read", error)
            return None
        if len(prompt) <= self.limits.longest_prompt:
            return row, prompt
        row.unask()
        if row.turns:
            self.counts.shortened += 1
        else:
            self.counts.too_long += 1
        return None

    def _prompt(self, row: Conversation) -> np.ndarray:
        """Token ids of the turns so far."""
        tokenizer, vocab_size = self.spec.tokenizer, self.spec.target_config.vocab_size
        if is_text(row.turns):
            whole = to_prompt(row.turns[0].content, tokenizer, vocab_size)
            return whole[: self.limits.prefix_tokens]
        return to_prompt(row.messages(), tokenizer, vocab_size, self.template)

    def _answer(self, questions: list[tuple[Conversation, np.ndarray]]) -> None:
        """Have the target answer."""
        prompts = [prompt for _, prompt in questions]
        budgets = [self.limits.max_new_tokens] * len(questions)
        # A server has compiled its programs.
        fillers = [] if isinstance(self.spec, Endpoint) else self._fillers(prompts, self.spec)
        result = self.spec.generate(
            [*prompts, *fillers],
            tree=self.tree,
            max_new_tokens=[*budgets, *[1] * len(fillers)],
            seed=[
                *(seed_of(self.seed, row.row, row.answers) for row, _ in questions),
                *[0] * len(fillers),
            ],
            **self.options,
        )
        for (row, prompt), tokens, text in zip(
            questions, result.sequences, result.text, strict=False
        ):
            if is_text(row.turns):
                text = self.spec.tokenizer.decode(
                    [*prompt.tolist(), *tokens],
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=False,
                )
            self.counts.answers += 1
            self.counts.tokens += len(tokens)
            if loops(tokens):
                self.counts.looping += 1
                row.unask()
            else:
                row.answer(text or "", complete=tokens[-1] in self.spec.stop_tokens)

    def _fillers(self, prompts: list[np.ndarray], spec: LongSpec) -> list[np.ndarray]:
        """Prompts beside those that are answered, so that waves of all sizes run few programs.

        One has a length of few, since the caches are as long as the longest row needs; and a call
        of no more rows than slots would be a batch of its own size.
        """
        longest = max(prompts, key=len)
        length = max(SHORTEST, 1 << (len(longest) - 1).bit_length())
        length = max(len(longest), min(length, self.limits.longest_prompt))
        missing = (spec.row_slots or 0) - len(prompts)
        return [np.resize(longest, length), *[longest[:1]] * max(0, missing)]
