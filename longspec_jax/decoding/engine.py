"""The engine: row slots through which requests pass.

Everything that decodes drives this one object: a call that runs to its end, a stream, a server. A
scheduler submits requests whenever it likes and calls :meth:`Engine.step` while the engine is busy.
Every step launches at most one chunk of a prompt and one launch of rounds, and then reads what has
finished. Launches are queued ahead of what was read, so that the device does not wait for the host.

Two kinds of launches run rounds (:mod:`longspec_jax.decoding.round`). A stream takes one round a
launch, and reads it while the next one runs. A call that nobody follows takes as many rounds as
fill :data:`~longspec_jax.decoding.inflight.LAUNCH_SECONDS`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.decoding.chooser import Choice, Chooser, Measurement, Policy
from longspec_jax.decoding.constrained import (
    FREE,
    Constraint,
    Guarded,
    reason_of,
)
from longspec_jax.decoding.inflight import Faults, LaunchQueue, most_rounds
from longspec_jax.decoding.logprobs import check_alternatives, first_logprobs
from longspec_jax.decoding.policy import FastestWithinBudget
from longspec_jax.decoding.prefixes import PrefixCache
from longspec_jax.decoding.prompts import Prefill, Prompts, StepPlan, Waiting
from longspec_jax.decoding.report import Report
from longspec_jax.decoding.rows import Request, Rows, release
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.slots import EngineStatus, Slots, StepOutput
from longspec_jax.drafters.base import Drafter, Params


class Engine:
    """Row slots through which requests pass.

    Requests may differ in everything: prompt, sampling, stop tokens, budget. A row's text depends
    on none of the other rows. All launches of an engine have the same shapes, so that nothing
    is compiled after the first request of each sampling kind.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        chunks: Sequence[int],
        prefills: int = 1,
        prefixes: bool = False,
        host_bytes: int = 0,
        readmits: bool = False,
        ahead: bool = True,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with vacant slots; nothing is allocated before the first step.

        Args:
          runner: its models, and the sizes of its rows.
          chunks: tokens of a prefill step, ascending: a prompt takes the smallest that holds it,
            and the last one if none does. Of prompts that are prefilled together there is one.
          prefills: requests whose prompts may be under way at once; each takes a row of its own
            alongside the slots. The one with the fewest chunks left goes first.
          prefixes: whether a prompt begins with a copy of the chunks that a slot holds already.
            Slots of a target with window layers hold none.
          host_bytes: of chunks that are kept in the host's memory, too.
          readmits: whether a request may be prefilled again after what it has emitted: when a
            better one takes its slot, or after a fault. A row must then hold the whole chunks of
            prompt and new tokens.
          ahead: whether rounds are launched before the last ones were read.
          policy: chooses the candidate of every launch; if absent the one that goes by the clock.
          clock: seconds, also asked by the thread that waits for launches.

        Raises:
          NotImplementedError: if there is a choice in a computation of several processes, whose
            clocks would disagree.
        """
        # What it was made of.
        self.runner, self.ahead, self.clock, self._readmits = runner, ahead, clock, readmits

        # Requests, from their prompts to their slots.
        self.prefixes: PrefixCache | None = None
        """What slots and the host's memory hold of earlier prompts; None if none is reused."""
        if prefixes:
            self.prefixes = PrefixCache(runner, host_bytes)
        self.prompts = Prompts(runner, chunks, most=prefills, reuse=self.prefixes)
        """Requests that have no slot yet."""
        self._slots = Slots(runner.slots, self.prefixes)
        self._rows: Rows | None = None
        self._cancelled: set[int] = set()
        """Requests that are prefilled together with others and will not be decoded."""
        self._next_id = 0

        # Launches, and what chooses them.
        candidates = len(runner.drafters)
        if policy is None and candidates > 1:
            policy = FastestWithinBudget.over(candidates)
        self._choices = None if policy is None else Chooser([policy], candidates)
        self._launches = LaunchQueue(clock)
        self._faults = Faults(clock) if readmits else None
        self.launch_sizes: tuple[int, ...] = (runner.slots,)
        """Rows of a launch of rounds, ascending: the least that holds the live ones are taken."""
        self.round_seconds = math.nan
        """Of the last launch, or as they are known from an earlier run; NaN before."""

        # What was read of them.
        self.totals = [Measurement()] * candidates
        """What every candidate has done."""
        self._outputs: list[StepOutput] = []
        self._failure: BaseException | None = None
        self._unraised: BaseException | None = None
        """A failure that came with outputs, for the next step to raise."""
        self.seconds_of_prefill = 0.0
        """Seconds of the device's time that prompts have taken."""
        self.prefilled = 0
        """Tokens of all prompts that have been run; of a batch, those of its longest prompt."""
        self.preemptions = 0

    @property
    def rows(self) -> Rows:
        """The rows after the last launch; donated by the next one."""
        if self._rows is None:
            self._rows = self.runner.vacant()
        return self._rows

    @cached_property
    def draft_bytes(self) -> int:
        """Bytes of the state of the drafters in all rows, which no round changes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.rows.draft))

    @property
    def live(self) -> tuple[int, ...]:
        """The requests that hold a slot."""
        return tuple(self._slots.active)

    @property
    def busy(self) -> bool:
        """Whether there is something to step."""
        return bool(self._slots.active or self.prompts.queue or self.prompts.under_way)

    @property
    def prefilling(self) -> bool:
        """Whether a prompt waits or is under way, or a launch was not read."""
        return bool(self.prompts.queue or self.prompts.under_way or self._launches.unread)

    @property
    def status(self) -> EngineStatus:
        """What it does now, and has done."""
        known = self.prefixes
        return EngineStatus(
            running=len(self.live),
            waiting=len(self.prompts.queue),
            prefilling=sum(len(prefill.waiting) for prefill in self.prompts.under_way),
            tokens=sum(active.length for active in self._slots.active.values()),
            capacity=self.runner.slots * self.runner.capacity,
            prefix_queries=0 if known is None else known.queried,
            prefix_hits=0 if known is None else known.found,
            host_bytes=0 if known is None else known.host.bytes,
            preemptions=self.preemptions,
            recoveries=0 if self._faults is None else self._faults.count,
        )

    def choose_by(self, policies: Sequence[Policy]) -> None:
        """Choose candidates by these policies from now on.

        Args:
          policies: for one live row, two, up to four and so on; the last one for all others.
        """
        self._choices = Chooser(policies, len(self.runner.drafters))

    def submit(
        self,
        tokens: np.ndarray,
        request: Request,
        *,
        priority: int = 0,
        constraint: Constraint | None = None,
        candidate: int | None = None,
        cache_salt: str = "",
    ) -> int:
        """Queue a request; the next steps prefill its prompt and decode it.

        Args:
          tokens: ``[P]`` its prompt, at least one token.
          request: its options, arrays of one row on the host.
          priority: a lower one goes first.
          constraint: what it may emit, which has met none of its tokens. While it is decoded the
            host waits for every round's tree. If it fails it ends the request, with ``error``.
          candidate: the drafter whose rounds run while the request holds a slot, in all rows; of
            several such requests the last of the drafters. The policy's choice if absent.
          cache_salt: its prompt finds nothing of prompts that had another one.

        Returns:
          The number that names the request in what :meth:`step` returns.

        Raises:
          ValueError: if a slot cannot hold the prompt and what it may emit, or the engine was not
            made for what the request asks.
          NotImplementedError: for a constraint next to a drafter that is not lossless.
        """
        runner = self.runner
        if constraint is not None and not all(drafter.lossless for drafter in runner.drafters):
            raise NotImplementedError(
                "a grammar cannot bind a draft whose tokens are emitted unchecked; leave out "
                "retrieve_verify=partial"
            )
        longest = len(tokens) + int(request.max_new_tokens[0])
        self.prompts.check_fits(len(tokens), longest, self._readmits)
        shown, of_prompt = request.logprobs, request.prompt_logprobs
        if shown is not None or of_prompt is not None:
            check_alternatives(runner.contents.logprobs, shown, of_prompt)
        own = runner.request(request)
        id, self._next_id = self._next_id, self._next_id + 1
        waiting = Waiting(
            priority=priority,
            id=id,
            tokens=np.asarray(tokens),
            request=own,
            constraint=None if constraint is None else Guarded(constraint),
            candidate=candidate,
            cache_salt=cache_salt,
            alternatives=-1 if shown is None else int(shown[0]),
            prompt_alternatives=-1 if of_prompt is None else int(of_prompt[0]),
        )
        self.prompts.add(waiting)
        return id

    def cancel(self, id: int) -> None:
        """End a request before its time; nothing more is reported of it."""
        if self.prompts.cancel(id):
            self._cancelled.add(id)
        if id in self._slots.held:
            self._release(id)

    def _release(self, id: int) -> None:
        slot = self._slots.held.index(id)
        self._slots.vacate(slot)
        self.vacate(slot)

    def forget(self) -> None:
        """Forget what earlier requests did: their prompts, and all counts."""
        if self.prefixes is not None:
            self.prefixes.forget()
        self.preemptions = self.prefilled = 0
        self.seconds_of_prefill = 0.0
        self.totals = [Measurement()] * len(self.totals)

    def begin_at(self, length: Array | np.ndarray, remaining: Array | np.ndarray) -> None:
        """Have the rows be of these lengths and budgets, whatever they hold: to try rounds out.

        Each round then emits one token.

        Args:
          length: ``[B]`` tokens of every row; copied.
          remaining: ``[B]`` tokens that each may still emit; copied.
        """

        def own(given: Array | np.ndarray, now: Array) -> Array:
            # The next launch donates the rows. To copy like this takes no program.
            sharding = (given if isinstance(given, jax.Array) else now).sharding
            return jax.device_put(given, sharding, may_alias=False)

        rows, none = self.rows, np.zeros(self.runner.slots, bool)
        self._rows = replace(
            rows,
            length=own(length, rows.length),
            remaining=own(remaining, rows.remaining),
            speculate=own(none, rows.speculate),
        )

    def try_rounds(
        self,
        choice: Choice,
        kind: SamplingKind,
        slots: Sequence[int],
        constraints: Mapping[int, Guarded] = FREE,
    ) -> Array:
        """Launch rounds of these slots of an idle engine; their report, which was not read."""
        self._rows, report = self.runner.launch(self.rows, choice, kind, slots, constraints)
        return report

    def vacate(self, slot: int) -> None:
        """End the row of a slot on the device, as that of a request that is cancelled."""
        self._rows = release(self.rows, slot)

    def fork(self, drafters: Sequence[Drafter], params: Params, draft: PyTree) -> "Engine":
        """An engine whose rows go on from copies of these, with other drafters.

        Call it when all that was submitted is placed and read.

        Args:
          drafters: its candidates.
          params: parameters of both models, as they take them.
          draft: their state after the same tokens; copied.
        """
        runner = replace(self.runner, drafters=tuple(drafters), params=params)
        other = Engine(
            runner,
            chunks=self.prompts.chunks,
            ahead=runner.streams or len(drafters) == 1,
            clock=self.clock,
        )
        # The seconds of copies do not belong to a round.
        copied = jax.device_put(replace(self.rows, draft=draft), may_alias=False)
        other._rows = jax.block_until_ready(copied)
        other._next_id = self._next_id
        other._slots.copy_of(self._slots)
        return other

    def finish(self) -> None:
        """Take no more steps: end the threads, and wait for nothing; the rows stay."""
        self._failure = self._failure or RuntimeError("it was closed; make a new one")
        self._launches.close()
        if self.prefixes is not None:
            self.prefixes.close()
        self.prompts.clear()

    def close(self) -> None:
        """Finish, and let go of all arrays."""
        self.finish()
        self._slots.clear()
        self._rows = None

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
          decode: whether rounds are launched, not only prompts.

        Returns:
          What requests have gained; nothing while the first launches are under way. Of a step that
          fails, what it had read before; the next one raises the failure.

        Raises:
          RuntimeError: if the engine was closed, or an earlier step failed.
        """
        unraised, self._unraised = self._unraised, None
        if unraised is not None:
            raise unraised
        if self._failure is not None:
            raise RuntimeError(f"this engine cannot go on: {self._failure}") from self._failure
        try:
            self._step(self.clock(), decode)
        except BaseException as error:
            # The rows were donated to a launch that failed.
            if self._faults is not None and self._faults.forgive(error):
                self._begin_again()
            else:
                self._failure = error
                if not (self._outputs and isinstance(error, Exception)):
                    raise
                self._unraised = error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _begin_again(self) -> None:
        """Drop all arrays, and queue all requests that have not ended after what they emitted."""
        waiting = {one.id: one for one in self.prompts.all}
        waiting |= {id: self._slots.active[id].again() for id in self.live}
        self._launches.close()
        self._launches = LaunchQueue(self.clock)
        self._rows = None
        self._slots.clear()
        if self.prefixes is not None:
            self.prefixes.forget_slots()
        self.prompts.clear()
        for one in waiting.values():
            self.prompts.add(one)

    def _step(self, begun: float, decode: bool) -> None:
        unread = self._launches.unread
        before = len(unread)
        if self.prompts.queue or self.prompts.under_way:
            self._advance_prompts(begun)
        if decode:
            self._launch_rounds(begun)
        queued = int(self.ahead and len(unread) > before)
        # A prompt's chunk and its first token may have been launched alongside the rounds.
        most = queued + 2 if self.ahead else 0
        while len(unread) > (most if self._outputs else queued):
            self._launches.wait()

    def _advance_prompts(self, begun: float) -> None:
        """Begin prompts, launch a chunk of one, and move one that has ended into a slot."""
        # What changes what can be done next is followed by another plan.
        now = self._plan()
        if now.postpone is not None:
            self.prompts.postpone(now.postpone)
            self.preemptions += 1
            now = self._plan()
        if now.admit:
            self.prompts.admit(now.admit, self._rows)
            now = self._plan()
        if now.chunk is not None:
            prefill = self.prompts.under_way[now.chunk]
            self._launch_chunk(prefill, begun)
            now = self._plan() if prefill.rows is not None else now
        if now.preempt is not None:
            self._preempt(self._slots.by_age[now.preempt])
            now = self._plan()
        if now.place is not None:
            self._place(self.prompts.under_way[now.place], begun)
            del self.prompts.under_way[now.place]

    def _plan(self) -> StepPlan:
        # A prefill of tokens that rounds emitted would give their keys other bits.
        preempts = self._readmits and not self.runner.target.batch_invariant
        live = self._slots.priorities if preempts else ()
        return self.prompts.plan(self._slots.held.count(None), live)

    def _launch_chunk(self, prefill: Prefill, begun: float) -> None:
        launched = self.prompts.launch(prefill)

        def read(logprobs: np.ndarray | None, seconds: float) -> None:
            if logprobs is not None:
                prefill.logprobs.append(logprobs)
            self.prefilled += max(launched.tokens - prefill.read, 0)
            prefill.read = max(launched.tokens, prefill.read)
            self.seconds_of_prefill += seconds

        ready, fetched = launched.ready, launched.logprobs is not None
        if launched.logprobs is not None:
            ready = launched.logprobs
        self._launches.add(begun, ready, read, tuple(self._slots.held), fetched=fetched)

    def _preempt(self, id: int) -> None:
        """Have a request wait again, after all that it has emitted."""
        while self._launches.unread:
            self._launches.wait()
        if id in self._slots.active:  # Else it has just ended.
            again = self._slots.active[id].again()
            self._release(id)
            self.prompts.add(again)
            self.preemptions += 1

    def _place(self, prefill: Prefill, begun: float) -> None:
        """Move prefilled rows into slots, and have their first tokens read."""
        rows = prefill.rows
        assert rows is not None, "placed after its last chunk"
        if self.runner.together or self.runner.slots == 1:
            self._rows, slot = rows, 0
        else:
            slot = self._slots.vacant(prefill.waiting[0].names)
            self._rows = self.runner.insert(self.rows, slot, rows)
        self._slots.put(slot, prefill)
        # A copy, because the next launch donates the rows.
        first = jnp.stack([rows.pending, rows.remaining], axis=1)
        most = self.runner.contents.logprobs
        if most is not None and prefill.asks_logprobs:
            first = first_logprobs(first, prefill.logits, most)
        for one in prefill.waiting:
            if one.id in self._cancelled:
                self._cancelled.discard(one.id)
                self._release(one.id)

        def read(first: np.ndarray, seconds: float) -> None:
            self.seconds_of_prefill += seconds
            for row, one in enumerate(prefill.waiting):
                if one.id in self._slots.active:
                    self._report(one.id, partial(self._slots.first, first, prefill, row))

        self._launches.add(begun, first, read, tuple(self._slots.held))

    def _launch_rounds(self, begun: float) -> None:
        constraints = self._slots.constraints
        if constraints:
            # What may follow depends on all that was emitted.
            while self._launches.unread:
                self._launches.wait()
        runner, held, live = self.runner, tuple(self._slots.held), len(self._slots.active)
        named: list[int] = []
        kind, watch, goes_on = SamplingKind.GREEDY, None, False
        for id, active in self._slots.active.items():
            # Each round that is under way emits a token at least.
            goes_on = goes_on or active.left > self._launches.rounds_of(id)
            kind = max(kind, active.waiting.request.sampling.kind)
            if (candidate := active.waiting.candidate) is not None:
                named.append(candidate)
        if not goes_on:
            return
        most = 1
        if not runner.streams:
            most = most_rounds(len(runner.drafters), self.round_seconds)
        if named:
            choice = Choice(max(named), most)
        elif self._choices is None:
            choice = Choice(0, most)
        else:
            choice, watch = self._choices.next(self._launches.choices, most, live)
        if constraints:
            choice, kind = choice._replace(rounds=1), SamplingKind.ANY
        slots = self._slots.of_launch(self.launch_sizes)
        self._rows, packed = runner.launch(self.rows, choice, kind, slots, constraints, watch)
        tree, contents = runner.drafters[choice.candidate].tree, runner.reported[kind]

        def read(packed: np.ndarray, seconds: float) -> None:
            report = Report.of(packed, tree, contents)
            rounds, tokens = len(report.count), [*map(sum, zip(*report.count, strict=True))]
            row_rounds = sum(map(bool, chain.from_iterable(report.count)))
            done = Measurement(rounds, row_rounds, sum(tokens), seconds)
            self.totals[choice.candidate] += done
            if self._choices is not None:
                seen = replace(done, shown=report.shown)
                self._choices.record(choice.candidate, seen, live)
            if rounds:
                self.round_seconds = seconds / rounds
            for place, emitted in enumerate(tokens):
                id = held[slots[place]]
                if emitted and id is not None and id in self._slots.active:
                    self._report(id, partial(self._slots.rounds, report, place, id))

        self._launches.add(begun, packed, read, held, choice)

    def _report(self, id: int, read: Callable[[], StepOutput]) -> None:
        """Report what a request has gained; if that cannot be read it ends, and no other one."""
        try:
            output = read()
        except Exception as error:
            output = StepOutput(id, (), (), (), "error", reason_of(error))
        self._outputs.append(output)
        if output.finish is not None and id in self._slots.active:  # It goes on on the device.
            self._release(id)
