"""The engine: row slots through which requests pass.

Everything that decodes drives this one object: a call that runs to its end, a stream, a server. A
scheduler submits requests whenever it likes and calls :meth:`Engine.step` while the engine is busy.
Every step launches at most one chunk of a prompt and one launch of rounds, and then reads what has
finished. Launches are queued ahead of what was read, so that the device does not wait for the host.

Two kinds of launches run rounds (:mod:`longspec_jax.decoding.round`). A stream takes one round a
launch, and reads it while the next one runs. A call that nobody follows takes as many rounds as
fill :data:`LAUNCH_SECONDS`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.candidates import check_one_clock, tallest
from longspec_jax.decoding.launches import LaunchQueue
from longspec_jax.decoding.policy import Choice, LateChoices, Measurement, Policy, default_policy
from longspec_jax.decoding.prefill import chunk_of, prefill_chunks, vacant
from longspec_jax.decoding.round import MOST_ROUNDS, Report, many_rounds, one_round, slack_slots
from longspec_jax.decoding.rows import Request, Rows, RowShardings, insert, release, stack
from longspec_jax.decoding.sampling import NO_TOKEN, SamplingKind
from longspec_jax.decoding.schedule import Snapshot, plan
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params

LAUNCH_SECONDS = 0.4
"""Seconds of a launch of many rounds: the host can interrupt a run between two of them. Behind each
a GPU waits some 2 ms for the host."""
FIRST_ROUNDS = 4
"""Rounds of the first launch of many where nothing is known of a round's seconds."""


@dataclass(frozen=True)
class StepOutput:
    """What a request has gained: its first token from the prefill, or the tokens of a launch."""

    id: int
    """The request's, as :meth:`Engine.submit` returned it."""
    tokens: np.ndarray
    """``[n]`` int32, at least one."""
    drafted: np.ndarray
    """``[n]`` whether each token was an accepted draft token."""
    rounds: tuple[int, ...]
    """Accepted draft tokens of every round that the request took part in; none of the prefill."""
    finish: str | None = None
    """None while the request runs. ``stop`` after a stop token, ``length`` at the budget, ``error``
    where the target's logits were not finite, so that the last token is no token."""


class _Waiting(NamedTuple):
    id: int
    tokens: np.ndarray
    request: Request


class _Prefill:
    """Requests whose prompts are run as one batch, chunk by chunk."""

    def __init__(self, waiting: Sequence[_Waiting], chunks: Iterator, count: int) -> None:
        self.ids = tuple(one.id for one in waiting)
        self.waiting = waiting
        self.chunks = chunks
        self.left = count
        """Chunks to launch."""
        self.read = 0
        """Tokens of the longest prompt that are known to have run."""
        self.rows: Rows | None = None
        """The prefilled rows, once all chunks are launched."""


class Engine:
    """Row slots through which requests pass.

    Requests may differ in everything: prompt, sampling, stop tokens, budget. A row's text depends
    on none of the rows beside it. All launches of an engine have the same shapes, so that nothing
    is compiled after the first request of each sampling kind.
    """

    def __init__(
        self,
        target: TargetModel,
        drafters: Sequence[Drafter],
        params: Params,
        *,
        slots: int,
        capacity: int,
        chunk: int,
        stop_width: int,
        short_chunks: Sequence[int] = (),
        streams: bool = True,
        together: bool = False,
        prefills: int = 1,
        ahead: bool = True,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with vacant slots; nothing is allocated before the first step.

        Args:
          target: the target's static part.
          drafters: the candidates, in the policy's order; they share parameters and state.
          params: parameters of both models.
          slots: rows that are decoded at once.
          capacity: cache slots of a row: prompt, new tokens and the slack slots of a round, and at
            least the whole chunks of a prompt.
          chunk: tokens of a prefill step.
          stop_width: most stop tokens of a request.
          short_chunks: smaller steps, ascending, for prompts that are prefilled alone: each takes
            the smallest that holds it, and ``chunk`` if none does.
          streams: whether a launch is one round, read while the next one runs, or many rounds.
          together: whether the prompts of as many requests as there are slots are prefilled as
            one batch, which then takes all slots.
          prefills: requests whose prompts may be under way at once; each takes a row of its own
            beside the slots. The one with the fewest chunks left goes first.
          ahead: whether rounds are launched before the last ones were read.
          policy: chooses the candidate of every launch; :func:`default_policy` if absent.
          clock: seconds, also asked by the thread that waits for launches.

        Raises:
          NotImplementedError: if there is a choice in a computation of several processes, whose
            clocks would disagree.
        """
        check_one_clock(len(drafters))
        self.target, self.drafters, self.params = target, tuple(drafters), params
        self.slots, self.capacity, self.chunk = slots, capacity, chunk
        self._chunk_sizes = *short_chunks, chunk
        self.streams, self.ahead = streams, ahead
        self.seconds_of_prefill = 0.0
        """Seconds of the device's time that prompts have taken."""
        self.prefilled = 0
        """Tokens of all prompts that have been run; of a batch, those of its longest prompt."""
        self._stop_width, self._clock = stop_width, clock
        self._together, self._most_prefills = together, prefills
        self._choices = LateChoices(policy or default_policy(len(drafters)), len(drafters))
        self._rows: Rows | None = None
        self._held: list[int | None] = [None] * slots
        self._next_slot = 0
        """Where the search for a vacant slot begins: the first requests take the slots in order."""
        self._requests: dict[int, Request] = {}
        self._left: dict[int, int] = {}
        """Tokens that every placed request may still emit behind its first, by what was read."""
        self._cancelled: set[int] = set()
        """Requests that are prefilled together with others and will not be decoded."""
        self._queue: deque[_Waiting] = deque()
        self._prefills: list[_Prefill] = []
        self._launches = LaunchQueue(clock)
        self.rounds_per_launch: int | None = None
        """Of launches of many rounds; None for as many as fill :data:`LAUNCH_SECONDS`."""
        self.round_seconds = math.nan
        """Of the last launch, or as they are known from an earlier run; NaN before."""
        self._programs: dict[tuple[int, SamplingKind], Any] = {}
        self._next_id = 0
        self._failure: BaseException | None = None

    @property
    def drafter(self) -> Drafter:
        """The drafter with the tallest tree."""
        return tallest(self.drafters)

    @property
    def totals(self) -> tuple[Measurement, ...]:
        """What every candidate has done, as far as it was read."""
        return self._choices.totals

    @property
    def rows(self) -> Rows:
        """The rows behind the last launch; donated by the next one."""
        if self._rows is None:
            self._rows = vacant(
                *(self.target, self.drafter, self.params),
                batch=self.slots,
                capacity=self.capacity,
                stop_width=self._stop_width,
            )
        return self._rows

    @property
    def live(self) -> tuple[int, ...]:
        """The requests that hold a slot."""
        return tuple(id for id in self._held if id is not None)

    @property
    def busy(self) -> bool:
        """Whether there is something to step."""
        return bool(self.live or self._prefills or self._queue)

    @property
    def prefilling(self) -> bool:
        """Whether a prompt waits or is under way, or a launch was not read."""
        return bool(self._queue or self._prefills or self._launches)

    def submit(self, tokens: np.ndarray, request: Request) -> int:
        """Queue a request; the next steps prefill its prompt and decode it.

        Args:
          tokens: ``[P]`` its prompt, at least one token.
          request: its options, arrays of one row on the host.

        Returns:
          The number that names the request in what :meth:`step` returns.

        Raises:
          ValueError: if a slot cannot hold the prompt and what it may emit.
        """
        self._check_fits(len(tokens), int(request.max_new_tokens[0]))
        stops = np.full((1, self._stop_width), -1, np.int32)
        given = np.asarray(request.stop_tokens)
        if given.shape[1] > self._stop_width:
            raise ValueError(
                f"a request of {given.shape[1]} stop tokens does not fit an engine made for "
                f"{self._stop_width}; make the engine with more"
            )
        stops[:, : given.shape[1]] = given
        id, self._next_id = self._next_id, self._next_id + 1
        own = replace(request, stop_tokens=stops)
        self._queue.append(_Waiting(id, np.asarray(tokens), own))
        return id

    def _check_fits(self, prompt: int, new: int) -> None:
        chunk = chunk_of(prompt, self._chunk_sizes)
        whole_chunks = -(-prompt // chunk) * chunk
        needed = max(whole_chunks, prompt + new + slack_slots(self.drafter.tree.num_levels))
        if needed > self.capacity:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens={new} take {needed} cache slots "
                f"and a row has {self.capacity}; make the engine with more, or ask for less"
            )

    def cancel(self, id: int) -> None:
        """End a request before its time; nothing more is reported of it."""
        self._queue = deque(one for one in self._queue if one.id != id)
        self._prefills = [one for one in self._prefills if one.ids != (id,)]
        if any(id in one.ids for one in self._prefills):
            self._cancelled.add(id)
        if id in self._held:
            self._release(self._held.index(id))

    def _release(self, slot: int) -> None:
        self._rows, id = release(self.rows, slot), self._held[slot]
        self._held[slot] = None
        if id is not None:
            del self._requests[id], self._left[id]

    def finish(self) -> None:
        """Take no more steps: end the reader's thread, and wait for nothing; the rows stay."""
        self._failure = self._failure or RuntimeError("it was closed; make a new one")
        self._launches.close()
        self._queue.clear()
        self._prefills.clear()

    def close(self) -> None:
        """Finish, and let go of all arrays."""
        self.finish()
        self._held, self._rows = [None] * self.slots, None

    def __enter__(self) -> "Engine":
        """The engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the engine."""
        self.close()

    def step(self, *, decode: bool = True) -> list[StepOutput]:
        """Launch a chunk and rounds, and read what has finished.

        Waits for a launch only where nothing else can be launched, or enough is queued.

        Args:
          decode: whether rounds are launched, not prompts alone.

        Returns:
          What requests have gained; nothing while the first launches are under way.

        Raises:
          RuntimeError: if the engine was closed, or an earlier step failed.
        """
        if self._failure is not None:
            raise RuntimeError(f"this engine cannot go on: {self._failure}") from self._failure
        try:
            return self._step(self._clock(), decode)
        except BaseException as error:
            # The rows were donated to a launch that failed.
            self._failure = error
            raise

    def _step(self, begun: float, decode: bool) -> list[StepOutput]:
        before = len(self._launches)
        if count := plan(self._snapshot()).admit:
            self._admit(count)
        if (index := plan(self._snapshot()).chunk) is not None:
            self._launch_chunk(self._prefills[index], begun)
        if (index := plan(self._snapshot()).place) is not None:
            self._place(self._prefills.pop(index), begun)
        if decode:
            self._launch_rounds(begun)
        queued = int(self.ahead and len(self._launches) > before)
        # A prompt's chunk and its first token may have been launched beside the rounds.
        most = queued + 2 if self.ahead else 0
        outputs: list[StepOutput] = []
        while len(self._launches) > (most if outputs else queued):
            outputs += self._launches.land()
        return outputs

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            queued=len(self._queue),
            prefilling=tuple(None if one.rows else one.left for one in self._prefills),
            free=self._held.count(None),
            slots=self.slots,
            together=self._together,
            most_prefills=self._most_prefills,
        )

    def _admit(self, count: int) -> None:
        """Begin to prefill the first requests of the queue, as one batch."""
        waiting = [self._queue.popleft() for _ in range(count)]
        length = np.asarray([len(one.tokens) for one in waiting], np.int32)
        tokens = np.zeros((count, int(length.max())), np.int32)
        for row, one in zip(tokens, waiting, strict=True):
            row[: len(one.tokens)] = one.tokens
        chunk = self.chunk if self._together else chunk_of(tokens.shape[1], self._chunk_sizes)
        # The tree, which tells the candidates apart, does not matter to a prompt.
        chunks = prefill_chunks(
            *(self.target, self.drafter, self.params, tokens, length),
            stack([one.request for one in waiting]),
            capacity=self.capacity,
            chunk=chunk,
        )
        self._prefills.append(_Prefill(waiting, chunks, -(-tokens.shape[1] // chunk)))

    def _launch_chunk(self, prefill: _Prefill, begun: float) -> None:
        launched, after = next(prefill.chunks)
        prefill.left -= 1
        if not prefill.left:
            try:
                next(prefill.chunks)
            except StopIteration as end:
                prefill.rows = end.value

        def read(_: Any, seconds: float) -> list[StepOutput]:
            self.prefilled += launched - prefill.read
            prefill.read = launched
            self.seconds_of_prefill += seconds
            return []

        self._launches.add(begun, after, read, tuple(self._held), fetched=False)

    def _place(self, prefill: _Prefill, begun: float) -> None:
        """Move prefilled rows into slots, and have their first tokens read."""
        rows = prefill.rows
        assert rows is not None, "placed after its last chunk"
        if self._together or self.slots == 1:
            self._rows, self._held = rows, list(prefill.ids)
        else:
            shardings, slot = RowShardings.beside(self.params.target, self.slots), self._vacant()
            self._rows = insert(shardings, self.rows, np.int32(slot), rows)
            self._held[slot] = prefill.ids[0]
        for one in prefill.waiting:
            self._requests[one.id] = one.request
            self._left[one.id] = int(one.request.max_new_tokens[0]) - 1
        # A copy, because the next launch donates the rows.
        first = jnp.stack([rows.pending, rows.remaining], axis=1)
        for id in self._cancelled & set(prefill.ids):
            self._cancelled.discard(id)
            self._release(self._held.index(id))

        def read(first: np.ndarray, seconds: float) -> list[StepOutput]:
            self.seconds_of_prefill += seconds
            none = np.zeros(1, bool)
            return [
                self._output(id, first[row, :1], none, (), not first[row, 1])
                for row, id in enumerate(prefill.ids)
                if id in self._left
            ]

        self._launches.add(begun, first, read, tuple(self._held))

    def _vacant(self) -> int:
        """A vacant slot, the next one in turn."""
        turn = (*range(self._next_slot, self.slots), *range(self._next_slot))
        slot = next(slot for slot in turn if self._held[slot] is None)
        self._next_slot = (slot + 1) % self.slots
        return slot

    def _launch_rounds(self, begun: float) -> None:
        held = tuple(self._held)
        live = [id for id in held if id is not None]
        if not any(self._may_go_on(id) for id in live):
            return
        choice = self._choices.next(self._launches.choices, self._most_rounds())
        kind = max(self._requests[id].sampling.kind for id in live)
        self._rows, packed = self._launch(choice, kind)

        def read(packed: np.ndarray, seconds: float) -> list[StepOutput]:
            report = Report.of(packed)
            rounds = len(report.count)
            row_rounds = int(np.count_nonzero(report.count))
            seen = Measurement(rounds, row_rounds, int(report.count.sum()), seconds)
            self._choices.record(choice.candidate, seen)
            if rounds:
                self.round_seconds = seconds / rounds
            return [
                self._of_report(report, slot, id)
                for slot, id in enumerate(held)
                if id is not None and id in self._left and report.count[:, slot].any()
            ]

        self._launches.add(begun, packed, read, held, choice)

    def _may_go_on(self, id: int) -> bool:
        """Whether a request may need a round beyond those under way, each of at least a token."""
        return self._left[id] > self._launches.rounds_of(id)

    def _most_rounds(self) -> int:
        """Rounds of a launch: one of a stream, else as many as fill its time."""
        if self.streams:
            return 1
        if self.rounds_per_launch is not None:
            return self.rounds_per_launch
        if len(self.drafters) > 1 or jax.process_count() > 1:
            # The policy decides, or every process has to decide alike.
            return MOST_ROUNDS
        if math.isnan(self.round_seconds):
            return FIRST_ROUNDS
        rounds = int(LAUNCH_SECONDS / max(self.round_seconds, 1e-6))
        return min(max(rounds, 1), MOST_ROUNDS)

    def _launch(self, choice: Choice, kind: SamplingKind) -> tuple[Rows, Array]:
        models = self.target, self.drafters[choice.candidate], kind, self.params, self.rows
        launch = one_round if self.streams else many_rounds
        args = models if self.streams else (*models, np.int32(choice.rounds))
        # Looking a program up takes as long as a small model's round.
        key = choice.candidate, kind
        if key not in self._programs:
            self._programs[key] = launch.of_shape(*args)
        return self._programs[key](*args)

    def _of_report(self, report: Report, slot: int, id: int) -> StepOutput:
        rounds = np.flatnonzero(report.count[:, slot])
        counts, accepted = report.count[rounds, slot], report.accepted[rounds, slot]
        steps = np.arange(report.tokens.shape[2])
        tokens = report.tokens[rounds, slot][steps < counts[:, None]]
        drafted = (steps < accepted[:, None])[steps < counts[:, None]]
        ended = bool(report.done[rounds[-1], slot])
        return self._output(id, tokens, drafted, tuple(accepted.tolist()), ended)

    def _output(
        self,
        id: int,
        tokens: np.ndarray,
        drafted: np.ndarray,
        rounds: tuple[int, ...],
        ended: bool,
    ) -> StepOutput:
        if rounds:
            self._left[id] -= len(tokens)
        finish = None
        if ended:
            last, stops = tokens[-1], self._requests.pop(id).stop_tokens
            finish = "error" if last == NO_TOKEN else "stop" if last in stops else "length"
            del self._left[id]
            self._held[self._held.index(id)] = None
        return StepOutput(id, tokens, drafted, rounds, finish)

    def rehearse(self, kind: SamplingKind) -> float:
        """Run a round of every candidate, so that no later one compiles; of no use afterwards.

        On a mesh two: a launch's rows may be sharded otherwise than those of the prefill, so that
        the second round compiles, too.

        Args:
          kind: of the launches to come.

        Returns:
          Seconds of the last candidate's last round, at most.
        """
        length, remaining = self.rows.length, jnp.maximum(self.rows.remaining, 1)
        begun = 0.0
        for candidate in range(len(self.drafters)):
            # From the start again, so that no row outgrows its budget.
            fresh = {"length": jnp.copy(length), "remaining": jnp.copy(remaining)}
            self._rows = replace(self.rows, **fresh)
            for _ in range(1 if self.target.mesh is None else 2):
                begun = self._clock()
                self._rows, report = self._launch(Choice(candidate, 1), kind)
                np.asarray(report)
        return self._clock() - begun

    def branch(
        self,
        drafters: Sequence[Drafter],
        params: Params,
        draft: Any,
        *,
        own_cache: bool,
        tokens: int | None = None,
        **options: Any,
    ) -> "Engine":
        """An engine whose rows go on from where these are, with other drafters.

        Call it when all that was submitted is placed and read.

        Args:
          drafters: its candidates.
          params: parameters of both models, as they take them.
          draft: their state behind the same tokens; copied.
          own_cache: whether the cache is copied. Else this engine must not be stepped before
            :meth:`rejoin`.
          tokens: most tokens that its rows emit, instead of what they may still emit.
          **options: of the constructor, instead of this engine's.
        """
        own = {"streams": self.streams, "ahead": self.ahead, "clock": self._clock, **options}
        *short_chunks, chunk = self._chunk_sizes
        other = Engine(
            *(self.target, drafters, params),
            slots=self.slots,
            capacity=self.capacity,
            chunk=chunk,
            short_chunks=short_chunks,
            stop_width=self._stop_width,
            **own,
        )
        shared = self.rows.cache
        rows = jax.tree.map(
            lambda part: part if part is shared and not own_cache else jax.tree.map(jnp.copy, part),
            replace(self.rows, draft=draft),
            is_leaf=lambda part: part is shared,
        )
        if tokens is not None:
            rows = replace(rows, remaining=jnp.full_like(rows.remaining, tokens))
        other._rows, other._held = rows, list(self._held)
        other._requests, other._next_id = dict(self._requests), self._next_id
        other._left = {id: tokens or left for id, left in self._left.items()}
        return other

    def rejoin(self, branch: "Engine") -> None:
        """Take the cache back from a branch; what it appended is never read."""
        self._rows = replace(self.rows, cache=branch.rows.cache)
        branch.close()
