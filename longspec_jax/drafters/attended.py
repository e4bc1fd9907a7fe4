"""Retrieval by attention: the chunks that the target itself attended to last.

SpecExtend (arXiv:2505.20776, section 2.2): the query of the last verified token in the target's
last layer is compared with all its cached keys, and the chunks that it pays most attention to are
read, in every layer alike. The cost is one layer's keys.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.base import Committed, Needs, View
from longspec_jax.drafters.selection import Selection
from longspec_jax.drafters.selectors import of_blocks
from longspec_jax.ops.along import last_along
from longspec_jax.ops.selection.attended import attended_scores
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable, choose_blocks


@struct.dataclass
class AttendedState:
    """What the last verified token asked."""

    query: Leaf[Float[Array, "B N H"]]
    """In the target's last layer."""


@dataclass(frozen=True)
class Attended:
    """Chooses blocks by the attention of the last verified token, in all layers the same."""

    config: TargetConfig
    """The target's."""
    budget: BlockBudget = BlockBudget()

    @property
    def needs(self) -> Needs:
        """The last layer's queries; those of the last token are enough."""
        return Needs(queries=(self.config.num_layers - 1,), recent=1)

    @property
    def choosing(self) -> tuple[()]:
        """A row chooses for all layers and heads."""
        return ()

    def begin(self, batch: int, capacity: int) -> AttendedState:
        """A query that asks nothing.

        Raises:
          ValueError: if the cache is no whole number of blocks.
        """
        self.budget.blocks_of(capacity)
        return self.unasked(batch)

    def unasked(self, batch: int) -> AttendedState:
        """A query that asks nothing, of a cache of any capacity."""
        shape = (batch, self.config.num_heads, self.config.head_width)
        return AttendedState(jnp.zeros(shape, jnp.dtype(self.config.dtype)))

    def extend(self, state: AttendedState, committed: Committed) -> AttendedState:
        """The last token's query; a row that does not advance keeps what it has."""
        queries = committed.features.queries[self.config.num_layers - 1]
        joined = (committed.count > 0)[:, None, None]
        last = last_along(queries, committed.count)
        return AttendedState(jnp.where(joined, last, state.query))

    def before_round(self, state: AttendedState, view: View) -> AttendedState:
        """Nothing is kept of it."""
        return state

    def table(self, state: AttendedState, view: View) -> BlockTable:
        """The blocks that every row's query attends to most, ``[B, k]``."""
        keys, block = view.keys[-1], self.budget.block
        self.budget.blocks_of(keys.shape[2])  # Refuses what are no whole blocks.
        scores = attended_scores(state.query, keys, view.length, block)
        return choose_blocks(scores, view.length, self.budget)

    def choose(self, state: AttendedState, view: View) -> Selection:
        """Those blocks of every layer, laid end to end."""
        return of_blocks(self.budget, view, partial(self.table, state))

    def gathers(self, capacity: int) -> int:
        """The budget, unless it holds the whole cache."""
        return self.budget.gathers(capacity)
