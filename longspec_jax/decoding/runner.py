"""The static half of an engine: models, sizes, and the programs that rounds and slots take.

A runner holds no rows and nothing in it changes: rows go in, and come out of the program that they
were donated to. Who is decoded in them is the engine's affair
(:class:`longspec_jax.decoding.engine.Engine`).
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.adjustments import fitted
from longspec_jax.decoding.chooser import Choice, Watch
from longspec_jax.decoding.constrained import FREE, Guarded, constrained_round
from longspec_jax.decoding.prefill import vacant
from longspec_jax.decoding.report import TOKENS, Contents
from longspec_jax.decoding.round import many_rounds, one_round
from longspec_jax.decoding.rows import Request, Rows, RowShardings, insert
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params
from longspec_jax.drafters.draft import tallest

SMALLEST_CHUNK = 128
"""Tokens of the smallest chunk of a prompt that is prefilled alone."""
NEXT_SMALLER = 4
"""By how much a chunk is smaller than that of the next size. Every size is a program, and a prompt
may fill no more than a quarter of its chunk."""


def chunk_sizes(largest: int) -> tuple[int, ...]:
    """Sizes of the chunks of prompts that are prefilled alone, ascending.

    Args:
      largest: tokens of a chunk of a long prompt.
    """
    sizes = [largest]
    while sizes[0] // NEXT_SMALLER >= SMALLEST_CHUNK:
        sizes.insert(0, sizes[0] // NEXT_SMALLER)
    return tuple(sizes)


def chunk_of(length: int, sizes: Sequence[int]) -> int:
    """Tokens of the chunks of a prompt: the smallest size that holds it, else the largest.

    Args:
      sizes: ascending.
    """
    return sizes[min(bisect.bisect_left(sizes, length), len(sizes) - 1)]


def bucket_capacity(slots: int) -> int:
    """The smallest bucketed capacity that holds ``slots``, so that few shapes are ever compiled.

    Steps of an eighth of the power of two below, and of at least 256: at most 12.5 % is wasted.
    """
    step = max(256, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step


def slack_slots(levels: int) -> int:
    """Cache slots that a row needs beyond prompt and new tokens: a round writes a static height."""
    return levels + 1


@dataclass(frozen=True, eq=False)
class ModelRunner:
    """What an engine decodes with: its models, the sizes of its rows, and what a round is."""

    target: TargetModel
    """The target's static part."""
    drafters: tuple[Drafter, ...]
    """The candidates, in the policy's order; they share parameters and state."""
    params: Params
    """Parameters of both models."""
    slots: int
    """Rows that are decoded at once."""
    capacity: int
    """Cache slots of a row: prompt, new tokens and the slack slots of a round, and at least the
    whole chunks of a prompt."""
    stop_width: int
    """Most stop tokens of a request."""
    streams: bool = True
    """Whether a launch is one round, read while the next one runs, or many rounds."""
    together: bool = False
    """Whether the prompts of as many requests as there are slots are prefilled as one batch, which
    then takes all slots."""
    adjusted: bool = False
    """Whether requests may have biases and penalties, for which every row has tables of the
    vocabulary."""
    contents: Contents = TOKENS
    """What is reported of a round: the most alternatives of a token that a request may ask for, and
    the trees."""
    _programs: WeakValueDictionary[tuple[int, SamplingKind, int], Any] = field(
        default_factory=WeakValueDictionary, init=False, repr=False
    )
    """Of rounds, as far as the process keeps them (:mod:`longspec_jax.decoding.jit_cache`)."""

    @cached_property
    def drafter(self) -> Drafter:
        """The drafter with the tallest tree."""
        return tallest(self.drafters)

    @cached_property
    def slack(self) -> int:
        """Cache slots that a round needs beyond the tokens of a row."""
        return slack_slots(self.drafter.tree.num_levels)

    @cached_property
    def shardings(self) -> RowShardings:
        """The shardings of arrays with a row for each slot."""
        return RowShardings.for_params(self.params.target, self.slots)

    @cached_property
    def row_shardings(self) -> RowShardings:
        """The shardings of a row that is prefilled alongside the slots."""
        return RowShardings.for_params(self.params.target, 1)

    def request(self, given: Request) -> Request:
        """What a row carries of a request from its first token on, and its adjustments.

        All requests of an engine have this form.

        Raises:
          ValueError: if the engine was not made for what it asks.
        """
        tokens, width = np.asarray(given.stop_tokens), self.stop_width
        if tokens.shape[1] > width:
            raise ValueError(
                f"a request of {tokens.shape[1]} stop tokens does not fit an engine made for "
                f"{width}; make the engine with more"
            )
        stops = np.full((1, width), -1, np.int32)
        stops[:, : tokens.shape[1]] = tokens
        adjustments = given.adjustments
        if self.adjusted or adjustments is not None:
            adjustments = fitted(adjustments, self.adjusted)
        speculate = np.ones(1, bool) if given.speculate is None else given.speculate
        return replace(
            given,
            stop_tokens=stops,
            speculate=speculate,
            adjustments=adjustments,
            logprobs=None,
            prompt_logprobs=None,
        )

    def vacant(self) -> Rows:
        """Rows none of which is taken."""
        models, sizes = (self.target, self.drafter, self.params), (self.slots, self.capacity)
        return vacant(*models, *sizes, self.stop_width, self.adjusted)

    def insert(self, rows: Rows, slot: int, prefilled: Rows) -> Rows:
        """The rows with a prefilled one in this slot; ``rows`` are donated."""
        return insert(self.shardings, rows, np.int32(slot), prefilled)

    def launch(
        self,
        rows: Rows,
        choice: Choice,
        kind: SamplingKind,
        slots: Sequence[int],
        constraints: Mapping[int, Guarded] = FREE,
        watch: Watch | None = None,
    ) -> tuple[Rows, Array]:
        """Launch rounds.

        Args:
          rows: of all slots; donated.
          choice: the candidate, and how many rounds of it; one where streams are followed.
          kind: what the sampling of these slots needs.
          slots: that take part.
          constraints: by slot, what some of them may emit. A round then waits for its own tree.
          watch: ends a launch of many rounds before its time; nothing does if absent.

        Returns:
          The rows after the rounds, and their packed report, not waited for.
        """
        drafter = self.drafters[choice.candidate]
        if constraints:
            placed = {slots.index(slot): constraint for slot, constraint in constraints.items()}
            models = self.target, drafter, self.params, rows
            contents = self.reported[SamplingKind.ANY]
            return constrained_round(*models, placed, contents, *self.slot_arguments(slots))
        models = self.target, drafter, kind, self.params, rows
        launch = one_round if self.streams else many_rounds
        args = models if self.streams else (*models, watch or self.limit(choice.rounds))
        args = *args, self.reported[kind], *self.slot_arguments(slots)
        # Looking a program up takes as long as a small model's round.
        key = choice.candidate, kind, len(slots)
        if (known := self._programs.get(key)) is None:
            self._programs[key] = known = launch.of_shape(*args)
        return known(*args)

    def limit(self, rounds: int) -> Any:
        """Ends a launch after this many rounds, and not before."""
        several = len(self.drafters) > 1
        return Watch.of(rounds, len(self.drafters)) if several else np.int32(rounds)

    @cached_property
    def reported(self) -> Mapping[SamplingKind, Contents]:
        """What launches report; among other candidates what those would have emitted."""
        whole = self.contents._replace(candidates=self.drafters if len(self.drafters) > 1 else ())
        # Rows that ask for log-probabilities are of any kind.
        return {
            kind: whole if kind is SamplingKind.ANY else whole._replace(logprobs=None)
            for kind in SamplingKind
        }

    def slot_arguments(self, slots: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The last argument of a launch of these slots; none where they are all."""
        return () if len(slots) == self.slots else (np.asarray(slots, np.int32),)
