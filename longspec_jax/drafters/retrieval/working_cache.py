"""A working cache: the part of a long cache that a drafter reads, chosen by the target's attention.

A small draft is slow over a long cache, and most of the cache misleads it. It needs what the target
attends to: SpecExtend (arXiv:2505.20776, section 2.2, "cross-model retrieval") scores the blocks of
a text by the attention that the last accepted token's query pays them in the layer that drafts
read, and lets the draft see the best ones. Neither model is trained for it.

Keys are stored with their rotary angles applied at the token's true position, so that blocks laid
end to end are exactly the text with gaps; nothing is computed again.

Sinks and recent tokens are always read. Every round chooses anew: a condition under which it would
not is one for which a GPU's host waits, longer than the choice takes
(``docs/results/working_llama3_h200.json``).
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS
from longspec_jax.drafters.base import Committed, View
from longspec_jax.drafters.retrieval.selection import AttentionRetriever, LastQuery
from longspec_jax.ops.attention.operands import Prefix
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable, followed, gather_blocks


@struct.dataclass
class CachedSelection:
    """The numbers of the blocks that were chosen in each row before the latest round."""

    retriever: LastQuery
    """By which the next choice is made."""
    blocks: Leaf[Int[Array, "B k"]]
    """The row's last block comes after all others that it had."""
    length: Leaf[Lengths]
    """Committed tokens when they were chosen; 0 for a row that has not chosen yet."""


BEGUN = "the state is of a drafter without a working cache"


@dataclass(frozen=True)
class WorkingCache:
    """How much of a cache is read."""

    budget: BlockBudget
    target: TargetConfig
    """Whose attention chooses, in the layer that drafts read."""

    @property
    def queries(self) -> tuple[int, ...]:
        """The layers of the target whose queries are needed."""
        return self._retriever.needs.queries

    def begin(self, batch: int) -> CachedSelection:
        """Rows that have chosen nothing yet."""
        blocks = jnp.zeros((batch, self.budget.blocks), jnp.int32)
        return CachedSelection(self._retriever.empty(batch), blocks, jnp.zeros(batch, jnp.int32))

    def extend(self, choice: CachedSelection | None, committed: Committed) -> CachedSelection:
        """Keep the query of the last token that joined."""
        assert choice is not None, BEGUN
        return replace(choice, retriever=self._retriever.extend(choice.retriever, committed))

    def before_round(self, choice: CachedSelection | None, view: View) -> CachedSelection:
        """Choose what is read in the round that begins."""
        assert choice is not None, BEGUN
        found = self._retriever.table(choice.retriever, view).blocks
        blocks = jnp.pad(found, ((0, 0), (0, self.budget.blocks - found.shape[1])))
        return replace(choice, blocks=blocks, length=view.length)

    def table(self, choice: CachedSelection | None, length: Lengths, slots: int) -> BlockTable:
        """The blocks that are read in rows of ``length[b]`` tokens.

        Args:
          choice: the chosen blocks; the last blocks in their place in rows that have none yet.
          length: tokens that the cache holds, at least as many as at the choice.
          slots: of the cache.
        """
        assert choice is not None, BEGUN
        block, index = self.budget.block, jnp.arange(self.budget.blocks)
        left_out = jnp.maximum(-(-length // block) - self.budget.blocks, 0)
        blocks = index + jnp.where(index < self.budget.sinks // block, 0, left_out[:, None])
        chosen = choice.length > 0
        blocks = jnp.where(chosen[:, None], choice.blocks, blocks)
        then = jnp.where(chosen, choice.length, length)
        count = self.budget.blocks_of(slots)
        return followed(BlockTable(blocks, then), length, self._slack, block, count)

    def read(self, layer: Prefix, table: BlockTable) -> Prefix:
        """The blocks of one layer's cache, laid end to end."""
        keys, values = (
            gather_blocks(cache, table, self.budget.block, layer.cache_rows)
            for cache in (layer.keys, layer.values)
        )
        return Prefix(keys, values, table.length, scales=layer.scales)

    @property
    def _retriever(self) -> AttentionRetriever:
        return AttentionRetriever(self.target, self.budget)

    @property
    def _slack(self) -> int:
        """Blocks after a choice, for what a proposal goes on by until the next one."""
        return -(-(MAX_TREE_LEVELS + 1) // self.budget.block)


CHUNK = 32
"""Neighbouring tokens that are chosen together: SpecExtend's default for a draft of 68 M parameters
(its appendix E.1)."""


@dataclass(frozen=True, kw_only=True)
class WorkingCacheOptions:
    """How much of a cache a draft reads, the same option for every kind that can.

    ``working=1024`` is SpecExtend's setting, which keeps a choice for four rounds. The first chunk
    of a text is always read, and the most recent eighth.
    """

    working: int | None = None
    """Tokens of the cache that are read, first and recent ones included; all if absent. A multiple
    of 32, the tokens that are chosen together."""

    def __post_init__(self) -> None:
        if self.working is not None:
            self._budget(self.working)

    def working_cache(self, target: TargetConfig) -> WorkingCache | None:
        """The working cache of these options; None for the whole cache."""
        if self.working is None:
            return None
        target.check_read("the choice of a working cache")
        return WorkingCache(self._budget(self.working), target)

    def _budget(self, working: int) -> BlockBudget:
        """Which blocks are read.

        Raises:
          ValueError: for a number of tokens that cannot be cut into chunks, or holds too few.
        """
        if working % CHUNK:
            raise ValueError(
                f"working={working} must be a multiple of {CHUNK}, such as "
                f"{working - working % CHUNK or CHUNK}"
            )
        recent = max(CHUNK, working // 8 // CHUNK * CHUNK)
        if working < 2 * CHUNK + recent:
            raise ValueError(
                f"working={working} tokens must hold the first {CHUNK}, {recent} recent ones and "
                f"another {CHUNK} that are chosen; allow more"
            )
        return BlockBudget(working, CHUNK, recent, CHUNK)
