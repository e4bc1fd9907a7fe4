"""Parts of a cache that a partial forward reads, and what chooses them.

Some parts are read where they lie in the cache, as spans of its slots; others are gathered into a
compact copy. Attention takes either as prefixes: another way of reading is another type here.

:class:`SinksAndRecent` chooses without any state. Two retrievers choose the best blocks of a row by
queries of the target, before every full verification. They keep its first and its last blocks in
any case:

- :class:`Quest` (arXiv:2406.10774) as SpecPV uses it (arXiv:2512.02337, section 3.2): a summary of
  every block bounds the attention that a query could find in it. Every layer and every key/value
  head reads the blocks with the highest bounds for its own last queries. Summaries grow with the
  committed tokens; nothing is summarised twice. Layers with a window read that.
- :class:`AttentionRetriever`, of SpecExtend (arXiv:2505.20776, section 2.2): the query of the last
  verified token in the layer that drafts read is compared with all cached keys of that layer. All
  layers read the blocks with the most attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths, Queries
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.base import (
    NOTHING,
    Committed,
    Needs,
    ReadParts,
    Selection,
    View,
)
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.caches import Caches
from longspec_jax.ops.selection.blocks import (
    BlockBudget,
    BlockTable,
    Extremes,
    attended_scores,
    bound_scores,
    choose_blocks,
    extend_extremes,
    gather_blocks,
    no_extremes,
)
from longspec_jax.ops.slicing import along, last_along


@struct.dataclass
class Spans:
    """Spans of cache slots that do not overlap; an empty one starts where it ends."""

    start: Leaf[Int[Array, "B n"]]
    """First slot of every span."""
    stop: Leaf[Int[Array, "B n"]]
    """Slot after its last one."""

    def reading(self, cache: PyTree) -> ReadParts:
        """The cache itself, once a span."""
        read = cache.reading(self.stop[:, 0])
        bounds = [*zip(self.start.T, self.stop.T, strict=True)]

        def spans(layer: int, queries: Queries) -> tuple[Queries, Sequence[Prefix]]:
            queries, whole = read(layer, queries)
            return queries, [replace(whole, start=start, length=stop) for start, stop in bounds]

        return spans

    def apart(self, layer: int) -> None:
        """Nothing: spans are read where they lie."""


@struct.dataclass
class WorkingSet:
    """Gathered keys and values; rotary positions are in the keys, so their order is free."""

    keys: tuple[Leaf[CacheSlots], ...]
    """Of every layer that attends to the whole context."""
    values: tuple[Leaf[CacheSlots], ...]
    """Of these layers."""
    length: Leaf[Lengths]
    """How many of its slots hold tokens, the same in every layer."""
    layers: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """Which layers these are; all if empty."""

    def reading(self, cache: PyTree) -> ReadParts:
        """A layer's part of it, and nothing of the cache."""
        return lambda layer, queries: (queries, [self.apart(layer)])

    def apart(self, layer: int) -> Prefix:
        """A layer's part of it."""
        index = self.layers.index(layer) if self.layers else layer
        return Prefix(self.keys[index], self.values[index], self.length)


def everything(length: Lengths) -> Spans:
    """All committed tokens, where they lie."""
    return Spans(jnp.zeros_like(length)[:, None], length[:, None])


def end_to_end(cache: Caches, table: BlockTable, block: int) -> WorkingSet:
    """The blocks of every layer that attends to the whole context, laid end to end.

    Args:
      cache: keys and values of every layer.
      table: of all layers alike ``[B, k]``, or of each of these and each head ``[B, L, K, k]``.
      block: slots of a block.
    """
    full = [i for i, keys in enumerate(cache.keys) if keys is not None and i not in cache.rings]
    layers = tuple(full)
    tables = [table] * len(layers)
    if table.blocks.ndim > 2:
        tables = [BlockTable(table.blocks[:, i], table.length) for i in range(len(layers))]
    found = [
        tuple(
            gather_blocks(cache.slots(layer)[part], own, block, cache.cache_rows)
            for layer, own in zip(layers, tables, strict=True)
        )
        for part in (0, 1)
    ]
    every = len(layers) == len(cache.keys)
    return WorkingSet(found[0], found[1], table.length, () if every else layers)


class Selector:
    """Chooses what partial forwards read: pure functions of a state; the object is hashable.

    By default it keeps no state and copies nothing.
    """

    @cached_property
    def needs(self) -> Needs:
        """What it needs to learn of committed tokens."""
        return NOTHING

    def begin(self, batch: int, capacity: int) -> Any:
        """The state of rows without a token, every leaf ``[B, ...]``."""
        return ()

    def extend(self, state: PyTree, committed: Committed) -> Any:
        """The state after more tokens were committed: a chunk of a prompt, or an accepted path."""
        return state

    def choose(self, state: PyTree, view: View) -> Selection:
        """What partial forwards see of the ``view.length[b]`` tokens in the cache."""
        raise NotImplementedError

    def gathered_slots(self, capacity: int) -> int:
        """Slots that it copies of a cache with ``capacity``; 0 where it reads them in place."""
        return 0


@dataclass(frozen=True)
class SinksAndRecent(Selector):
    """The first tokens of a row, which attention falls back on, and the last (StreamingLLM)."""

    sinks: int = 32
    recent: int = 1024

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(
                f"sinks={self.sinks} must be at least 0 and recent={self.recent} at least 1: a "
                "draft that sees no recent token has nothing to go on"
            )

    def __call__(self, length: Lengths) -> Spans:
        """The spans in rows of ``length[b]`` committed tokens."""
        sinks = jnp.minimum(length, self.sinks)
        recent = jnp.maximum(sinks, length - self.recent)
        start = jnp.stack([jnp.zeros_like(sinks), recent], axis=1)
        return Spans(start, jnp.stack([sinks, length], axis=1))

    def choose(self, state: tuple[()], view: View) -> Spans:
        """The spans of the rows in view."""
        return self(view.length)


@dataclass(frozen=True)
class Retriever(Selector):
    """A selector that chooses the best blocks; subclasses score them (:meth:`table`).

    ``begin`` raises ValueError if the cache is not a whole number of blocks.
    """

    config: TargetConfig
    """The target's."""
    budget: BlockBudget = BlockBudget()

    def table(self, state: PyTree, view: View) -> BlockTable:
        """The best blocks, of all layers alike ``[B, k]`` or of every head ``[B, L, K, k]``.

        ``L`` counts the layers without a window.
        """
        raise NotImplementedError

    def choose(self, state: PyTree, view: View) -> Selection:
        """The best blocks of every full layer, laid end to end; all tokens if they fit."""
        if not self.budget.gathers(view.cache.capacity):
            return everything(view.length)
        return end_to_end(view.cache, self.table(state, view), self.budget.block)

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
    """How many of the last tokens of a verification score the blocks, at most."""

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries={self.queries} must be at least 1: they score the blocks")

    @cached_property
    def needs(self) -> Needs:
        """Keys and queries of all layers without a window."""
        layers = self.config.full_layers
        return Needs(queries=layers, keys=layers)

    def begin(self, batch: int, capacity: int) -> QuestState:
        """Summaries of blocks without a key."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        blocks, layers = self.budget.blocks_of(capacity), len(c.full_layers)
        shape = (batch, self.queries, layers, c.num_heads, c.head_width)
        return QuestState(
            no_extremes(batch, blocks, layers, c.num_kv_heads, c.head_width, dtype),
            jnp.zeros(shape, dtype),
            jnp.zeros((batch,), jnp.int32),
        )

    def extend(self, state: QuestState, committed: Committed) -> QuestState:
        """Take their keys into the summaries, and their last queries in place of the old ones."""
        features, count = committed.features, committed.count
        layers = self.config.full_layers
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
    """The last rows that count; garbage after them."""
    at = jnp.maximum(count - most, 0)[:, None] + jnp.arange(most)
    at = jnp.minimum(at, rows.shape[1] - 1)
    return along(at, rows)


@struct.dataclass
class LastQuery:
    """The query of the last verified token in the layer that drafts read."""

    query: Leaf[Float[Array, "B N H"]]


@dataclass(frozen=True)
class AttentionRetriever(Retriever):
    """Chooses blocks by the attention of the last verified token, the same in all layers."""

    @cached_property
    def needs(self) -> Needs:
        """The queries of the layer that drafts read; the last token's is enough."""
        return Needs(queries=(self.config.read_layer,), recent=1)

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
        queries = committed.features.queries[self.config.read_layer]
        joined = (committed.count > 0)[:, None, None]
        last = last_along(queries, committed.count)
        return LastQuery(jnp.where(joined, last, state.query))

    def table(self, state: LastQuery, view: View) -> BlockTable:
        """The blocks that every row's query attends to most, ``[B, k]``."""
        # Of a launch of few rows their keys are copied, in this one layer.
        keys = view.cache.layer(self.config.read_layer, view.length).of_batch().keys
        self.budget.blocks_of(keys.shape[2])  # Raises unless they are whole blocks.
        scores = attended_scores(state.query, keys, view.length, self.budget.block)
        return choose_blocks(scores, view.length, self.budget)
