"""What rows gain: the texts of their tokens, and how they reach the reader of a call.

A token may be a part of a character. Its text is then U+FFFD, which says nothing, and its bytes are
what a client needs: those of all tokens together are the text's.
"""

import asyncio
import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from longspec_jax.generation.text import RequestOutput

from .calls import Row
from .fields import Refused

TokenText = Callable[..., str]
"""The text of one token or of several in a row, special ones included."""
INCOMPLETE = "\ufffd"
"""Text of a part of a character."""
LONGEST_RUN = 4
"""Most tokens of a character: UTF-8 has four bytes."""
LONGEST_OPEN = 64
"""Tokens of a run that may go on inside a character: where tokens end one and begin the next."""
MOST_TEXTS = 2**16
"""Texts that are kept, some 10 MB. Runs of tokens have no end of different texts."""


class TokenTexts:
    """The texts of tokens, of which the latest are kept; called as a :data:`TokenText`."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stored: Callable[[int], bytes | None] = lambda token: None,
        special: Set[int] = frozenset(),
    ) -> None:
        """Bind the tokenizer.

        Args:
          decode: the text of token ids.
          stored: the bytes of a token as the tokenizer stores it; None where that is not known.
          special: tokens that are no part of a text.
        """
        self._text = functools.lru_cache(MOST_TEXTS)(partial(token_text, decode))
        self._stored, self.special = stored, special

    def __call__(self, *tokens: int) -> str:
        """The text of one token or of several in a row."""
        return self._text(*tokens)

    def bytes_of(self, token: int) -> list[int] | None:
        """What a token adds to the UTF-8 of a text; None where that is not known.

        Also None of a special token, which adds nothing.
        """
        if token in self.special:
            return None
        text = self._text(token)
        found = text.encode("utf-8", "replace") if INCOMPLETE not in text else self._stored(token)
        return None if found is None else [*found]


@dataclass
class Offsets:
    """Where each token of a text begins, in characters, as the tokens come."""

    characters: int = 0
    """Of the tokens before the open run."""
    run: tuple[int, ...] = ()
    """Tokens after them; the last one ends inside a character."""

    def add(self, token: int, text_of: TokenText) -> int:
        """Where the next token begins; of one inside a character that is where this begins."""
        run = (*self.run, token)
        text, own = text_of(*run), text_of(token)
        if INCOMPLETE not in own:
            at = self.characters + len(text) - len(own)
        else:
            at = self.here(text_of)
        if text.endswith(INCOMPLETE) and len(run) < LONGEST_OPEN:
            self.run = run
        else:
            self.characters, self.run = self.characters + len(text), ()
        return at

    def here(self, text_of: TokenText) -> int:
        """Where the text so far ends, or the character begins that it ends in."""
        return self.characters + len(text_of(*self.run).rstrip(INCOMPLETE) if self.run else "")


def token_text(decode: Callable[[Sequence[int]], str], *tokens: int) -> str:
    """The text of tokens inside a text, with its space: SentencePiece drops one at the start."""
    return decode([*tokens, *tokens])[len(decode(tokens)) :]


def completed_text(text_of: TokenText, tokens: Sequence[int]) -> str:
    """The text that the last token completes; empty where it ends inside a character."""
    runs = (text_of(*tokens[-count:]) for count in range(1, min(len(tokens), LONGEST_RUN) + 1))
    return next((text for text in runs if INCOMPLETE not in text), "")


def coalesce(gains: Sequence[RequestOutput]) -> RequestOutput:
    """What a row has gained in steps one after the other, as if it were one."""
    if len(gains) == 1:
        return gains[0]
    return replace(
        gains[0],
        finish=gains[-1].finish,
        reason=gains[-1].reason,
        text="".join(gain.text for gain in gains),
        tokens=tuple(chain.from_iterable(gain.tokens for gain in gains)),
        drafted=tuple(chain.from_iterable(gain.drafted for gain in gains)),
        rounds=tuple(chain.from_iterable(gain.rounds for gain in gains)),
        logprobs=tuple(chain.from_iterable(gain.logprobs for gain in gains)),
        trees=tuple(chain.from_iterable(gain.trees for gain in gains)),
        sources=tuple(chain.from_iterable(gain.sources for gain in gains)),
        pieces=tuple(chain.from_iterable(gain.pieces for gain in gains)),
    )


def proposed_tokens(gain: RequestOutput, speculates: bool) -> int:
    """Draft tokens that the target has verified for a row.

    A row that does not speculate accepts none of what its neighbours' tree proposes.
    """
    return sum(len(tree.tokens) - 1 for tree in gain.trees) if speculates else 0


@dataclass
class Times:
    """When things happened to a row, in seconds of one clock; None for what did not happen yet."""

    arrived: float
    started: float | None = None
    """When its prompt began to run."""
    first: float | None = None
    last: float | None = None


@dataclass
class Answer:
    """One row, and what is known of its answer."""

    prompt: tuple[int, ...]
    echoed: str = ""
    """What stands before the generated text."""
    times: Times = field(default_factory=lambda: Times(0.0))
    levels: int = 0
    """Of the tree: the most draft tokens that a round may accept."""
    speculates: bool = True
    new: int = 0
    """Generated tokens."""
    rounds: list[int] = field(default_factory=list)
    """Accepted draft tokens of every round."""
    proposed: int = 0
    """Draft tokens that the target has verified."""
    cached: int = 0
    """Tokens of the prompt that were not prefilled anew."""
    finish: str | None = None
    """As of the last gain."""
    offsets: Offsets = field(default_factory=Offsets)
    """Of the tokens whose log-probabilities were written."""
    gains: list[RequestOutput] = field(default_factory=list)
    """All of them, where the answer is written at its end. A stream's are gone once written."""

    def add(self, gain: RequestOutput, proposed: int) -> None:
        """Count what the row has gained, of which this many draft tokens were verified."""
        self.new += len(gain.tokens)
        self.rounds += gain.rounds
        self.proposed += proposed
        self.cached += gain.cached_tokens
        self.finish = gain.finish

    def begins_with(self, gain: RequestOutput) -> bool:
        """Whether this is the row's first gain, once it was added."""
        return self.new == len(gain.tokens)

    @property
    def gain(self) -> RequestOutput:
        """Everything that was kept."""
        return coalesce(self.gains)


class RequestHandle:
    """The rows of one call, by which an event loop follows them through another thread's engine.

    The event loop awaits :meth:`begun` and reads :meth:`gains`; the engine's thread calls
    :meth:`begin`, :meth:`put` and :meth:`fail`, and then :meth:`wake`, which takes effect in the
    loop. What passes between them is a queue, whose two ends may be used at once, and two values
    that only the thread sets.
    """

    def __init__(self, rows: Sequence[Row], deadline: float, levels: int) -> None:
        """Wait to be submitted; the deadline is of the monotonic clock."""
        self.rows, self.deadline = tuple(rows), deadline
        self.arrived = time.monotonic()
        self.answers = [
            Answer(
                row.tokens,
                times=Times(self.arrived),
                levels=levels,
                speculates=row.options.get("speculate", True),
            )
            for row in rows
        ]
        """Filled by the reader; the thread writes their times."""
        self.ids: list[int] = []
        """Of the rows in the engine, in their order."""
        self.open = len(self.rows)
        """Rows that have not ended."""
        self.loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, RequestOutput, int]] = deque()
        self._ready, self._begun = asyncio.Event(), asyncio.Event()
        self._failure: Refused | None = None
        self._submitted = False

    def begin(self) -> None:
        """The engine has taken all rows."""
        self._submitted = True

    def put(self, row: int, gain: RequestOutput, proposed: int) -> None:
        """A row has gained something, of which this many draft tokens were verified."""
        self._arrived.append((row, gain, proposed))

    def fail(self, refused: Refused) -> None:
        """Ends the stream with an error."""
        self._failure = refused

    def wake(self) -> None:
        """Have the reader look; in its loop."""
        if self._submitted or self._failure is not None:
            self._begun.set()
        self._ready.set()

    async def begun(self) -> None:
        """Wait until the engine has taken the rows.

        Raises:
          Refused: if it does not take them.
        """
        await self._begun.wait()
        if self._failure is not None and not self._arrived:
            raise self._failure

    async def gains(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """What rows gain, until all have ended; what was not read meanwhile is joined.

        Raises:
          Refused: if a row ends early.
        """
        left = len(self.rows)
        while left:
            await self._ready.wait()
            self._ready.clear()
            by_row: dict[int, list[RequestOutput]] = {}
            proposed = Counter[int]()
            while self._arrived:
                row, gain, verified = self._arrived.popleft()
                by_row.setdefault(row, []).append(gain)
                proposed[row] += verified
            for row, gains in by_row.items():
                gain = coalesce(gains)
                if gain.finish == "error" and gain.reason is None:
                    raise Refused(
                        "the model's logits were not finite, so the text cannot go on; the model "
                        "overflows in its number format",
                        status=500,
                    )
                left -= gain.finish is not None
                self.answers[row].add(gain, proposed[row])
                yield row, gain
            if self._failure is not None and not self._arrived:
                raise self._failure


def wake(handles: Iterable[RequestHandle]) -> None:
    """Have the readers of handles look, each in its loop; called by the engine's thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestHandle]] = {}
    for handle in handles:
        by_loop.setdefault(handle.loop, []).append(handle)
    for loop, woken in by_loop.items():
        with contextlib.suppress(RuntimeError):  # The loop is closed, and nobody reads.
            loop.call_soon_threadsafe(_wake_all, woken)


def _wake_all(handles: Iterable[RequestHandle]) -> None:
    for handle in handles:
        handle.wake()
