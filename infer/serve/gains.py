"""What rows gain, how it reaches the reader of a call, and what is said of its speed.

The fields of acceptance are those of vLLM's answers.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from longspec_jax.decoding.report import RoundTree
from longspec_jax.drafters.base import proposers
from longspec_jax.generation.requests import RequestOutput

from .calls import Row
from .protocol import Refused
from .token_texts import LONGEST_RUN, Offsets, TokenText, completed_text


def joined(gains: Sequence[RequestOutput]) -> RequestOutput:
    """What a row has gained in steps one after the other, as if it were one."""
    if len(gains) == 1:
        return gains[0]
    chained = {
        name: tuple(chain.from_iterable(getattr(gain, name) for gain in gains))
        for name in ("tokens", "drafted", "rounds", "logprobs", "trees", "sources", "pieces")
    }
    text = "".join(gain.text for gain in gains)
    end = {"finish": gains[-1].finish, "reason": gains[-1].reason}
    return replace(gains[0], text=text, **end, **chained)


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
        return joined(self.gains)


class Ticket:
    """The rows of one call, by which an event loop follows them through another thread's engine.

    The event loop awaits :meth:`begun` and reads :meth:`gains`; the engine's thread calls
    :meth:`begin`, :meth:`put` and :meth:`fail`, and then :meth:`wake`, which takes effect in the
    loop. What passes between them is a queue, whose two ends may be used at once, and two values
    that the thread alone sets.
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
            proposed = Counter[int]()
            while self._arrived:
                row, gain, verified = self._arrived.popleft()
                by_row.setdefault(row, []).append(gain)
                proposed[row] += verified
            for row, gains in by_row.items():
                gain = joined(gains)
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
    levels, proposed = answer.levels, answer.proposed
    rounds, accepted = len(answer.rounds), sum(answer.rounds)
    if not rounds or not proposed:
        return None
    counts = Counter(answer.rounds)
    return {
        "mean_acceptance_length": 1 + accepted / rounds,
        "draft_acceptance_rate": accepted / proposed,
        "acceptance_histogram": [counts[n] for n in range(max(levels, *counts) + 1)],
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": proposed,
        "num_spec_tokens": levels,
    }


def rounds_of(
    gain: RequestOutput,
    text_of: TokenText,
    row: int,
    before: Sequence[int] = (),
    sources: Sequence[str] = (),
    *,
    accepted_only: bool = False,
) -> dict[str, Any]:
    """The tokens of a row's gain and the rounds that they came from, for the page.

    Args:
      before: the last tokens before the gain, which may begin its first character.
      sources: names of the drafters; where there are several, each draft token says who proposed
        it.
      accepted_only: show no other nodes of a tree than those of the accepted path.
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
        reached = [node for node, parent in enumerate(tree.parents) if parent >= 0 or node == 0]
        one["tree"] = _tree_of(tree, tree.path if accepted_only else reached, text_of)
    return {"index": row, "tokens": tokens, "rounds": rounds}


def _tree_of(tree: RoundTree, kept: Sequence[int], text_of: TokenText) -> dict[str, Any]:
    """A round's tree by texts, of some nodes, the root among them."""
    place = {-1: -1, **{node: index for index, node in enumerate(kept)}}
    return {
        "tokens": [text_of(tree.tokens[node]) for node in kept],
        "parents": [place[tree.parents[node]] for node in kept],
        "draws": [text_of(tree.draws[node]) for node in kept],
        "path": [place[node] for node in tree.path],
    }
