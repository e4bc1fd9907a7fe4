"""The plan of a call: all that is static, on which its programs depend. Its rows are data."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from longspec_jax.config.sampling import MOST_ALTERNATIVES
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.adjustments import AdjustmentOptions
from longspec_jax.decoding.batch_invariant import is_identical
from longspec_jax.decoding.chooser import Policy
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.jit_cache import processors
from longspec_jax.decoding.report import Contents
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.runner import (
    ModelRunner,
    bucket_capacity,
    chunk_of,
    chunk_sizes,
    slack_slots,
)
from longspec_jax.decoding.sampling import Sampling, SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.draft import tallest
from longspec_jax.generation.candidates import drafters_for
from longspec_jax.generation.inputs import Batch
from longspec_jax.generation.memory import MemoryPlan, plan_memory
from longspec_jax.generation.models import Models
from longspec_jax.ops.matmul.quantised_weights import quantised_matrices
from longspec_jax.provenance import processor_model, version

FEW = 32
"""New tokens below which a call has one candidate: the others would be compiled for nothing."""
SMALLEST_CHUNK = 64
"""Prefill chunks of short prompts are powers of two from here."""


@dataclass(frozen=True)
class Shape:
    """The static sizes of a call."""

    capacity: int
    """Cache slots of a row."""
    chunks: tuple[int, ...]
    """Tokens of a prefill step, ascending; several where prompts are prefilled alone."""
    alone: bool = False
    """Whether every prompt is prefilled alone, in steps that follow from its own length."""

    @property
    def chunk(self) -> int:
        """Tokens of a prefill step of a long prompt."""
        return self.chunks[-1]

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
        if alone:
            sizes = chunk_sizes(chunk)
            chunk = chunk_of(longest, sizes)
            chunks = tuple(size for size in sizes if size <= chunk)
        else:
            chunk = min(chunk, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
            chunks = (chunk,)
        slots = max(longest + new_tokens, expected) + slack_slots(levels)
        slots = max(slots, -(-longest // chunk) * chunk)
        return cls(bucket_capacity(slots), chunks, alone)


@dataclass(frozen=True, eq=False)
class CallPlan:
    """What a call decodes with, and all sizes that it needs."""

    target: TargetModel
    drafters: tuple[Drafter, ...]
    """What a round may run, the cheapest first; several only where a clock chooses. Of an open plan
    what may pay, the usual tree first."""
    params: Params
    rows: int
    slots: int
    """Rows that are decoded at once."""
    longest: int
    """Tokens of the longest prompt of the first such call."""
    new_tokens: int
    """Tokens that a row emits in a warm-up, at most two."""
    short: bool
    """Whether fewer than :data:`FEW` new tokens are wanted."""
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
    open: bool
    """Whether the call names no tree, so that the clock may choose."""

    @cached_property
    def waits(self) -> bool:
        """Whether rows wait for a slot."""
        return self.slots < self.rows

    @cached_property
    def together(self) -> bool:
        """Whether all prompts are prefilled as one batch."""
        return not (self.waits or self.shape.alone)

    @cached_property
    def drafter(self) -> Drafter:
        """The drafter with the tallest tree."""
        return tallest(self.drafters)

    @cached_property
    def lossless(self) -> bool:
        """Whether every drafter leaves the target its own output."""
        return all(drafter.lossless for drafter in self.drafters)

    @cached_property
    def identical(self) -> bool:
        """Whether its text is promised to be that of plain decoding."""
        return is_identical(self.target) and self.lossless

    @cached_property
    def runners(self) -> dict[bool, ModelRunner]:
        """What its calls were decoded with so far, by whether rounds were followed.

        There a later call finds the programs of rounds.
        """
        return {}

    def engine(self, streams: bool, policy: Policy | None = None) -> Engine:
        """An engine for its rows; of a stream, if the run is followed round by round."""
        streams = streams or self.waits
        if streams not in self.runners:
            self.runners[streams] = ModelRunner(
                self.target,
                self.drafters,
                self.params,
                slots=self.slots,
                capacity=self.shape.capacity,
                stop_width=self.stop_width,
                streams=streams,
                together=self.together,
                adjusted=self.adjusted,
                contents=self.contents,
            )
        return Engine(
            self.runners[streams],
            chunks=self.shape.chunks,
            # A run that nobody follows decides on the next tree by the last rounds.
            ahead=streams or len(self.drafters) == 1,
            policy=policy,
        )

    @cached_property
    def kind_of_call(self) -> str:
        """A hash of everything that the speeds of its candidates depend on, coarsely."""
        facts = {
            "device": jax.devices()[0].device_kind,
            "processors": [processors(), processor_model()],
            # Other kernels have other timings.
            "versions": [jax.__version__, version("longspec_jax")],
            "target": repr(self.target),
            "drafters": [repr(drafter) for drafter in self.drafters],
            **_quantised(self.params.target),
            "draft": weights_digest(self.params.draft),
            "rows": 1 << (self.slots - 1).bit_length(),
            "context": 1 << max(9, (self.longest - 1).bit_length()),
            "sampling": self.kind.name,
        }
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Everything that a compilation depends on."""
        return (
            *(self.target, self.drafters, self.shape, self.chunks, self.rows, self.slots),
            *(self.stop_width, self.kind, self.contents, self.scored, self.adjusted),
            self.params.costs is not None,
            tuple(leaf.shape for leaf in jax.tree.leaves(self.params.draft)),
            jax.tree.leaves(self.params.target)[0].sharding,
        )

    @property
    def empty_request(self) -> Request:
        """Options of a row in the shapes and of the kind of the call's; of two tokens if it may."""
        none: Any = np.zeros(1, np.int32)
        real, most = none.astype(np.float32), self.contents.logprobs
        return Request(
            Sampling(real, none, real + 1, none.astype(np.uint32), real - np.inf, kind=self.kind),
            none[:, None].repeat(self.stop_width, 1) - 1,
            none + self.new_tokens,
            adjustments=AdjustmentOptions.none(1) if self.adjusted else None,
            logprobs=None if self.kind is not SamplingKind.ANY or most is None else none + most,
            prompt_logprobs=none if self.scored else None,
        )

    def weighing(self, plain: float = 1.0, tree: float = 0.0) -> "CallPlan":
        """The same, but a tree that costs nothing to propose is verified only where it pays.

        Args:
          plain: seconds of a round that verifies one token.
          tree: of one that verifies a tree; by default every tree pays.
        """
        costs = jax.device_put(np.asarray([plain, tree], np.float32))
        return replace(self, params=replace(self.params, costs=costs))

    @cached_property
    def _narrowed(self) -> dict[tuple[tuple[Drafter, ...], bool], "CallPlan"]:
        return {}

    def narrowed(self, drafters: tuple[Drafter, ...], *, weighs: bool) -> "CallPlan":
        """The same with these candidates, made once.

        Args:
          weighs: whether they may leave trees unverified, as in :meth:`weighing`.
        """
        if (drafters, weighs) not in self._narrowed:
            plan = replace(self, drafters=drafters)
            self._narrowed[drafters, weighs] = plan.weighing() if weighs else plan
        return self._narrowed[drafters, weighs]

    @cached_property
    def without_draft(self) -> "CallPlan":
        """The same, decoded plainly."""
        params = Params(self.params.target, None)
        return replace(self, drafters=(NoDraft(),), params=params, open=False)


def plan_call(
    models: Models,
    batch: Batch,
    tree: TreeConfig | None = None,
    *,
    adaptive: bool = False,
    return_trees: bool = False,
) -> CallPlan:
    """The drafters of a call, its sizes, and what it takes of the devices.

    Calls that differ only in data have the same plan, made once.
    Arguments and errors as in :func:`~longspec_jax.generation.candidates.drafters_for`.
    """
    lengths, request = list(map(len, batch.prompts)), batch.request
    rows, longest, most = len(lengths), max(lengths), int(request.max_new_tokens.max())
    slots = rows if models.max_num_seqs is None else min(rows, models.max_num_seqs)
    of_call = tree, rows, adaptive
    if of_call not in models.candidates:
        drafters, draft = drafters_for(models, tree, rows, adaptive=adaptive)
        models.candidates[of_call] = drafters, draft, tallest(drafters).tree.num_levels
    drafters, draft, levels = models.candidates[of_call]
    shape = Shape.for_call(
        longest,
        most,
        levels,
        models.prefill_chunk,
        expected=models.expected_tokens,
        alone=models.target.batch_invariant,
    )
    chunks = tuple(sorted({chunk_of(length, shape.chunks) for length in lengths}))
    scored, adjusted = request.prompt_logprobs is not None, request.adjustments is not None
    reported = scored or request.logprobs is not None
    contents = Contents(MOST_ALTERNATIVES if reported else None, trees=return_trees)
    kind, stop_width = request.sampling.kind, request.stop_tokens.shape[1]
    new_tokens, short = min(2, most), most < FEW
    sizes = rows, shape, chunks, stop_width, new_tokens, short
    key = tree, adaptive, sizes, kind, contents, scored, adjusted
    if key in models.plans:
        return models.plans[key]
    # A prompt that is prefilled alongside the slots is a batch of its own.
    batches = [slots, 1] if slots < rows or (shape.alone and rows > 1) else [rows]
    memory = plan_memory(
        models, drafters, draft, batches, shape.capacity, shape.chunk, adjusted=adjusted
    )
    models.plans[key] = CallPlan(
        target=models.target,
        drafters=drafters,
        params=Params(models.target_params, draft),
        rows=rows,
        slots=slots,
        longest=longest,
        new_tokens=new_tokens,
        short=short,
        stop_width=stop_width,
        kind=kind,
        contents=contents,
        scored=scored,
        adjusted=adjusted,
        shape=shape,
        chunks=chunks,
        memory=memory,
        open=tree is None and models.tree is None and not adaptive,
    )
    return models.plans[key]


def _quantised(target: PyTree) -> dict[str, Any]:
    """The kinds of quantised weights; nothing of a whole target."""
    labels = sorted({matrix.label for matrix in quantised_matrices(target)})
    return {"weights": labels} if labels else {}


def weights_digest(params: PyTree) -> str:
    """A hash of a model's small arrays, which no two that were trained share, and of all shapes."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        digest.update(f"{path}{leaf.shape}{leaf.dtype}".encode())
        if leaf.ndim == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
