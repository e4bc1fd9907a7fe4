"""Requests on their way into a slot and through it, as the host keeps them.

A request waits, is prefilled, and holds a slot. It may lose the slot, to a better request or
because a launch failed. It then waits again, with what it has emitted after its prompt: noise is
keyed by position, so its text goes on as if nothing had happened.
"""

import bisect
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.constrained import Guarded, first_tokens
from longspec_jax.decoding.logprobs import PromptLogprobs
from longspec_jax.decoding.prefill import NONE_KNOWN, ChunkLaunch, prefill_chunks, run_again
from longspec_jax.decoding.prefixes import Names, PrefixCache, chunk_names, known_chunks
from longspec_jax.decoding.rows import Request, Rows, stack
from longspec_jax.decoding.runner import ModelRunner, chunk_of

LOOKAHEAD = 16
"""Waiting requests that a step looks at, the first ones of which may be held back."""


class Waiting(NamedTuple):
    """A request that waits to be prefilled."""

    priority: int
    """A lower one goes first."""
    id: int
    """Of equal priority the one that came first goes first."""
    tokens: np.ndarray
    """``[P]`` its prompt, and what it emitted before it lost a slot."""
    request: Request
    """Its options, arrays of one row on the host; the budget is of tokens still to emit."""
    emitted: int = 0
    """How many of the tokens, the last ones, it has emitted itself."""
    names: Names = ()
    """Of its whole chunks, where prefixes are reused."""
    constraint: Guarded | None = None
    """What it may emit; it has taken in all that was read of the request."""
    candidate: int | None = None
    """What runs while it holds a slot; the policy's choice if absent."""
    cache_salt: str = ""
    """Its prompt shares nothing with prompts of another one."""
    alternatives: int = -1
    """Of every token that it emits, to report with log-probabilities; -1 for neither."""
    prompt_alternatives: int = -1
    """The same of its prompt; -1 where it has emitted something, and they were reported."""

    def rank(self) -> tuple[int, int]:
        """Its place in the queue."""
        return self.priority, self.id


@dataclass(eq=False, repr=False)
class Prefill:
    """Requests whose prompts are run as one batch, chunk by chunk."""

    waiting: Sequence[Waiting]
    """In the order of the queue, the best one first."""
    chunks: Generator[ChunkLaunch, None, Rows]
    """Launches a chunk at every step, and returns the rows."""
    chunk: int
    """Tokens of a chunk."""
    left: int
    """Chunks to launch; after the last one it waits for a slot."""
    cached: int = 0
    """Tokens of a single prompt that are known, and not prefilled."""
    read: int = 0
    """Tokens of the longest prompt that are known to have run, or were known before."""
    rows: Rows | None = None
    """The prefilled rows, once all chunks are launched."""
    logits: Array | None = None
    """``[B, V]`` after the last tokens of the prompts."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """``[B, C, m]`` of every chunk that was read, packed; empty if none were asked for."""

    def prompt_logprobs(self, row: int) -> PromptLogprobs | None:
        """Those of the prompt's tokens, the first one None; None if they were not asked for."""
        one = self.waiting[row]
        if one.prompt_alternatives < 0:
            return None
        found = [each[row] for each in self.logprobs]
        return PromptLogprobs(found, len(one.tokens) - 1, one.prompt_alternatives)

    @property
    def priority(self) -> int:
        """The best of its requests'."""
        return self.waiting[0].priority

    @property
    def ids(self) -> list[int]:
        """The numbers of its requests."""
        return [one.id for one in self.waiting]

    @property
    def asks_logprobs(self) -> bool:
        """Whether log-probabilities of emitted tokens are to be reported."""
        return any(one.alternatives >= 0 for one in self.waiting)


class StepPlan(NamedTuple):
    """What a step does before it launches rounds."""

    admit: Sequence[int] = ()
    """Of the queue: requests to begin to prefill as one batch."""
    chunk: int | None = None
    """The prefill whose next chunk is launched."""
    place: int | None = None
    """The prefill whose rows move into slots."""
    postpone: int | None = None
    """The prefill that goes back to the queue, because a better request waits."""
    preempt: int | None = None
    """The live request that loses its slot to a better one, and goes back to the queue."""


class Prompts:
    """The queue of requests, and the prefills under way."""

    def __init__(
        self,
        runner: ModelRunner,
        chunks: Sequence[int],
        *,
        most: int,
        reuse: PrefixCache | None,
    ) -> None:
        """Begin empty; arguments as in :class:`longspec_jax.decoding.engine.Engine`.

        Args:
          chunks: tokens of a chunk, ascending.
          most: prefills that may be under way at once.
          reuse: where chunks of earlier prompts are found; None to run them all.
        """
        self.chunks = tuple(chunks)
        self.queue: list[Waiting] = []
        """In the order in which they are admitted."""
        self.under_way: list[Prefill] = []
        """In the order in which they began."""
        self._runner, self._most, self._reuse = runner, most, reuse

    @property
    def all(self) -> list[Waiting]:
        """Every request, the queued ones first."""
        return self.queue + [one for prefill in self.under_way for one in prefill.waiting]

    def check_fits(self, prompt: int, longest: int, readmits: bool) -> None:
        """Refuse a request that a row cannot hold.

        Args:
          longest: tokens of its prompt and of all that it may emit.
          readmits: whether it may be prefilled again with all but one of them.

        Raises:
          ValueError: says how many slots it takes.
        """
        most = max(longest - 1, prompt) if readmits else prompt
        needed, capacity = longest + self._runner.slack, self._runner.capacity
        for chunk in {chunk_of(prompt, self.chunks), chunk_of(most, self.chunks)}:
            needed = max(needed, -(-most // chunk) * chunk)
        if needed > capacity:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens={longest - prompt} take {needed} "
                f"cache slots and a row has {capacity}; make the engine with more, or ask for less"
            )

    def take_chunks_of(self, chunk: int) -> None:
        """Prefill in chunks of another size from now on; shorter prompts keep their own."""
        self.chunks = *(size for size in self.chunks[:-1] if size < chunk), chunk

    def add(self, waiting: Waiting) -> None:
        """Queue a request."""
        if self._reuse:
            chunk = chunk_of(len(waiting.tokens), self.chunks)
            names = chunk_names(waiting.tokens, chunk, waiting.cache_salt)
            waiting = waiting._replace(names=names)
        bisect.insort(self.queue, waiting, key=Waiting.rank)

    def cancel(self, id: int) -> bool:
        """Forget a request.

        Returns:
          Whether it goes on all the same, because others are prefilled together with it.
        """
        self.queue = [one for one in self.queue if one.id != id]
        alone = [id]
        self.under_way = [one for one in self.under_way if one.ids != alone]
        return any(id in one.ids for one in self.under_way)

    def postpone(self, index: int) -> None:
        """Have a prefill under way wait again."""
        self.add(self.under_way.pop(index).waiting[0])

    def clear(self) -> None:
        """Forget everything."""
        self.queue.clear()
        self.under_way.clear()

    def plan(self, free: int, live: Sequence[int]) -> StepPlan:
        """What a step does next; nothing changes by it.

        A lower priority goes first, and of equal ones the request that came first. A prompt is
        prefilled ahead of a free slot. Of several prompts of the best priority the one with the
        fewest chunks left goes on, so that a long one does not hold up a short one.

        Args:
          free: vacant slots.
          live: priorities of the requests that hold a slot and may lose it, the one that came last
            last.
        """
        slots, together = self._runner.slots, self._runner.together
        size, full = slots if together else 1, len(self.under_way) >= self._most
        seen = self.queue[: max(slots, LOOKAHEAD)]
        eligible = [index for index, one in enumerate(seen) if not self._is_held_back(one)]
        may_admit = len(eligible) >= size and not full
        left, ready, preempt, postpone = [], [], None, None
        for index, one in enumerate(self.under_way):
            if one.left:
                left.append((one.priority, one.left, index))
            else:
                ready.append((one.priority, index))
        best = min(ready, default=None)
        if best and live and not free:
            worst, youngest = max((priority, index) for index, priority in enumerate(live))
            preempt = youngest if best[0] < worst else None
        if full and eligible and not together:
            # The prefill of the worst priority that began last, if a better request waits.
            worst, last = max((one.priority, index) for index, one in enumerate(self.under_way))
            postpone = last if self.queue[eligible[0]].priority < worst else None
        return StepPlan(
            admit=tuple(eligible[:size]) if may_admit else (),
            chunk=min(left)[2] if left else None,
            place=best[1] if best and free >= size else None,
            postpone=postpone,
            preempt=preempt,
        )

    def admit(self, indices: Sequence[int], rows: Rows | None) -> None:
        """Begin to prefill some requests of the queue, as one batch.

        Args:
          rows: of the slots, where chunks may be found; None before the first prompt.
        """
        runner, waiting = self._runner, [self.queue[index] for index in indices]
        lengths, scored, constrained = [len(one.tokens) for one in waiting], False, False
        tokens = np.zeros((len(waiting), longest := max(lengths)), np.int32)
        emitted = np.zeros(len(waiting), np.int32)
        for row, one in enumerate(waiting):
            tokens[row, : lengths[row]] = one.tokens
            emitted[row] = one.emitted
            scored = scored or one.prompt_alternatives >= 0
            constrained = constrained or one.constraint is not None
        chunk = chunk_of(longest, self.chunks)
        known, skipped, allowed = NONE_KNOWN, 0, None
        if self._reuse and not scored:
            known = self._reuse.take(self._reusable(waiting[0]), longest, chunk, rows)
            skipped = max(0, known.total - run_again(runner.drafter.needs, chunk)) * chunk
        if constrained:
            constraints = [one.constraint for one in waiting]
            allowed = first_tokens(constraints, runner.target.vocab_size)
        request = waiting[0].request
        if len(waiting) > 1:
            request = stack([one.request for one in waiting])
        # The tree, which tells the candidates apart, does not matter to a prompt.
        chunks = prefill_chunks(
            runner.target,
            runner.drafter,
            runner.params,
            tokens,
            np.asarray(lengths, np.int32),
            request,
            shardings=runner.shardings if runner.together else runner.row_shardings,
            capacity=runner.capacity,
            chunk=chunk,
            known=known,
            emitted=emitted,
            logprobs=runner.contents.logprobs if scored else None,
            allowed=allowed,
        )
        count = -(-longest // chunk) - known.copied
        self.under_way.append(Prefill(waiting, chunks, chunk, count, skipped, skipped))
        for index in sorted(indices, reverse=True):
            del self.queue[index]

    def launch(self, prefill: Prefill) -> ChunkLaunch:
        """Launch the next chunk of a prefill under way; after the last one there are its rows."""
        launched = next(prefill.chunks)
        prefill.logits = launched.logits
        prefill.left -= 1
        if not prefill.left:
            try:
                next(prefill.chunks)
            except StopIteration as end:
                prefill.rows = end.value
        if self._reuse:
            self._reuse.keep(prefill.waiting[0].names, prefill.chunk, launched)
        return launched

    def _is_held_back(self, one: Waiting) -> bool:
        """Whether it finds more of its prompt once a prefill under way is in a slot."""
        if not (self._reuse and self.under_way):
            return False
        reusable = self._reusable(one)
        found = (
            known_chunks(reusable, prefill.waiting[0].names)
            for prefill in self.under_way
            if prefill.priority <= one.priority
        )
        return max(found, default=0) > self._reuse.count(reusable)

    def _reusable(self, one: Waiting) -> Names:
        """The chunks of this prompt that need not run if a slot has them."""
        assert self._reuse is not None
        length = len(one.tokens)
        return self._reuse.reusable(one.names, length, chunk_of(length, self.chunks))
