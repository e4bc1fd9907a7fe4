"""A working cache: what a drafter reads of a long cache, chosen by what the target attends to.

A small draft is slow over a long cache, and misled by most of it. What it needs is what the target
looks at: SpecExtend (arXiv:2505.20776, section 2.2, "cross-model retrieval") scores the blocks of a
text by the attention that the last accepted token's query pays them in the target's last layer, and
lets the draft see the best ones. Neither model is trained for it.

Positions stay what they are. Keys are stored with their rotary angles applied at the token's true
position, so that blocks laid end to end are exactly the text with gaps; nothing is computed anew.

Sinks and recent tokens are always read. What is committed after a choice is read behind it until
the next one, so that the reading never has a hole before the pending token. Without choices this is
the cache of StreamingLLM (arXiv:2309.17453): sinks, and all the rest of the budget recent.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths
from longspec_jax.config import MAX_TREE_LEVELS, TargetConfig
from longspec_jax.drafters.attended import Attended, AttendedState
from longspec_jax.drafters.base import Committed, View
from longspec_jax.drafters.kept import Kept, due, nothing_kept, renewed
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable, followed
from longspec_jax.ops.selection.gather import gather_blocks

USUAL_ROUND = 8
"""Tokens of a round for which there is room behind a choice; rounds that yield more bring the next
choice forward."""


@dataclass(frozen=True)
class WorkingCache:
    """How much of a cache is read, and how often it is chosen anew."""

    budget: BlockBudget
    refresh: int
    """Rounds from choice to choice; 0 for none: sinks and recent tokens alone."""
    target: TargetConfig
    """Whose last layer's attention chooses."""

    @property
    def queries(self) -> tuple[int, ...]:
        """The layers of the target whose queries are needed."""
        return self._retriever.needs.queries if self.refresh else ()

    def begin(self, batch: int) -> Kept | None:
        """Rows that have chosen nothing yet; None where nothing is ever chosen."""
        if not self.refresh:
            return None
        return nothing_kept(self._retriever.unasked(batch), batch, self.budget.blocks)

    def learn(self, choice: Kept | None, committed: Committed) -> Kept | None:
        """Keep the query of the last token that joined."""
        if choice is None:
            return None
        return replace(choice, asked=self._retriever.extend(choice.asked, committed))

    def before_round(self, choice: Kept | None, view: View) -> Kept | None:
        """Choose anew in the rows where it is time, before a round."""
        if choice is None:
            return None

        def choose(asked: AttendedState) -> Int[Array, "B k"]:
            found = self._retriever.table(asked, view).blocks
            return jnp.pad(found, ((0, 0), (0, self.budget.blocks - found.shape[1])))

        # A proposal may go on by so many tokens before there is another look.
        end = view.position + MAX_TREE_LEVELS + 1
        rows = due(choice, self.refresh, end, self.budget.block, self._behind)
        return renewed(choice, rows, view.length, choose)

    def table(self, choice: Kept | None, length: Lengths, slots: int) -> BlockTable:
        """What is read in rows of ``length[b]`` tokens.

        Args:
          choice: what was chosen; the last blocks in its place where nothing was.
          length: tokens that the cache holds, at least as many as at the choice.
          slots: of the cache.
        """
        block, index = self.budget.block, jnp.arange(self.budget.blocks)
        left_out = jnp.maximum(-(-length // block) - self.budget.blocks, 0)
        blocks = index + jnp.where(index < self.budget.sinks // block, 0, left_out[:, None])
        then = length
        if choice is not None:
            chosen = choice.length > 0
            blocks = jnp.where(chosen[:, None], choice.blocks, blocks)
            then = jnp.where(chosen, choice.length, length)
        count = self.budget.blocks_of(slots)
        return followed(BlockTable(blocks, then), length, self._behind, block, count)

    def read(self, keys: CacheSlots, values: CacheSlots, table: BlockTable) -> Prefix:
        """The blocks of one layer's cache, laid end to end."""
        block = self.budget.block
        found = gather_blocks(keys, table, block), gather_blocks(values, table, block)
        return Prefix(*found, table.length)

    @property
    def _retriever(self) -> Attended:
        return Attended(self.target, self.budget)

    @property
    def _behind(self) -> int:
        """Blocks behind a choice for what is committed until the next one."""
        tokens = self.refresh and MAX_TREE_LEVELS + 1 + self.refresh * USUAL_ROUND
        return -(-tokens // self.budget.block)
