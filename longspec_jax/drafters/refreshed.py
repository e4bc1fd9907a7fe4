"""Retrieval that is not asked anew before every full pass.

Blocks that were chosen serve for several of them, as SpecExtend (arXiv:2505.20776, section 2.2)
chooses every few rounds; see :mod:`longspec_jax.drafters.kept`.
"""

from dataclasses import dataclass, replace
from functools import partial

from longspec_jax.config import MAX_TREE_LEVELS
from longspec_jax.drafters.base import Committed, Needs, View
from longspec_jax.drafters.kept import Kept, due, nothing_kept, renewed
from longspec_jax.drafters.selection import Selection
from longspec_jax.drafters.selectors import Retriever, Selector, of_blocks
from longspec_jax.ops.selection.blocks import BlockTable, followed


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
        budget, asked = self.retriever.budget, self.retriever.begin(batch, capacity)
        kept = min(budget.blocks, budget.blocks_of(capacity))
        return nothing_kept(asked, batch, *self.retriever.choosing, kept)

    def extend(self, state: Kept, committed: Committed) -> Kept:
        """Let the retriever learn of committed tokens."""
        return replace(state, asked=self.retriever.extend(state.asked, committed))

    def before_round(self, state: Kept, view: View) -> Kept:
        """Choose anew in the rows where it is time."""
        budget = self.retriever.budget
        if not budget.gathers(view.keys[0].shape[2]):
            return state
        rows = due(state, self.refresh, view.length, budget.block, self._behind) & ~view.done
        return renewed(
            state, rows, view.length, lambda asked: self.retriever.table(asked, view).blocks
        )

    def table(self, state: Kept, view: View) -> BlockTable:
        """The blocks that were chosen, and those that were committed since."""
        budget, slots = self.retriever.budget, view.keys[0].shape[2]
        chosen = BlockTable(state.blocks, state.length)
        return followed(chosen, view.length, self._behind, budget.block, budget.blocks_of(slots))

    def choose(self, state: Kept, view: View) -> Selection:
        """Those blocks, laid end to end."""
        return of_blocks(self.retriever.budget, view, partial(self.table, state))

    def gathers(self, capacity: int) -> int:
        """The retriever's, and room behind them."""
        own = self.retriever.gathers(capacity)
        return own and own + self._behind * self.retriever.budget.block

    @property
    def _behind(self) -> int:
        """Blocks behind a choice, for what is committed until the next one at most."""
        tokens = (self.refresh - 1) * (MAX_TREE_LEVELS + 1)
        return -(-tokens // self.retriever.budget.block)
