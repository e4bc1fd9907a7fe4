"""The plan of a call: all that is static, on which its programs depend. Its rows are data."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from longspec_jax.config.sampling import MOST_ALTERNATIVES
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.adjustments import AdjustmentOptions
from longspec_jax.decoding.cache import bucket_capacity
from longspec_jax.decoding.candidates import tallest
from longspec_jax.decoding.chunks import chunk_of, chunk_sizes
from longspec_jax.decoding.report import TOKENS, Contents
from longspec_jax.decoding.round import slack_slots
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.same_bits import has_same_bits
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.memory import MemoryPlan, plan_memory
from longspec_jax.generation.models import Models, drafters_for

SMALLEST_CHUNK = 64
"""Prefill chunks of short prompts are powers of two from here."""


@dataclass(frozen=True)
class Shape:
    """The static sizes of a call."""

    capacity: int
    """Cache slots of a row."""
    chunk: int
    """Tokens of a prefill step."""
    short_chunks: tuple[int, ...] = ()
    """Of prompts that are prefilled alone, ascending."""
    alone: bool = False
    """Whether every prompt is prefilled alone, in steps that follow from its own length."""

    def chunk_of(self, prompt: int) -> int:
        """Tokens of a prefill step of a prompt of this length, prefilled alone."""
        return chunk_of(prompt, (*self.short_chunks, self.chunk))

    @classmethod
    def for_call(
        cls,
        longest: int,
        new_tokens: int,
        levels: int,
        chunk: int,
        expected: int = 0,
        alone: bool = False,
    ) -> "Shape":
        """Bucketed sizes that hold the longest prompt, its new tokens and a round's slack slots.

        Args:
          new_tokens: most tokens that a row will emit.
          levels: of the tallest tree that may run.
          chunk: tokens of a prefill step; fewer where no prompt is as long.
          expected: tokens of the longest row of all calls, prompt and new ones, where it is known.
          alone: whether every prompt is prefilled alone.
        """
        short: tuple[int, ...] = ()
        if alone:
            sizes = chunk_sizes(chunk)
            chunk = chunk_of(longest, sizes)
            short = tuple(size for size in sizes if size < chunk)
        else:
            chunk = min(chunk, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
        slots = max(longest + new_tokens, expected) + slack_slots(levels)
        slots = max(slots, -(-longest // chunk) * chunk)
        return cls(bucket_capacity(slots), chunk, short, alone)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call decodes with, and all sizes that it needs."""

    target: TargetModel
    drafters: tuple[Drafter, ...]
    """What a round may run, the cheapest first; several only where a clock chooses."""
    params: Params
    rows: int
    slots: int
    """Rows that are decoded at once."""
    longest: int
    """Tokens of the longest prompt."""
    new_tokens: tuple[int, int]
    """Tokens that a row may emit: of the row with the fewest, and of that with the most."""
    stop_width: int
    """Most stop tokens of a row."""
    kind: SamplingKind
    contents: Contents
    """Of the reports of its rounds."""
    scored: bool
    """Whether log-probabilities of the prompts are reported."""
    adjusted: bool
    """Whether a row has biases or penalties."""
    shape: Shape
    chunks: tuple[int, ...]
    """The sizes of the prefill steps that its prompts take, ascending."""
    memory: MemoryPlan
    large: bool
    """Whether a GPU spends most of a round on reading the target's weights."""
    open: bool
    """Whether one of the drafters, or none, is chosen before the first round."""

    @property
    def waits(self) -> bool:
        """Whether rows wait for a slot."""
        return self.slots < self.rows

    @property
    def together(self) -> bool:
        """Whether all prompts are prefilled as one batch."""
        return not (self.waits or self.shape.alone)

    @property
    def drafter(self) -> Drafter:
        """Of several drafters the one with the tallest tree."""
        return tallest(self.drafters)

    @property
    def choice(self) -> tuple[str, TreeConfig]:
        """The drafter's name and its tree."""
        return self.drafter.name, self.drafter.tree

    @property
    def room(self) -> int:
        """Tokens that a row of the cache can hold behind its prompt."""
        slack = slack_slots(self.drafter.tree.num_levels)
        return self.shape.capacity - self.longest - slack

    @property
    def signature(self) -> tuple[Any, ...]:
        """Everything that a compilation depends on."""
        return (
            *(self.target, self.drafters, self.shape, self.chunks, self.rows, self.slots),
            *(self.stop_width, self.kind, self.contents, self.scored, self.adjusted),
            tuple(leaf.shape for leaf in jax.tree.leaves(self.params.draft)),
            jax.tree.leaves(self.params.target)[0].sharding,
        )

    @property
    def empty_request(self) -> Request:
        """Options in the shapes and of the kind of the call's; of two tokens a row if it may."""
        none: Any = np.zeros(self.rows, np.int32)
        real, stops = none.astype(np.float32), none[:, None].repeat(self.stop_width, 1) - 1
        sampling = Sampling(
            *(real, none, real + 1, none.astype(np.uint32), real - np.inf), kind=self.kind
        )
        most = self.contents.logprobs
        return Request(
            *(sampling, stops, none + min(2, self.new_tokens[1])),
            adjustments=AdjustmentOptions.none(self.rows) if self.adjusted else None,
            logprobs=None if self.kind is not SamplingKind.ANY or most is None else none + most,
            prompt_logprobs=none if self.scored else None,
        )

    def without_draft(self) -> "Plan":
        """The same, decoded plainly."""
        params = Params(self.params.target, None)
        return replace(self, drafters=(NoDraft(),), params=params, open=False)

    @property
    def alternatives(self) -> tuple["Plan", ...]:
        """The same without a draft, and with each of the drafters alone."""
        alone = (replace(self, drafters=(drafter,), open=False) for drafter in self.drafters)
        return (self.without_draft(), *alone)

    def state_of(self, other: "Plan", draft: Any) -> Any:
        """The part of this plan's draft state that one of the alternatives takes."""
        return () if isinstance(other.drafter, NoDraft) else draft


def plan_call(
    models: Models, batch: Batch, tree: TreeConfig | None = None, *, adaptive: bool = False
) -> Plan:
    """The drafters of a call, its sizes, and what it takes of the devices.

    Arguments and errors as of :func:`~longspec_jax.generation.models.drafters_for`.
    """
    lengths, request = [len(prompt) for prompt in batch.prompts], batch.request
    rows, longest = len(lengths), max(lengths)
    fewest, most = int(request.max_new_tokens.min()), int(request.max_new_tokens.max())
    slots = rows if models.row_slots is None else min(rows, models.row_slots)
    drafters, draft = drafters_for(models, tree, rows, adaptive=adaptive)
    levels = tallest(drafters).tree.num_levels
    sizes = longest, most, levels, models.prefill_chunk, models.expected_tokens
    shape = Shape.for_call(*sizes, alone=has_same_bits(models.target))
    # A prompt that is prefilled beside the slots is a batch of its own.
    reported = request.logprobs is not None or request.prompt_logprobs is not None
    batches = [slots, 1] if slots < rows or (shape.alone and rows > 1) else [rows]
    return Plan(
        target=models.target,
        drafters=drafters,
        params=Params(models.target_params, draft),
        rows=rows,
        slots=slots,
        longest=longest,
        new_tokens=(fewest, most),
        stop_width=request.stop_tokens.shape[1],
        kind=request.sampling.kind,
        contents=Contents(logprobs=MOST_ALTERNATIVES) if reported else TOKENS,
        scored=request.prompt_logprobs is not None,
        adjusted=request.adjustments is not None,
        shape=shape,
        chunks=tuple(sorted({*map(shape.chunk_of, lengths)})) if shape.alone else (shape.chunk,),
        memory=plan_memory(
            *(models, drafters, draft, batches, shape.capacity, shape.chunk),
            adjusted=request.adjustments is not None,
        ),
        large=models.large,
        open=tree is None and models.tree is None and not adaptive,
    )
