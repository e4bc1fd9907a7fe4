"""One call, checked and ready to run: models, prompts, options and the static sizes they need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from longspec_jax.config import TreeConfig
from longspec_jax.decoding import adaptive, ahead, engine
from longspec_jax.decoding.adaptive import BurstResult
from longspec_jax.decoding.cache import bucket_capacity
from longspec_jax.decoding.continuous import ContinuousBatch
from longspec_jax.decoding.policy import Always, FastestWithinBudget, Measurement, Policy
from longspec_jax.decoding.prefill import (
    prefill,
    prefill_programs,
    record_outline,
    rows_outline,
)
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Request, Rows
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.draft import OneOf, of_member
from longspec_jax.generation.inputs import Prompts
from longspec_jax.generation.memory import MemoryPlan

SMALLEST_OUTPUT = 64
"""Output buffers are powers of two from here, so that few budgets are ever compiled."""
SMALLEST_CHUNK = 64
"""Prefill chunks of short prompts are powers of two from here."""


@dataclass(frozen=True)
class Shape:
    """The static sizes of a call."""

    capacity: int
    max_emitted: int
    chunk: int

    @classmethod
    def for_call(
        cls, longest: int, new_tokens: int, levels: int, chunk: int, expected: int = 0
    ) -> "Shape":
        """Bucketed sizes that hold the longest prompt, its new tokens and a round's overhang.

        Args:
          longest: tokens of the longest prompt.
          new_tokens: most tokens that a row will emit.
          levels: of the tallest tree that may run.
          chunk: tokens of a prefill step; fewer where no prompt is as long.
          expected: tokens of the longest row of all calls, prompt and new ones, where it is known.
        """
        chunk = min(chunk, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
        slots = max(longest + new_tokens, expected) + engine.slack_slots(levels)
        slots = max(slots, -(-longest // chunk) * chunk)
        emitted = max(SMALLEST_OUTPUT, 1 << (new_tokens - 1).bit_length())
        return cls(bucket_capacity(slots), emitted, chunk)


@dataclass(frozen=True, eq=False)
class Job:
    """Everything one call needs, checked and on its way to the device."""

    target: CachedTarget
    drafters: tuple[Drafter, ...]
    """What a round may run, the cheapest first; the run chooses by the clock if there are
    several."""
    params: Params
    prompts: Prompts
    request: Request
    shape: Shape
    memory: MemoryPlan
    slots: int | None = None
    """Rows that are decoded at once; all of them if absent."""

    @property
    def flows(self) -> bool:
        """Whether rows wait for a slot."""
        return self.slots is not None and self.slots < len(self.prompts)

    @property
    def drafter(self) -> Drafter:
        """The drafter that was asked for: of several, the one with the tallest tree."""
        return adaptive.tallest(self.drafters)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a compilation depends on."""
        sampling = self.request.sampling
        return (
            *(self.target, self.drafters, self.shape),
            *(self.flows, self.slots if self.flows else len(self.prompts)),
            *(self.request.stop_tokens.shape, sampling.stochastic, sampling.filtered),
            tuple(leaf.shape for leaf in jax.tree.leaves(self.params.draft)),
            jax.tree.leaves(self.params.target)[0].sharding,
        )

    def prefill(self, on_chunk: Callable[[int], None] | None = None) -> SpecState:
        """The state before the first round.

        Args:
          on_chunk: called as it gets on, with the tokens of the longest prompt that have been run.
        """
        chunk = self.shape.chunk
        length = np.asarray([len(row) for row in self.prompts], np.int32)
        tokens = np.zeros((len(length), int(length.max())), np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        return prefill(
            self.target,
            self.drafter,
            self.params,
            tokens,
            length,
            self.request,
            capacity=self.shape.capacity,
            max_emitted=self.shape.max_emitted,
            chunk=chunk,
            on_chunk=on_chunk,
        )

    def continuous(self) -> ContinuousBatch:
        """Vacant row slots for a call whose rows flow."""
        assert self.slots is not None, "a call flows through a number of slots"
        return ContinuousBatch(
            self.target,
            self.drafters,
            self.params,
            self.requests()[0],
            slots=self.slots,
            capacity=self.shape.capacity,
            chunk=self.shape.chunk,
            policy=self._policy,
        )

    def requests(self) -> list[Request]:
        """What each row asks for, on the host: requests of one row."""
        host = jax.device_get(self.request)
        rows = range(len(self.prompts))
        return [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], host) for row in rows]

    def at_once(self) -> "Job":
        """The call of as many of its first rows as have a slot."""
        if not self.flows:
            return self
        first = slice(None, self.slots)
        request = jax.tree.map(lambda leaf: leaf[first], self.request)
        return replace(self, prompts=self.prompts[first], request=request)

    def unmoved(self, state: SpecState) -> BurstResult:
        """The run before its first round."""
        return BurstResult(state, (Measurement(),) * len(self.drafters))

    def bursts(self, state: SpecState, stride: int | None = None) -> Iterator[BurstResult]:
        """Decode to the end in bursts of at most ``stride`` rounds, or in one burst."""
        models = self.target, self.drafters, self.params
        return adaptive.decode_bursts(*models, state, self._policy, stride=stride)

    def rounds(self, rows: Rows) -> ahead.Rounds[Rows]:
        """Decode to the end round by round, each launched before the last one is read."""
        # All rounds of a run have one shape, so their programs are looked up once.
        programs = [
            ahead.one_round.of_shape(self.target, drafter, self.params, rows)
            for drafter in self.drafters
        ]

        def launch(candidate: int, rows: Rows) -> tuple[Rows, jax.Array]:
            return programs[candidate](self.target, self.drafters[candidate], self.params, rows)

        return ahead.Rounds(launch, rows, self._policy, len(self.drafters))

    def rehearse(self, state: SpecState, streams: bool) -> SpecState:
        """Run one round of everything that :meth:`bursts` may, or :meth:`rounds`."""
        if not streams:
            return adaptive.rehearse(self.target, self.drafters, self.params, state)
        for drafter in self.drafters:
            rows, _ = ahead.one_round(self.target, drafter, self.params, state.rows)
            state = replace(state, rows=rows)
        return state

    @property
    def foreseeable(self) -> bool:
        """Whether it is known before the first array is made where each of them will lie."""
        return self.target.mesh is None and not self.target.offload and not self.flows

    def prefill_programs(self) -> Iterator[jax.stages.Lowered]:
        """Lower all that :meth:`prefill` runs, one by one; of a :attr:`foreseeable` call."""
        shape = self.shape
        sizes = {"batch": len(self.prompts), "capacity": shape.capacity, "chunk": shape.chunk}
        models = self.target, self.drafter, self.params
        return prefill_programs(*models, self.request, max_emitted=shape.max_emitted, **sizes)

    def round_programs(self, streams: bool) -> Iterator[jax.stages.Lowered]:
        """Lower all that :meth:`rounds` may run, or :meth:`bursts`; of a foreseeable call."""
        models, shape = (self.target, self.drafter, self.params), self.shape
        rows = rows_outline(*models, self.request, batch=len(self.prompts), capacity=shape.capacity)
        record = record_outline(
            rows, shape.max_emitted, engine.slack_slots(self.drafter.tree.num_levels)
        )
        for drafter in self.drafters:
            models = self.target, drafter, self.params
            if streams:
                yield ahead.one_round.lower(*models, rows)
            else:
                yield adaptive.burst.lower(*models, SpecState(rows, record), np.int32(1))

    @property
    def _policy(self) -> Policy:
        """What chooses among the drafters."""
        count = len(self.drafters)
        return FastestWithinBudget.over(count) if count > 1 else Always()

    def only(self, drafter: Drafter) -> "Job":
        """The same call with one of its drafters, alone and with its own parameters."""
        if not isinstance(drafter, OneOf):
            return replace(self, drafters=(drafter,))
        params = of_member(self.params, drafter.active)
        return replace(self, drafters=(drafter.alone,), params=params)

    def settled_on(self, drafter: str, tree: TreeConfig) -> "Job":
        """The same call with one drafter, named as in its figures, and tree; or none."""
        if not tree.widths:
            return self.without_draft()
        wanted = drafter, tree
        return self.only(next(own for own in self.drafters if (own.name, own.tree) == wanted))

    def own_state(self, drafter: Drafter, draft: Any) -> Any:
        """The part of the drafters' common state that is one drafter's, as :meth:`only` has it."""
        shared = self.drafter
        if not isinstance(shared, OneOf) or isinstance(drafter, OneOf):
            return draft
        names = [member.name for member in shared.members]
        return draft[names.index(drafter.name)]

    def without_draft(self) -> "Job":
        """The same call, decoded plainly."""
        return replace(self, drafters=(NoDraft(),), params=Params(self.params.target, None))
