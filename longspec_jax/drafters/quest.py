"""Retrieval by bounds: a summary of every block says how much attention could find in it at most.

Quest (arXiv:2406.10774) as SpecPV uses it (arXiv:2512.02337, section 3.2): every layer and every
key/value head reads the blocks that its own last queries could attend to most, beside the first
and the last ones. Summaries grow with the committed tokens; nothing is summarised twice.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.base import Committed, Needs, View
from longspec_jax.drafters.selection import Selection
from longspec_jax.drafters.selectors import of_blocks
from longspec_jax.ops.along import along
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable, choose_blocks
from longspec_jax.ops.selection.extremes import (
    Extremes,
    Reduction,
    bound_scores,
    extend_extremes,
    mean,
    no_extremes,
)


@struct.dataclass
class QuestState:
    """Summaries of the keys, and the queries that ask them."""

    extremes: Extremes
    """2 / block of the keys' bytes."""
    queries: Leaf[Float[Array, "B Q L N H"]]
    """Of the tokens that were verified last, the oldest first; garbage from ``asked[b]`` on."""
    asked: Leaf[Lengths]
    """How many of them there are."""


@dataclass(frozen=True)
class Quest:
    """Chooses blocks by the upper bound on their products with the last verified queries."""

    config: TargetConfig
    """The target's."""
    budget: BlockBudget = BlockBudget()
    reduction: Reduction = mean
    """How several queries are one: :func:`~longspec_jax.ops.selection.extremes.mean`, ``last`` or
    ``largest``."""
    queries: int = 8
    """The most of the tokens of one verification that ask: its last ones."""

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries={self.queries} must be at least 1: blocks are asked for")

    @property
    def needs(self) -> Needs:
        """Keys and queries of all layers."""
        layers = tuple(range(self.config.num_layers))
        return Needs(queries=layers, keys=layers)

    @property
    def choosing(self) -> tuple[int, int]:
        """Layers and key/value heads."""
        return self.config.num_layers, self.config.num_kv_heads

    def begin(self, batch: int, capacity: int) -> QuestState:
        """Summaries of blocks without a key.

        Raises:
          ValueError: if the cache is no whole number of blocks.
        """
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        blocks = self.budget.blocks_of(capacity)
        shape = (batch, self.queries, c.num_layers, c.num_heads, c.head_width)
        return QuestState(
            no_extremes(batch, blocks, c.num_layers, c.num_kv_heads, c.head_width, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((batch,), jnp.int32),
        )

    def extend(self, state: QuestState, committed: Committed) -> QuestState:
        """Take their keys into the summaries, and the last queries in the place of those before."""
        features, count = committed.features, committed.count
        layers = range(self.config.num_layers)
        keys = jnp.stack([features.keys[layer] for layer in layers], axis=2)
        extremes = extend_extremes(state.extremes, keys, committed.start, count, self.budget.block)
        latest = partial(_latest, count=count, most=self.queries)
        queries = jnp.stack([latest(features.queries[layer]) for layer in layers], axis=2)
        # A row that does not advance keeps what it has.
        advanced = (count > 0)[:, None, None, None, None]
        return QuestState(
            extremes,
            jnp.where(advanced, queries, state.queries),
            jnp.where(count > 0, jnp.minimum(count, self.queries), state.asked),
        )

    def before_round(self, state: QuestState, view: View) -> QuestState:
        """Nothing is kept of it."""
        return state

    def table(self, state: QuestState, view: View) -> BlockTable:
        """The best blocks of every layer and key/value head, ``[B, L, K, k]``."""
        counts = jnp.arange(self.queries) < state.asked[:, None]
        probe = self.reduction(state.queries, counts, self.config.num_kv_heads)
        scores = bound_scores(probe, state.extremes)
        return choose_blocks(scores, view.length, self.budget)

    def choose(self, state: QuestState, view: View) -> Selection:
        """Those blocks, laid end to end."""
        return of_blocks(self.budget, view, partial(self.table, state))

    def gathers(self, capacity: int) -> int:
        """The budget, unless it holds the whole cache."""
        return self.budget.gathers(capacity)


def _latest(rows: Float[Array, "B n N H"], count: Lengths, most: int) -> Float[Array, "B Q N H"]:
    """The last rows that count; garbage behind them."""
    at = jnp.maximum(count - most, 0)[:, None] + jnp.arange(most)
    at = jnp.minimum(at, rows.shape[1] - 1)
    return along(at, rows)
