"""Questions of many rows answered together, through the slots of an engine or by a server.

System and user turns are kept. Assistant turns are dropped: the target answers every user turn.
Of plain text, which has no turns, a prefix is kept, and the target continues it.

The next question of a row is asked as soon as the one before it is answered. Tokens of an answer
depend on its prompt, the options and its seed, and in float32 on nothing beside it, so that the
number of slots and of rows in hand changes the speed alone.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypedDict

import numpy as np

from longspec_jax import LongSpec, TreeConfig
from longspec_jax.generation.endpoint import Endpoint, RemoteAnswer
from longspec_jax.generation.inputs import to_prompt
from longspec_jax.generation.requests import RequestEngine
from longspec_jax.generation.text import loops

from .data.documents import ASKING, BadRows, Fields, Turn, to_turns

SHORTEST = 256
"""Tokens that a slot of an engine holds at least, so that few engines are made."""
IN_HAND = 16
"""Rows between reading and writing, for each slot."""


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


class Drawing(TypedDict):
    """Sampling options of all answers, as of ``generate``."""

    temperature: float
    top_k: int
    top_p: float


class Question(NamedTuple):
    """A row whose prompt waits for its answer."""

    row: Conversation
    prompt: np.ndarray
    max_new_tokens: int
    seed: int
    drawing: Drawing


class Answer(NamedTuple):
    """What the target said."""

    question: Question
    tokens: tuple[int, ...]
    text: str


class EngineAnswers:
    """Answers of the target here, through the slots of an engine.

    A slot is as long as the longest row so far needs, up to a power of two: for a longer one the
    engine is made anew, behind the last answer of those before it.
    """

    def __init__(self, spec: LongSpec, slots: int, tree: TreeConfig | None, longest: int) -> None:
        """Make no engine yet.

        Args:
          spec: the target, and what drafts for it.
          slots: questions that are answered at once.
          tree: of the draft; its default tree, a smaller one or none by their speeds if absent.
          longest: most tokens of a row.
        """
        self._spec, self._slots, self._tree, self._longest = spec, slots, tree, longest
        self._engine: RequestEngine | None = None
        self._length = 0
        self._waiting = deque[Question]()
        self._asked: dict[int, tuple[Question, list[int], list[str]]] = {}

    def ask(self, question: Question) -> None:
        """Queue a question."""
        self._waiting.append(question)

    def answers(self) -> list[Answer]:
        """Wait until some of the questions are answered.

        Raises:
          FloatingPointError: if the target's logits are not finite.
        """
        found: list[Answer] = []
        while not found:
            for output in self._with_questions().step():
                question, tokens, texts = self._asked[output.id]
                tokens += output.tokens
                texts.append(output.text)
                if output.finish == "error":
                    raise FloatingPointError(
                        f"row {question.row.row + 1} cannot be answered: "
                        f"{output.reason or 'the target has no finite logits'}"
                    )
                if output.finish is not None:
                    del self._asked[output.id]
                    found.append(Answer(question, tuple(tokens), "".join(texts)))
        return found

    def close(self) -> None:
        """Let go of the engine."""
        if self._engine is not None:
            self._engine.close()

    def _with_questions(self) -> RequestEngine:
        """The engine, with all questions that fit its slots."""
        engine = self._engine
        while self._waiting:
            question = self._waiting[0]
            needed = len(question.prompt) + question.max_new_tokens
            if engine is None or needed > self._length:
                if self._asked:
                    break
                engine = self._make(needed)
            self._waiting.popleft()
            id = engine.submit(
                question.prompt,
                max_new_tokens=question.max_new_tokens,
                seed=question.seed,
                **question.drawing,
            )
            self._asked[id] = question, [], []
        assert engine is not None, "a question comes first"
        return engine

    def _make(self, needed: int) -> RequestEngine:
        self.close()
        self._length = min(max(SHORTEST, 1 << (needed - 1).bit_length()), self._longest)
        chooses = bool(self._spec.drafts) and self._tree is None and self._spec.mesh is None
        self._engine = self._spec.engine(
            max_num_seqs=self._slots, max_model_len=self._length, tree=self._tree, adaptive=chooses
        )
        return self._engine


class ServerAnswers:
    """Answers of a server, some requests at a time."""

    def __init__(self, server: Endpoint) -> None:
        """Ask nothing yet."""
        self._server, self._pool = server, ThreadPoolExecutor(server.concurrency)
        self._asked: dict[Future[RemoteAnswer], Question] = {}

    def ask(self, question: Question) -> None:
        """Queue a question."""
        future = self._pool.submit(
            self._server.answer,
            question.prompt,
            max_new_tokens=question.max_new_tokens,
            seed=question.seed,
            **question.drawing,
        )
        self._asked[future] = question

    def answers(self) -> list[Answer]:
        """Wait until some of the questions are answered.

        Raises:
          OSError: for a server that cannot be reached, or stays busy.
          ValueError: for what it refuses.
        """
        done, _ = wait(self._asked, return_when=FIRST_COMPLETED)
        found = [(self._asked.pop(future), future.result()) for future in done]
        return [Answer(question, answer.tokens, answer.text) for question, answer in found]

    def close(self) -> None:
        """Ask no more; requests that have begun end."""
        self._pool.shutdown(cancel_futures=True)


@dataclass
class Answering:
    """Answers conversations in their order."""

    answerer: EngineAnswers | ServerAnswers
    target: LongSpec | Endpoint
    """Whose tokenizer and stop tokens hold."""
    limits: Limits
    drawing: Drawing
    seed: int
    bad: BadRows
    """Takes note of rows that the chat template cannot write."""
    in_hand: int
    """Most rows between reading and writing."""
    template: str | None = None
    """Instead of the tokenizer's own."""
    counts: Counts = field(default_factory=Counts)

    def run(self, conversations: Iterator[Conversation]) -> Iterator[list[Conversation]]:
        """Lists of answered rows, in the order they come in; a list may be empty.

        Rows that are left out are not among them.

        Raises:
          ValueError: if more rows cannot be written by the template than the budget allows.
        """
        in_hand = deque[Conversation]()  # Those that are done wait for the ones before.
        under_way = set[int]()
        while True:
            fresh = list(islice(conversations, self.in_hand - len(in_hand)))
            in_hand += fresh
            if not in_hand:
                return
            under_way |= {row.row for row in fresh if self._ask(row)}
            done = []
            while in_hand and in_hand[0].row not in under_way:
                done.append(in_hand.popleft())
            done = [row for row in done if row.turns]
            self.counts.cut += sum(not row.complete for row in done)
            yield done
            for answer in self.answerer.answers() if under_way else ():
                row = answer.question.row
                self._take(answer)
                if not (row.waiting and self._ask(row)):
                    under_way.remove(row.row)

    def _ask(self, row: Conversation) -> bool:
        """Ask the next question of a row; whether there is one, and room for it."""
        if not row.ask():
            return False
        try:
            prompt = self._prompt(row)
        except ValueError as error:
            row.unask()
            self.bad.add(f"row {row.row + 1} of the rows that can be read", error)
            return False
        if len(prompt) <= self.limits.longest_prompt:
            seed = seed_of(self.seed, row.row, row.answers)
            new_tokens = self.limits.max_new_tokens
            self.answerer.ask(Question(row, prompt, new_tokens, seed, self.drawing))
            return True
        row.unask()
        if row.turns:
            self.counts.shortened += 1
        else:
            self.counts.too_long += 1
        return False

    def _prompt(self, row: Conversation) -> np.ndarray:
        """Token ids of the turns so far."""
        tokenizer, vocab_size = self.target.tokenizer, self.target.target_config.vocab_size
        if is_text(row.turns):
            whole = to_prompt(row.turns[0].content, tokenizer, vocab_size)
            return whole[: self.limits.prefix_tokens]
        return to_prompt(row.messages(), tokenizer, vocab_size, self.template)

    def _take(self, answer: Answer) -> None:
        """Add an answer to its row, or leave it out."""
        row, tokens, text = answer.question.row, answer.tokens, answer.text
        if is_text(row.turns):
            text = self.target.tokenizer.decode(
                [*answer.question.prompt.tolist(), *tokens],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        self.counts.answers += 1
        self.counts.tokens += len(tokens)
        if loops(tokens):
            self.counts.looping += 1
            row.unask()
        else:
            row.answer(text, complete=tokens[-1] in self.target.stop_tokens)
