"""A working cache: the part of a long cache that a drafter reads, chosen by the target's attention.

A small draft is slow over a long cache, and most of the cache misleads it. It needs what the target
attends to: SpecExtend (arXiv:2505.20776, section 2.2, "cross-model retrieval") scores the blocks of
a text by the attention that the last accepted token's query pays them in the layer that drafts
read, and lets the draft see the best ones. Neither model is trained for it.

Keys are stored with their rotary angles applied at the token's true position, so that blocks laid
end to end are exactly the text with gaps; nothing is computed again.

Sinks and recent tokens are always read. Tokens that are committed after a choice are read after it
until the next one, so that no token before the pending one is missing. Without choices this is the
cache of StreamingLLM (arXiv:2309.17453): the sinks, and recent tokens for the rest of the budget.
"""

from dataclasses import dataclass, replace

import jax
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

TOKENS_A_ROUND = 8
"""Tokens of a round for which a choice has slack after it; rounds that yield more bring the next
choice forward."""


@struct.dataclass
class CachedSelection:
    """The numbers of the blocks that were last chosen in each row, which serve several rounds."""

    retriever: LastQuery
    """By which the next choice is made."""
    blocks: Leaf[Int[Array, "B k"]]
    """The row's last block comes after all others that it had."""
    length: Leaf[Lengths]
    """Committed tokens when they were chosen; 0 for a row that has not chosen yet."""
    rounds: Leaf[Int[Array, " B"]]
    """Rounds since then."""


@dataclass(frozen=True)
class WorkingCache:
    """How much of a cache is read, and how often it is chosen."""

    budget: BlockBudget
    refresh: int
    """Rounds from choice to choice; 0 for no choice: only sinks and recent tokens."""
    target: TargetConfig
    """Whose attention chooses, in the layer that drafts read."""

    @property
    def queries(self) -> tuple[int, ...]:
        """The layers of the target whose queries are needed."""
        return self._retriever.needs.queries if self.refresh else ()

    def begin(self, batch: int) -> CachedSelection | None:
        """Rows that have chosen nothing yet; None where nothing is ever chosen."""
        if not self.refresh:
            return None
        none = jnp.zeros(batch, jnp.int32)
        blocks = jnp.zeros((batch, self.budget.blocks), jnp.int32)
        return CachedSelection(self._retriever.empty(batch), blocks, none, none)

    def extend(
        self, choice: CachedSelection | None, committed: Committed
    ) -> CachedSelection | None:
        """Keep the query of the last token that joined."""
        if choice is None:
            return None
        return replace(choice, retriever=self._retriever.extend(choice.retriever, committed))

    def before_round(self, choice: CachedSelection | None, view: View) -> CachedSelection | None:
        """Choose again in rows whose choice is old, or whose slack may not suffice."""
        if choice is None:
            return None
        block = self.budget.block
        held = (-(-choice.length // block) + self._slack) * block
        # A proposal may go on by this many tokens before the next check.
        full = view.position + MAX_TREE_LEVELS + 1 > held
        rows = (choice.length == 0) | (choice.rounds + 1 >= self.refresh) | full

        def chosen(old: CachedSelection) -> CachedSelection:
            found = self._retriever.table(old.retriever, view).blocks
            found = jnp.pad(found, ((0, 0), (0, self.budget.blocks - found.shape[1])))
            blocks = jnp.where(rows[:, None], found, old.blocks)
            return replace(old, blocks=blocks, length=jnp.where(rows, view.length, old.length))

        if self.refresh == 1:  # A GPU's host would wait for the condition in every round.
            return chosen(choice)
        latest: CachedSelection = jax.lax.cond(rows.any(), chosen, lambda old: old, choice)
        return replace(latest, rounds=jnp.where(rows, 0, latest.rounds + 1))

    def table(self, choice: CachedSelection | None, length: Lengths, slots: int) -> BlockTable:
        """The blocks that are read in rows of ``length[b]`` tokens.

        Args:
          choice: the chosen blocks; the last blocks in their place where nothing was chosen.
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
        """Blocks after a choice, for what is committed until the next one."""
        tokens = self.refresh and MAX_TREE_LEVELS + 1 + self.refresh * TOKENS_A_ROUND
        return -(-tokens // self.budget.block)


CHUNK, REFRESH = 32, 4
"""Neighbouring tokens that are chosen together, and rounds from choice to choice: SpecExtend's
defaults for a draft of 68 M parameters (its appendix E.1)."""


@dataclass(frozen=True, kw_only=True)
class WorkingCacheOptions:
    """How much of a cache a draft reads, the same options for every kind that can.

    ``working=1024`` is SpecExtend's setting, with ``refresh=0`` it is the cache of StreamingLLM.
    An eighth of the tokens are the most recent ones.
    """

    working: int | None = None
    """Tokens of the cache that are read, sinks and recent ones included; all if absent. A multiple
    of 32, the tokens that are chosen together."""
    sinks: int | None = None
    """First tokens that are always read, a multiple of 32; 32 if absent."""
    refresh: int | None = None
    """Rounds from one choice by the target's attention to the next; 4 if absent. 0 reads sinks and
    recent tokens only."""

    def __post_init__(self) -> None:
        if self.working is not None:
            self._budget(self.working)
            return
        for name in ("sinks", "refresh"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}={value} is about a working cache, and without one the whole cache is "
                    "read; say working=1024 as well, or leave it out"
                )

    def working_cache(self, target: TargetConfig) -> WorkingCache | None:
        """The working cache of these options; None for the whole cache."""
        if self.working is None:
            return None
        if self._refresh:
            target.check_read("the choice of a working cache")
        return WorkingCache(self._budget(self.working), self._refresh, target)

    @property
    def _refresh(self) -> int:
        return REFRESH if self.refresh is None else self.refresh

    def _budget(self, working: int) -> BlockBudget:
        """Which blocks are read.

        Raises:
          ValueError: if the options contradict each other.
        """
        sinks = CHUNK if self.sinks is None else self.sinks
        for name, value in (("working", working), ("sinks", sinks)):
            if value % CHUNK:
                raise ValueError(
                    f"{name}={value} must be a multiple of {CHUNK}, such as "
                    f"{value - value % CHUNK or CHUNK}"
                )
        # Without choices all but the sinks are recent.
        recent = max(CHUNK, working // 8 // CHUNK * CHUNK) if self._refresh else working - sinks
        if recent < CHUNK or working < sinks + recent + bool(self._refresh) * CHUNK:
            raise ValueError(
                f"working={working} tokens must hold sinks={sinks}, at least {CHUNK} recent ones "
                f"and, unless refresh=0, another {CHUNK} that are chosen; allow more"
            )
        return BlockBudget(working, sinks, recent, CHUNK)
