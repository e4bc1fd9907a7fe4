"""What rows gain, how it reaches the reader of a call, and what is said of its speed.

The fields of acceptance are those of vLLM's answers.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from longspec_jax.decoding.report import RoundTree
from longspec_jax.drafters.base import proposers
from longspec_jax.generation.requests import RequestOutput

from .protocol import Row
from .rules import Refused

TokenText = Callable[..., str]
"""The text of one token or of several in a row, special ones included."""
INCOMPLETE = "\ufffd"
"""Text of a part of a character."""
LONGEST_RUN = 4
"""Most tokens of a character: UTF-8 has four bytes."""


def joined(gains: Sequence[RequestOutput]) -> RequestOutput:
    """What a row has gained in steps one after the other, as if it were one."""
    if len(gains) == 1:
        return gains[0]
    chained = {
        name: tuple(chain.from_iterable(getattr(gain, name) for gain in gains))
        for name in ("tokens", "drafted", "rounds", "logprobs", "trees", "sources", "pieces")
    }
    text = "".join(gain.text for gain in gains)
    return replace(gains[0], text=text, finish=gains[-1].finish, **chained)


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
    gains: list[RequestOutput] = field(default_factory=list)
    new: int = 0
    """Generated tokens."""
    offset: int = 0
    """Characters of the tokens whose log-probabilities were written."""

    def add(self, gain: RequestOutput) -> None:
        """Take in what the row has gained."""
        self.gains.append(gain)
        self.new += len(gain.tokens)

    def last_rounds(self, most: int) -> list[int]:
        """Accepted draft tokens of the last ``most`` rounds."""
        # A gain has a round, but for the first one and those that a slow reader has read at once.
        return [one for gain in self.gains[-most - 1 :] for one in gain.rounds][-most:]

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.gains) and self.gains[-1].finish is not None

    @property
    def gain(self) -> RequestOutput:
        """Everything so far."""
        return joined(self.gains)


class Ticket:
    """The rows of one call, by which an event loop follows them through another thread's engine.

    The event loop awaits :meth:`begun` and reads :meth:`gains`; the engine's thread calls
    :meth:`begin`, :meth:`put` and :meth:`fail`, and then :meth:`wake`, which takes effect in the
    loop.
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
        self._arrived: deque[tuple[int, RequestOutput]] = deque()
        self._ready, self._begun = asyncio.Event(), asyncio.Event()
        self._failure: Refused | None = None
        self._submitted = False

    def begin(self) -> None:
        """The engine has taken all rows."""
        self._submitted = True

    def put(self, row: int, gain: RequestOutput) -> None:
        """A row has gained something."""
        self._arrived.append((row, gain))

    def fail(self, refused: Refused) -> None:
        """Nothing more will come."""
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
            while self._arrived:
                row, gain = self._arrived.popleft()
                by_row.setdefault(row, []).append(gain)
            for row, gains in by_row.items():
                gain = joined(gains)
                if gain.finish == "error":
                    raise Refused(
                        "the model's logits were not finite, so the text cannot go on; the model "
                        "overflows in its number format",
                        status=500,
                    )
                left -= gain.finish is not None
                self.answers[row].add(gain)
                yield row, gain
            if self._failure is not None and not self._arrived:
                raise self._failure


def wake(tickets: Iterable[Ticket]) -> None:
    """Have the readers of tickets look, each in its loop; called by the engine's thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in tickets:
        by_loop.setdefault(ticket.loop, []).append(ticket)
    for loop, woken in by_loop.items():
        with contextlib.suppress(RuntimeError):  # The loop is closed, and nobody reads.
            loop.call_soon_threadsafe(_wake_all, woken)


def _wake_all(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        ticket.wake()


def metrics_of(answer: Answer) -> dict[str, Any]:
    """Acceptance and times of a row that has ended."""
    times = answer.times
    first = _milliseconds(times.arrived, times.first)
    decode = _milliseconds(times.first, times.last)
    whole = _milliseconds(times.arrived, times.last)
    between = answer.new - 1
    return {
        "speculative_decoding": acceptance_of(answer),
        "time_to_first_token_ms": first,
        "queue_time_ms": _milliseconds(times.arrived, times.started),
        "mean_itl_ms": decode / between if decode is not None and between > 0 else None,
        "tokens_per_second": 1000 * answer.new / whole if whole else None,
    }


def _milliseconds(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(1000 * (end - begin), 3)


def acceptance_of(answer: Answer) -> dict[str, Any] | None:
    """What the draft has given a row; None if it drafted nothing."""
    gain, levels = answer.gain, answer.levels
    rounds, accepted = len(gain.rounds), sum(gain.rounds)
    proposed = proposed_tokens(gain, answer.speculates)
    if not rounds or not proposed:
        return None
    counts = Counter(gain.rounds)
    return {
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_acceptance_rate": accepted / proposed,
        "acceptance_histogram": [counts[n] for n in range(max(levels, *counts) + 1)],
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": proposed,
        "num_spec_tokens": levels,
    }


def token_text(decode: Callable[[Sequence[int]], str], *tokens: int) -> str:
    """The text of tokens inside a text, with its space: SentencePiece drops one at the start."""
    return decode([*tokens, *tokens])[len(decode(tokens)) :]


def completed_text(text_of: TokenText, tokens: Sequence[int]) -> str:
    """The text that the last token completes; empty where it ends inside a character."""
    runs = (text_of(*tokens[-count:]) for count in range(1, min(len(tokens), LONGEST_RUN) + 1))
    return next((text for text in runs if INCOMPLETE not in text), "")


def rounds_of(
    gain: RequestOutput,
    text_of: TokenText,
    row: int,
    before: Sequence[int] = (),
    sources: Sequence[str] = (),
) -> dict[str, Any]:
    """The tokens of a row's gain and the rounds that they came from, for the page.

    The last tokens ``before`` the gain may begin its first character. Where there are several
    drafters, ``sources`` are their names, and each draft token says who proposed it.
    """
    tokens, depth, ids = [], 0, [*before]
    proposed = gain.sources or gain.drafted
    for token, drafted, bits in zip(gain.tokens, gain.drafted, proposed, strict=True):
        depth = depth + 1 if drafted else 0
        ids.append(token)
        text = completed_text(text_of, ids[-LONGEST_RUN:])
        told = {"text": text, "id": token, "drafted": drafted, "depth": depth}
        by = {"source": proposers(sources, bits)} if drafted and len(sources) > 1 else {}
        tokens.append({**told, **by})
    rounds: list[dict[str, Any]] = [
        {"accepted": accepted, "tree": None} for accepted in gain.rounds
    ]
    for one, tree in zip(rounds, gain.trees, strict=False):
        one["tree"] = _tree_of(tree, text_of)
    return {"index": row, "tokens": tokens, "rounds": rounds}


def _tree_of(tree: RoundTree, text_of: TokenText) -> dict[str, Any]:
    """A round's tree by texts, without the nodes that no path reaches."""
    kept = [node for node, parent in enumerate(tree.parents) if parent >= 0 or node == 0]
    place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    return {
        "tokens": [text_of(tree.tokens[node]) for node in kept],
        "parents": [place[tree.parents[node]] for node in kept],
        "draws": [text_of(tree.draws[node]) for node in kept],
        "path": [place[node] for node in tree.path],
    }
