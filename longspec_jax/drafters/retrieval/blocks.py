"""Choosing the best blocks of a cache by the target's own queries.

Two retrievers score the blocks of a row, which keeps its first and its last blocks in any case:

- :class:`Quest` (arXiv:2406.10774) as SpecPV uses it (arXiv:2512.02337, section 3.2): a summary of
  every block bounds the attention that a query could find in it. Every layer and every key/value
  head reads the blocks with the highest bounds for its own last queries. Summaries grow with the
  committed tokens; nothing is summarised twice.
- :class:`AttentionRetriever`, of SpecExtend (arXiv:2505.20776, section 2.2): the query of the last
  verified token in the target's last layer is compared with all cached keys of that layer. All
  layers read the blocks with the most attention.

A choice may serve for several rounds, as SpecExtend refreshes it every few rounds
(:class:`Refreshed`): what a text is about changes slowly. The *numbers* of the blocks are cached,
not their contents. They are read again in every round, followed by everything committed since, so
that no token before the pending one is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config import MAX_TREE_LEVELS, TargetConfig
from longspec_jax.drafters.base import Committed, Needs, Selection, View
from longspec_jax.drafters.retrieval.selection import Selector, of_blocks
from longspec_jax.ops.selection.blocks import (
    BlockBudget,
    BlockTable,
    Extremes,
    attended_scores,
    bound_scores,
    choose_blocks,
    extend_extremes,
    followed,
    no_extremes,
)
from longspec_jax.ops.slicing import along, last_along


@dataclass(frozen=True)
class Retriever(Selector):
    """A selector that chooses the best blocks; subclasses score them (:meth:`table`).

    ``begin`` raises ValueError if the cache is no whole number of blocks.
    """

    config: TargetConfig
    """The target's."""
    budget: BlockBudget = BlockBudget()

    @property
    def heads(self) -> tuple[int, ...]:
        """Axes of a row's table that choose separately: layers and key/value heads, or none."""
        return ()

    def table(self, state: Any, view: View) -> BlockTable:
        """The best blocks ``[B, *heads, k]``."""
        raise NotImplementedError

    def choose(self, state: Any, view: View) -> Selection:
        """The best blocks of every layer, laid end to end."""
        return of_blocks(self.budget, view, partial(self.table, state))

    def gathered_slots(self, capacity: int) -> int:
        """The budget, unless it holds the whole cache."""
        return self.budget.gathers(capacity)


@struct.dataclass
class QuestState:
    """Summaries of the keys, and the last verified queries."""

    extremes: Extremes
    """2 / block of the keys' bytes."""
    queries: Leaf[Float[Array, "B Q L N H"]]
    """Of the tokens that were verified last, the oldest first; garbage from ``count[b]`` on."""
    count: Leaf[Lengths]
    """How many of them there are."""


@dataclass(frozen=True)
class Quest(Retriever):
    """Chooses blocks by the upper bound on their products with the mean of the last queries."""

    queries: int = 8
    """At most so many tokens of a verification count: its last ones."""

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries={self.queries} must be at least 1: they score the blocks")

    @property
    def needs(self) -> Needs:
        """Keys and queries of all layers."""
        layers = tuple(range(self.config.num_layers))
        return Needs(queries=layers, keys=layers)

    @property
    def heads(self) -> tuple[int, int]:
        """Layers and key/value heads."""
        return self.config.num_layers, self.config.num_kv_heads

    def begin(self, batch: int, capacity: int) -> QuestState:
        """Summaries of blocks without a key."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        blocks = self.budget.blocks_of(capacity)
        shape = (batch, self.queries, c.num_layers, c.num_heads, c.head_width)
        return QuestState(
            no_extremes(batch, blocks, c.num_layers, c.num_kv_heads, c.head_width, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((batch,), jnp.int32),
        )

    def extend(self, state: QuestState, committed: Committed) -> QuestState:
        """Take their keys into the summaries, and their last queries in place of the old ones."""
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
            jnp.where(count > 0, jnp.minimum(count, self.queries), state.count),
        )

    def table(self, state: QuestState, view: View) -> BlockTable:
        """The best blocks of every layer and key/value head, ``[B, L, K, k]``."""
        counts = jnp.arange(self.queries) < state.count[:, None]
        scores = bound_scores(state.queries, counts, state.extremes)
        return choose_blocks(scores, view.length, self.budget)


def _latest(rows: Float[Array, "B n N H"], count: Lengths, most: int) -> Float[Array, "B Q N H"]:
    """The last rows that count; garbage behind them."""
    at = jnp.maximum(count - most, 0)[:, None] + jnp.arange(most)
    at = jnp.minimum(at, rows.shape[1] - 1)
    return along(at, rows)


@struct.dataclass
class LastQuery:
    """The query of the last verified token in the target's last layer."""

    query: Leaf[Float[Array, "B N H"]]


@dataclass(frozen=True)
class AttentionRetriever(Retriever):
    """Chooses blocks by the attention of the last verified token, the same in all layers."""

    @property
    def needs(self) -> Needs:
        """The last layer's queries; the last token's is enough."""
        return Needs(queries=(self.config.num_layers - 1,), recent=1)

    def begin(self, batch: int, capacity: int) -> LastQuery:
        """A query of zeros."""
        self.budget.blocks_of(capacity)  # Raises unless they are whole blocks.
        return self.empty(batch)

    def empty(self, batch: int) -> LastQuery:
        """A query of zeros, for a cache of any capacity."""
        shape = (batch, self.config.num_heads, self.config.head_width)
        return LastQuery(jnp.zeros(shape, jnp.dtype(self.config.dtype)))

    def extend(self, state: LastQuery, committed: Committed) -> LastQuery:
        """The last token's query; a row that does not advance keeps what it has."""
        queries = committed.features.queries[self.config.num_layers - 1]
        joined = (committed.count > 0)[:, None, None]
        last = last_along(queries, committed.count)
        return LastQuery(jnp.where(joined, last, state.query))

    def table(self, state: LastQuery, view: View) -> BlockTable:
        """The blocks that every row's query attends to most, ``[B, k]``."""
        keys, block = view.keys[-1], self.budget.block
        self.budget.blocks_of(keys.shape[2])  # Raises unless they are whole blocks.
        scores = attended_scores(state.query, keys, view.length, block)
        return choose_blocks(scores, view.length, self.budget)


@struct.dataclass
class CachedSelection:
    """The blocks that were last chosen in each row, which serve for several rounds."""

    retriever: Any
    """The retriever's state, by which the next choice is made."""
    blocks: Leaf[Int[Array, "B *heads k"]]
    """As the table had them: the row's last block behind all others that it had."""
    length: Leaf[Lengths]
    """Committed tokens when they were chosen; 0 for a row that has not chosen yet."""
    rounds: Leaf[Int[Array, " B"]]
    """Rounds since then, each with a full verification."""

    @classmethod
    def empty(cls, retriever: Any, batch: int, *sizes: int) -> "CachedSelection":
        """Rows that have chosen nothing yet; ``sizes`` are those of a row's blocks."""
        none = jnp.zeros((batch,), jnp.int32)
        return cls(retriever, jnp.zeros((batch, *sizes), jnp.int32), none, none)

    def needs_refresh(
        self, refresh: int, end: Lengths, block: int, slack: int
    ) -> Bool[Array, " B"]:
        """Rows that must choose: after ``refresh`` rounds, or where the slack blocks are full.

        Args:
          refresh: rounds from one choice to the next.
          end: the most tokens that may be read before the next check.
          block: slots of a block.
          slack: blocks behind the choice, for tokens that are committed after it.
        """
        held = (-(-self.length // block) + slack) * block
        return (self.length == 0) | (self.rounds + 1 >= refresh) | (end > held)

    def refresh(
        self,
        rows: Bool[Array, " B"],
        length: Lengths,
        choose: Callable[[Any], Int[Array, "B *heads k"]],
    ) -> "CachedSelection":
        """The selection for the next round.

        Args:
          rows: those that choose again; if there are none, nothing is computed.
          length: their committed tokens.
          choose: from the retriever's state to blocks of the shape of those that are cached.
        """

        def chosen(old: CachedSelection) -> CachedSelection:
            found = choose(old.retriever)
            lead = rows.reshape(-1, *[1] * (found.ndim - 1))
            blocks = jnp.where(lead, found, old.blocks)
            return replace(old, blocks=blocks, length=jnp.where(rows, length, old.length))

        latest: CachedSelection = jax.lax.cond(rows.any(), chosen, lambda old: old, self)
        return replace(latest, rounds=jnp.where(rows, 0, latest.rounds + 1))


@dataclass(frozen=True)
class Refreshed(Selector):
    """Lets a retriever choose every ``refresh`` full verifications."""

    retriever: Retriever
    refresh: int
    """2 or more; a retriever by itself chooses before every full verification."""

    def __post_init__(self) -> None:
        if self.refresh < 2:
            raise ValueError(
                f"refresh={self.refresh} must be at least 2 full verifications: a retriever by "
                "itself chooses before each"
            )

    @property
    def needs(self) -> Needs:
        """The retriever's."""
        return self.retriever.needs

    def begin(self, batch: int, capacity: int) -> CachedSelection:
        """Nothing chosen.

        Raises:
          ValueError: if the cache is no whole number of blocks.
        """
        budget, state = self.retriever.budget, self.retriever.begin(batch, capacity)
        chosen = min(budget.blocks, budget.blocks_of(capacity))
        return CachedSelection.empty(state, batch, *self.retriever.heads, chosen)

    def extend(self, state: CachedSelection, committed: Committed) -> CachedSelection:
        """Let the retriever learn of committed tokens."""
        return replace(state, retriever=self.retriever.extend(state.retriever, committed))

    def before_round(self, state: CachedSelection, view: View) -> CachedSelection:
        """Choose again in the rows that need it."""
        budget = self.retriever.budget
        if not budget.gathers(view.keys[0].shape[2]):
            return state
        rows = state.needs_refresh(self.refresh, view.length, budget.block, self._slack)
        return state.refresh(
            rows & ~view.done, view.length, lambda old: self.retriever.table(old, view).blocks
        )

    def table(self, state: CachedSelection, view: View) -> BlockTable:
        """The blocks that were chosen, and those that were committed since."""
        budget, slots = self.retriever.budget, view.keys[0].shape[2]
        chosen = BlockTable(state.blocks, state.length)
        return followed(chosen, view.length, self._slack, budget.block, budget.blocks_of(slots))

    def choose(self, state: CachedSelection, view: View) -> Selection:
        """Those blocks, laid end to end."""
        return of_blocks(self.retriever.budget, view, partial(self.table, state))

    def gathered_slots(self, capacity: int) -> int:
        """The retriever's, and the slack behind them."""
        own = self.retriever.gathered_slots(capacity)
        return own and own + self._slack * self.retriever.budget.block

    @property
    def _slack(self) -> int:
        """Blocks behind a choice, for all that may be committed until the next one."""
        tokens = (self.refresh - 1) * (MAX_TREE_LEVELS + 1)
        return -(-tokens // self.retriever.budget.block)


def every(refresh: int, retriever: Retriever) -> Selector:
    """A selector that lets a retriever choose every ``refresh`` full verifications."""
    return retriever if refresh == 1 else Refreshed(retriever, refresh)
