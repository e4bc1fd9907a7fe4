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

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths
from longspec_jax.config import MAX_TREE_LEVELS, TargetConfig
from longspec_jax.drafters.attended import last_query
from longspec_jax.drafters.base import Committed, View
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.selection.attended import attended_scores
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable, choose_blocks
from longspec_jax.ops.selection.gather import gather_blocks

USUAL_ROUND = 8
"""Tokens of a round for which there is room behind a choice; rounds that yield more bring the next
choice forward."""


@struct.dataclass
class Choice:
    """What was last chosen in each row, and what the next choice is made by."""

    query: Leaf[Float[Array, "B N H"]]
    """Of the last committed token, in the target's layer."""
    blocks: Leaf[Int[Array, "B k"]]
    """Chosen blocks; the row's last one behind all others that it had."""
    length: Leaf[Lengths]
    """Committed tokens when they were chosen; 0 for a row that has not chosen yet."""
    rounds: Leaf[Int[Array, " B"]]
    """Rounds since then."""


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
        return (self._layer,) if self.refresh else ()

    def begin(self, batch: int) -> Choice | None:
        """Rows that have chosen nothing yet; None where nothing is ever chosen."""
        if not self.refresh:
            return None
        c, none = self.target, jnp.zeros((batch,), jnp.int32)
        blocks = jnp.zeros((batch, self.budget.blocks), jnp.int32)
        query = jnp.zeros((batch, c.num_heads, c.head_width), jnp.dtype(c.dtype))
        return Choice(query, blocks, none, none)

    def learn(self, choice: Choice | None, committed: Committed) -> Choice | None:
        """Keep the query of the last token that joined."""
        if choice is None:
            return None
        return replace(choice, query=last_query(committed, self._layer, choice.query))

    def look(self, choice: Choice | None, view: View) -> Choice | None:
        """Choose anew in the rows where it is time, before a round."""
        if choice is None:
            return None
        held = -(-choice.length // self.budget.block) * self.budget.block + self._behind
        # A proposal may go on by so many tokens before there is another look.
        full = view.position + MAX_TREE_LEVELS + 1 > held
        due = (choice.length == 0) | (choice.rounds + 1 >= self.refresh) | full

        def choose(old: Choice) -> Choice:
            keys, block = view.keys[self._layer], self.budget.block
            self.budget.blocks_of(keys.shape[2])  # Refuses what are no whole blocks.
            scores = attended_scores(old.query, keys, view.length, block)
            found = choose_blocks(scores, view.length, self.budget).blocks
            missing = self.budget.blocks - found.shape[1]
            found = jnp.pad(found, ((0, 0), (0, missing)))
            blocks = jnp.where(due[:, None], found, old.blocks)
            return replace(old, blocks=blocks, length=jnp.where(due, view.length, old.length))

        latest: Choice = jax.lax.cond(due.any(), choose, lambda old: old, choice)
        return replace(latest, rounds=jnp.where(due, 0, latest.rounds + 1))

    def table(self, choice: Choice | None, length: Lengths, slots: int) -> BlockTable:
        """What is read in rows of ``length[b]`` tokens.

        Args:
          choice: what was chosen; the last blocks in its place where nothing was.
          length: tokens that the cache holds, at least as many as at the choice.
          slots: of the cache.
        """
        block, kept = self.budget.block, self.budget.blocks
        sinks, whole = self.budget.sinks // block, self.budget.blocks_of(slots)
        present = -(-length // block)
        index = jnp.arange(kept + self._behind // block)
        left_out = jnp.maximum(present - kept, 0)
        blocks = index + jnp.where(index < sinks, 0, left_out[:, None])
        if choice is not None:
            then = -(-choice.length // block)
            taken = jnp.minimum(then, kept)
            behind = index + (then - taken)[:, None]
            room = jnp.pad(choice.blocks, ((0, 0), (0, len(index) - kept)))
            chosen = jnp.where(index < taken[:, None], room, behind)
            blocks = jnp.where((choice.length > 0)[:, None], chosen, blocks)
            left_out = jnp.where(choice.length > 0, then - taken, left_out)
        # Blocks that the cache does not have lie behind all tokens: any will do.
        blocks = jnp.minimum(blocks, whole - 1).astype(jnp.int32)
        # A row may have fewer tokens than its choice left out: one that does not take part.
        return BlockTable(blocks, jnp.maximum(length - left_out * block, 0))

    def read(self, keys: CacheSlots, values: CacheSlots, table: BlockTable) -> Prefix:
        """The blocks of one layer's cache, laid end to end."""
        block = self.budget.block
        found = gather_blocks(keys, table, block), gather_blocks(values, table, block)
        return Prefix(*found, table.length)

    @property
    def _layer(self) -> int:
        return self.target.num_layers - 1

    @property
    def _behind(self) -> int:
        """Slots behind a choice for what is committed until the next one."""
        tokens = self.refresh and MAX_TREE_LEVELS + 1 + self.refresh * USUAL_ROUND
        return -(-tokens // self.budget.block) * self.budget.block
