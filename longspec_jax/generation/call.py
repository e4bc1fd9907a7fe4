"""One call, checked and ready to run: models, prompts, options and the static sizes they need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from longspec_jax.config import TreeConfig
from longspec_jax.decoding.cache import bucket_capacity, cache_bytes
from longspec_jax.decoding.candidates import tallest
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.prefill import prefill_programs, rows_outline
from longspec_jax.decoding.round import many_rounds, one_round, slack_slots
from longspec_jax.decoding.rows import Request, RowShardings
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.draft import OneOf, of_member
from longspec_jax.generation.inputs import Prompts
from longspec_jax.generation.memory import MemoryPlan, device_bytes, working_bytes
from longspec_jax.ops.placement import tree_bytes

SMALLEST_CHUNK = 64
"""Prefill chunks of short prompts are powers of two from here."""


@dataclass(frozen=True)
class Shape:
    """The static sizes of a call."""

    capacity: int
    """Cache slots of a row."""
    chunk: int
    """Tokens of a prefill step."""

    @classmethod
    def for_call(
        cls, longest: int, new_tokens: int, levels: int, chunk: int, expected: int = 0
    ) -> "Shape":
        """Bucketed sizes that hold the longest prompt, its new tokens and a round's slack slots.

        Args:
          longest: tokens of the longest prompt.
          new_tokens: most tokens that a row will emit.
          levels: of the tallest tree that may run.
          chunk: tokens of a prefill step; fewer where no prompt is as long.
          expected: tokens of the longest row of all calls, prompt and new ones, where it is known.
        """
        chunk = min(chunk, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
        slots = max(longest + new_tokens, expected) + slack_slots(levels)
        slots = max(slots, -(-longest // chunk) * chunk)
        return cls(bucket_capacity(slots), chunk)


@dataclass(frozen=True, eq=False)
class Call:
    """Everything one call needs, checked."""

    target: CachedTarget
    drafters: tuple[Drafter, ...]
    """What a round may run, the cheapest first; the run chooses by the clock if there are
    several."""
    params: Params
    prompts: Prompts
    request: Request
    """Options of all rows."""
    shape: Shape
    memory: MemoryPlan
    row_slots: int | None = None
    """Rows that are decoded at once; all of them if absent."""

    @property
    def slots(self) -> int:
        """Rows that are decoded at once."""
        rows = len(self.prompts)
        return rows if self.row_slots is None else min(self.row_slots, rows)

    @property
    def waits(self) -> bool:
        """Whether rows wait for a slot."""
        return self.slots < len(self.prompts)

    @property
    def drafter(self) -> Drafter:
        """Of several drafters the one with the tallest tree."""
        return tallest(self.drafters)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Everything that a compilation depends on."""
        return (
            *(self.target, self.drafters, self.shape, self.waits, self.slots),
            *(self.request.stop_tokens.shape, self.request.sampling.kind),
            tuple(leaf.shape for leaf in jax.tree.leaves(self.params.draft)),
            jax.tree.leaves(self.params.target)[0].sharding,
        )

    def engine(self, *, streams: bool, ahead: bool | None = None) -> Engine:
        """An engine with all rows submitted; their numbers are the rows'.

        Args:
          streams: whether the run is followed round by round.
          ahead: whether rounds are launched before the last ones were read. Where absent, unless
            a run that nobody follows chooses among several drafters.
        """
        streams = streams or self.waits
        engine = Engine(
            *(self.target, self.drafters, self.params),
            slots=self.slots,
            capacity=self.shape.capacity,
            chunk=self.shape.chunk,
            stop_width=self.request.stop_tokens.shape[1],
            streams=streams,
            together=not self.waits,
            ahead=(streams or len(self.drafters) == 1) if ahead is None else ahead,
        )
        host = jax.device_get(self.request)
        for row, prompt in enumerate(self.prompts):
            engine.submit(prompt, host.row(row))
        return engine

    @property
    def can_precompile(self) -> bool:
        """Whether all shapes and shardings are known before an array is made."""
        return self.target.mesh is None and not self.target.offload and not self.waits

    def programs(self, streams: bool, *, rounds: bool = True) -> Iterator[jax.stages.Lowered]:
        """Lower everything the call runs, the slowest to compile first; see `can_precompile`.

        Args:
          streams: whether the run is followed round by round.
          rounds: whether rounds run at all, and not the prefill alone.
        """
        models, batch = (self.target, self.drafter, self.params), len(self.prompts)
        sizes = {"batch": batch, "capacity": self.shape.capacity}
        prompts = prefill_programs(*models, self.request, chunk=self.shape.chunk, **sizes)
        return chain(self.round_programs(streams) if rounds else (), prompts)

    def round_programs(self, streams: bool) -> Iterator[jax.stages.Lowered]:
        """Lower the launches of rounds alone."""
        models, sizes = (self.target, self.drafter, self.params), {"batch": len(self.prompts)}
        rows = rows_outline(*models, self.request, capacity=self.shape.capacity, **sizes)
        for drafter in self.drafters:
            args = self.target, drafter, self.request.sampling.kind, self.params, rows
            yield one_round.lower(*args) if streams else many_rounds.lower(*args, np.int32(1))

    def first_rows(self) -> "Call":
        """The call of as many of its first rows as have a slot."""
        if not self.waits:
            return self
        first = slice(None, self.slots)
        request = jax.tree.map(lambda leaf: leaf[first], self.request)
        return replace(self, prompts=self.prompts[first], request=request)

    def only(self, drafter: Drafter) -> "Call":
        """The same call with one of its drafters, alone and with its own parameters."""
        if not isinstance(drafter, OneOf):
            return replace(self, drafters=(drafter,))
        params = of_member(self.params, drafter.active)
        return replace(self, drafters=(drafter.alone,), params=params)

    def settled_on(self, drafter: str, tree: TreeConfig) -> "Call":
        """The same call with one drafter, by its name, and tree; or none."""
        if not tree.widths:
            return self.without_draft()
        wanted = drafter, tree
        return self.only(next(own for own in self.drafters if (own.name, own.tree) == wanted))

    def without_draft(self) -> "Call":
        """The same call, decoded plainly."""
        return replace(self, drafters=(NoDraft(),), params=Params(self.params.target, None))

    def state_of(self, other: "Call", draft: Any) -> Any:
        """The part of this call's draft state that is the state of one of its drafters.

        Args:
          other: the call that runs the drafter, or none, alone.
          draft: this call's draft state.
        """
        shared, drafter = self.drafter, other.drafter
        if isinstance(drafter, NoDraft):
            return ()
        if not isinstance(shared, OneOf) or isinstance(drafter, OneOf):
            return draft
        return draft[[member.name for member in shared.members].index(drafter.name)]


def plan_memory(
    target: CachedTarget,
    drafters: Sequence[Drafter],
    params: Params,
    own: Any,
    batches: Sequence[int],
    shape: Shape,
) -> MemoryPlan:
    """What a call takes on each of its devices, from shapes alone.

    Args:
      target: the static part of the target.
      drafters: those that the call may run; they share one state.
      params: of the target, and of the draft unless the call decodes plainly.
      own: the drafts' parameters that the target does not hold.
      batches: rows of the batches that exist at once.
      shape: of the call.
    """
    nodes = max(drafter.tree.num_nodes for drafter in drafters)
    gathered = max(drafter.gathered_slots(shape.capacity) for drafter in drafters)
    cache = host = state = working = 0
    for batch in batches:
        shardings = RowShardings.beside(params.target, batch)
        begin = partial(drafters[0].begin, batch=batch, capacity=shape.capacity)
        held = target.cache_bytes(batch, shape.capacity)
        cache += held.device // shardings.cache_shards
        host += held.host
        state += tree_bytes(jax.eval_shape(begin, params)) // shardings.row_shards
        working += working_bytes(target.config, batch, shape.chunk, nodes) // shardings.row_shards
        working += cache_bytes(target.config, batch, gathered) // shardings.cache_shards
    return MemoryPlan(
        batch=sum(batches),
        capacity=shape.capacity,
        target_bytes=device_bytes(params.target),
        draft_bytes=0 if params.draft is None else device_bytes(own),
        cache_bytes=cache,
        draft_state_bytes=state,
        working_bytes=working,
        host_cache_bytes=host,
    )
