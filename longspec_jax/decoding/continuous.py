"""A batch whose rows come and go: newcomers are prefilled between the rounds of the others.

The host launches ahead of the device, as in :mod:`longspec_jax.decoding.ahead`: what a launch did
is read while the next ones already run. A slot whose row has ended is therefore seen to be free a
round or two late; until then its row takes part in rounds without emitting anything.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from longspec_jax.decoding.adaptive import check_one_clock, tallest
from longspec_jax.decoding.ahead import Report, fetch, one_round
from longspec_jax.decoding.choosing import Choosing
from longspec_jax.decoding.engine import slack_slots
from longspec_jax.decoding.home import Home
from longspec_jax.decoding.policy import Measurement, Policy
from longspec_jax.decoding.prefill import prefill_chunks, vacant
from longspec_jax.decoding.rows import Request, Rows, insert, release
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params

AHEAD = 2
"""Launches on the device's queue while the host waits for the one before them."""


@dataclass(frozen=True)
class Gained:
    """What a row has gained: its first token from the prefill, or the tokens of a round."""

    key: int
    """The request's, as it was admitted."""
    tokens: np.ndarray
    """``[n]``, at least one."""
    drafted: np.ndarray
    """``[n]`` whether each was an accepted draft token."""
    first: bool
    """Whether it comes from the prefill, and no round was run for it."""
    ended: bool
    """Whether the row has met a stop token or its budget, and left its slot."""


class _Newcomer(NamedTuple):
    key: int
    chunks: Any
    """Launches a chunk of its prompt at every step."""


class _Prefilled(NamedTuple):
    key: int
    row: Rows


class _Flight(NamedTuple):
    """Something that was launched, and not yet looked at."""

    launched: float
    output: Any
    """Ready when it has run."""
    land: Callable[[float], list[Gained]]
    """Reads what it did, in so many seconds."""
    candidate: int | None
    """Whose round it is; None for part of a prefill."""


class ContinuousBatch:
    """Row slots that requests pass through.

    A scheduler admits requests whenever :attr:`wants_more`, calls :meth:`step` until it is no
    longer :attr:`busy`, and hands on what each step returns. Requests may differ in everything but
    what is static: the kinds of sampling, which
    :class:`~longspec_jax.decoding.sampling.Sampling` names, and the number of stop tokens. Nothing
    is compiled after the first of them.
    """

    def __init__(
        self,
        target: TargetModel,
        drafters: Sequence[Drafter],
        params: Params,
        like: Request,
        *,
        slots: int,
        capacity: int,
        chunk: int,
        policy: Policy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with vacant slots.

        Args:
          target: the target's static part.
          drafters: the candidates, in the policy's order; they share parameters and state.
          params: parameters of both.
          like: a request of one row with what is static about all of them.
          slots: rows that are decoded at once.
          capacity: cache slots of a row: prompt, new tokens and the room of a round; the whole
            chunks of a prompt, too.
          chunk: tokens of a prefill step.
          policy: chooses the candidate of every round.
          clock: seconds.
        """
        check_one_clock(len(drafters))
        # What tells them apart, the tree, is no matter of a prompt.
        self._models = target, tallest(drafters), params
        self._sizes = {"capacity": capacity, "chunk": chunk}
        self._rows = vacant(*self._models, like, batch=slots, capacity=capacity)
        self._home = Home.beside(params.target, slots)
        self._choosing = Choosing(policy, len(drafters))
        # All rounds have one shape, so their programs are looked up once.
        models = [(target, drafter, params) for drafter in drafters]
        self._launches = [partial(one_round.of_shape(*one, self._rows), *one) for one in models]
        self._held: list[int | None] = [None] * slots
        self._newcomer: _Newcomer | _Prefilled | None = None
        self._flights: deque[_Flight] = deque()
        self._clock, self._last_landing = clock, 0.0
        self.prefilled = 0
        """Tokens that have been run of the prompt that a newcomer brought last."""
        self.prefill_seconds = 0.0
        """Seconds of the device's time that newcomers' prompts have taken."""

    @property
    def totals(self) -> tuple[Measurement, ...]:
        """What every candidate has done so far."""
        return self._choosing.totals

    @property
    def rows(self) -> Rows:
        """The live rows, behind the last launch."""
        return self._rows

    @property
    def wants_more(self) -> bool:
        """Whether a request can be admitted: one at a time is prefilled, ahead of a free slot."""
        return self._newcomer is None

    @property
    def busy(self) -> bool:
        """Whether there is something to step."""
        held = any(key is not None for key in self._held)
        return held or bool(self._flights) or self._newcomer is not None

    def admit(self, key: int, tokens: np.ndarray, request: Request) -> None:
        """Take a request in; the next steps prefill its prompt, a chunk at a time.

        Args:
          key: names the request in what :meth:`step` returns; no other has it now.
          tokens: ``[P]`` its prompt, at least one token.
          request: what it asks for, arrays of one row on the host.

        Raises:
          RuntimeError: while another newcomer is being prefilled.
          ValueError: if the slots have no room for the prompt and what it may emit.
        """
        if not self.wants_more:
            raise RuntimeError("a newcomer is being prefilled; step until wants_more")
        self._check_room(len(tokens), int(request.max_new_tokens[0]))
        length = np.asarray([len(tokens)], np.int32)
        chunks = prefill_chunks(*self._models, tokens[None], length, request, **self._sizes)
        self._newcomer, self.prefilled = _Newcomer(key, chunks), 0

    def _check_room(self, prompt: int, new: int) -> None:
        capacity, chunk = self._sizes["capacity"], self._sizes["chunk"]
        whole_chunks = -(-prompt // chunk) * chunk
        needed = max(whole_chunks, prompt + new + slack_slots(self._models[1].tree.num_levels))
        if needed > capacity:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens={new} take {needed} cache slots "
                f"and a row has capacity={capacity}; make the batch with more, or ask for less"
            )

    def drop(self, key: int) -> None:
        """End a request before its time; what was launched for it may still be reported."""
        if self._newcomer is not None and self._newcomer.key == key:
            self._newcomer = None
        for slot, held in enumerate(self._held):
            if held == key:
                self._rows = release(self._rows, slot)
                self._held[slot] = None

    def step(self) -> list[Gained]:
        """Launch a chunk of a newcomer and a round of the others, and read what has ended."""
        before = len(self._flights)
        self._launch_chunk()
        self._settle()
        self._launch_round()
        most = AHEAD if len(self._flights) > before else 0
        gained = []
        while len(self._flights) > most:
            gained += self._land()
            if not most and gained:
                break
        return gained

    def _launch_chunk(self) -> None:
        if not isinstance(self._newcomer, _Newcomer):
            return
        key, chunks = self._newcomer
        try:
            launched, after = next(chunks)
        except StopIteration as end:
            self._newcomer = _Prefilled(key, end.value)
        else:
            self._fly(after, partial(self._note_prefill, launched))

    def _settle(self) -> None:
        """Move a prefilled row into a free slot, if there is one."""
        if not isinstance(self._newcomer, _Prefilled) or None not in self._held:
            return
        (key, row), slot = self._newcomer, self._held.index(None)
        self._rows = insert(self._home, self._rows, np.int32(slot), row)
        self._held[slot], self._newcomer = key, None
        first, remaining = row.pending, row.remaining

        def land(seconds: float) -> list[Gained]:
            self.prefill_seconds += seconds
            ended = not np.asarray(remaining).any()
            if ended:
                self._vacate(key)
            return [Gained(key, np.asarray(first), np.zeros(1, bool), True, ended)]

        self._fly(first, land)

    def _launch_round(self) -> None:
        held = tuple(self._held)
        if not any(key is not None for key in held):
            return
        flying = [flight.candidate for flight in self._flights if flight.candidate is not None]
        candidate = self._choosing.next(flying)
        self._rows, packed = self._launches[candidate](self._rows)

        def land(seconds: float) -> list[Gained]:
            report, gained = Report.of(fetch(packed)), []
            self._choosing.count(candidate, report.measured(seconds))
            for slot, key in enumerate(held):
                count = report.count[slot]
                if key is None or not count:
                    continue
                tokens, drafted = report.tokens[slot, :count], report.drafted[slot, :count]
                ended = bool(report.done[slot])
                if ended:
                    self._vacate(key)
                gained.append(Gained(key, tokens, drafted, False, ended))
            return gained

        self._fly(packed, land, candidate)

    def _fly(
        self, output: Any, land: Callable[[float], list[Gained]], candidate: int | None = None
    ) -> None:
        self._flights.append(_Flight(self._clock(), output, land, candidate))

    def _land(self) -> list[Gained]:
        """Wait for the oldest launch, and read what it did."""
        launched, output, land, _ = self._flights.popleft()
        jax.block_until_ready(output)
        now = self._clock()
        seconds, self._last_landing = now - max(launched, self._last_landing), now
        return land(seconds)

    def _note_prefill(self, tokens: int, seconds: float) -> list[Gained]:
        self.prefilled = tokens
        self.prefill_seconds += seconds
        return []

    def _vacate(self, key: int) -> None:
        if key in self._held:
            self._held[self._held.index(key)] = None
