"""Retrieval that is not asked anew before every full pass.

What a text is about changes slowly: blocks that were chosen serve for several full passes, as
SpecExtend (arXiv:2505.20776, section 2.2) chooses every few rounds. Which ones is kept, not what
lies in them: they are read again for every full pass, and behind them all that was committed
since, so that the reading never has a hole before the pending token.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config import MAX_TREE_LEVELS
from longspec_jax.drafters.base import Committed, Needs, View
from longspec_jax.drafters.selection import Selection, end_to_end, everything
from longspec_jax.drafters.selectors import Retriever, Selector
from longspec_jax.ops.selection.blocks import BlockTable, followed


@struct.dataclass
class Kept:
    """What was last chosen in each row."""

    asked: Any
    """The retriever's own state."""
    blocks: Leaf[Int[Array, "B *heads k"]]
    """As its table had them."""
    length: Leaf[Lengths]
    """Committed tokens when they were chosen; 0 for a row that has not chosen yet."""
    rounds: Leaf[Int[Array, " B"]]
    """Full passes since then."""


def every(refresh: int, retriever: Retriever) -> Selector:
    """A retriever that chooses every so many full passes: itself, where it is before each."""
    return retriever if refresh == 1 else Refreshed(retriever, refresh)


@dataclass(frozen=True)
class Refreshed:
    """Lets a retriever choose every ``refresh`` full passes."""

    retriever: Retriever
    refresh: int
    """From 2 on; a retriever on its own chooses before each."""

    def __post_init__(self) -> None:
        if self.refresh < 2:
            raise ValueError(
                f"refresh={self.refresh} must be at least 2 full passes: a retriever on its own "
                "chooses before each"
            )

    @property
    def needs(self) -> Needs:
        """The retriever's."""
        return self.retriever.needs

    def begin(self, batch: int, capacity: int) -> Kept:
        """Nothing chosen.

        Raises:
          ValueError: if the cache is no whole number of blocks.
        """
        asked, none = self.retriever.begin(batch, capacity), jnp.zeros((batch,), jnp.int32)
        shape = (batch, *self.retriever.choosing, self._kept(capacity))
        return Kept(asked, jnp.zeros(shape, jnp.int32), none, none)

    def extend(self, state: Kept, committed: Committed) -> Kept:
        """Let the retriever learn of committed tokens."""
        return replace(state, asked=self.retriever.extend(state.asked, committed))

    def look(self, state: Kept, view: View) -> Kept:
        """Choose anew in the rows where it is time."""
        if self._reads_all(view):
            return state
        block = self.retriever.budget.block
        held = -(-state.length // block) * block + self._behind * block
        due = (state.length == 0) | (state.rounds + 1 >= self.refresh) | (view.length > held)
        due &= ~view.done

        def choose(old: Kept) -> Kept:
            found = self.retriever.table(old.asked, view).blocks
            lead = due.reshape(-1, *[1] * (found.ndim - 1))
            blocks = jnp.where(lead, found, old.blocks)
            return replace(old, blocks=blocks, length=jnp.where(due, view.length, old.length))

        latest: Kept = jax.lax.cond(due.any(), choose, lambda old: old, state)
        return replace(latest, rounds=jnp.where(due, 0, latest.rounds + 1))

    def table(self, state: Kept, view: View) -> BlockTable:
        """The blocks that were chosen, and those that were committed since."""
        budget, slots = self.retriever.budget, view.keys[0].shape[2]
        chosen = BlockTable(state.blocks, state.length)
        return followed(chosen, view.length, self._behind, budget.block, budget.blocks_of(slots))

    def choose(self, state: Kept, view: View) -> Selection:
        """Those blocks, laid end to end."""
        if self._reads_all(view):
            return everything(view.length)
        return end_to_end(
            view.keys, view.values, self.table(state, view), self.retriever.budget.block
        )

    def gathers(self, capacity: int) -> int:
        """The retriever's, and room behind them."""
        own = self.retriever.gathers(capacity)
        return own and own + self._behind * self.retriever.budget.block

    def _reads_all(self, view: View) -> bool:
        return self.retriever.budget.slots >= view.keys[0].shape[2]

    def _kept(self, capacity: int) -> int:
        return min(self.retriever.budget.blocks, self.retriever.budget.blocks_of(capacity))

    @property
    def _behind(self) -> int:
        """Blocks behind a choice, for what is committed until the next one at most."""
        tokens = (self.refresh - 1) * (MAX_TREE_LEVELS + 1)
        return -(-tokens // self.retriever.budget.block)
