"""Choosing a row's best blocks of cache slots, beside its first and its last ones.

The budget is static and rows differ in length, so a row may have fewer blocks than it could read:
it then reads each of them once. What is chosen is what a compact cache of so many slots holds:
its first ``length`` slots are committed tokens, the rest may be anything.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf, Lengths


@dataclass(frozen=True)
class BlockBudget:
    """How many cache slots of a row are read, in whole blocks."""

    slots: int = 4096
    """Of all blocks together, sinks and recent ones included."""
    sinks: int = 32
    """First slots, which attention falls back on (StreamingLLM)."""
    recent: int = 512
    """Slots of the last blocks, the one that is being filled among them."""
    block: int = 32
    """Slots of a block."""

    def __post_init__(self) -> None:
        if self.block < 1 or self.sinks < 0 or self.recent < self.block:
            raise ValueError(
                f"block={self.block} must be at least 1, sinks={self.sinks} at least 0 and "
                f"recent={self.recent} at least one block: the last block is always read"
            )
        for name in ("slots", "sinks", "recent"):
            value = getattr(self, name)
            if value % self.block:
                subject = f"{value} slots" if name == "slots" else f"{name}={value}"
                raise ValueError(
                    f"{subject} must be whole blocks of {self.block} slots: use "
                    f"{value - value % self.block} or {value + -value % self.block}, or a block "
                    "that divides it"
                )
        if self.slots < self.sinks + self.recent:
            raise ValueError(
                f"{self.slots} slots cannot hold sinks={self.sinks} and recent={self.recent}, "
                "which are always read; allow more slots, or fewer sinks or recent ones"
            )

    @property
    def blocks(self) -> int:
        """Blocks that are read of a long row."""
        return self.slots // self.block

    def gathers(self, capacity: int) -> int:
        """Slots that are copied of a cache with so many; 0 where it is within the budget."""
        return self.slots if self.slots < capacity else 0

    def blocks_of(self, capacity: int) -> int:
        """Blocks of a cache with so many slots.

        Raises:
          ValueError: if they are not whole ones.
        """
        if capacity % self.block:
            raise ValueError(
                f"a cache of {capacity} slots is no whole number of blocks of {self.block}; "
                "choose a block, and a prefill chunk, that are powers of two"
            )
        return capacity // self.block


@struct.dataclass
class BlockTable:
    """The blocks that a row reads, and how many of their slots hold committed tokens."""

    blocks: Leaf[Int[Array, "B *heads k"]]
    """Different ones, the row's last block behind all others that it has; then any it has not."""
    length: Leaf[Lengths]
    """Committed tokens in the blocks, laid end to end: they come before all other slots."""


def followed(
    chosen: BlockTable, length: Lengths, behind: int, block: int, count: int
) -> BlockTable:
    """Blocks that were chosen earlier, and behind them those that came since.

    The last block of the choice may not have been full then: what came first has filled it.

    Args:
      chosen: ``blocks`` as they were chosen, and in ``length`` the row's committed tokens then, of
        all its blocks.
      length: committed tokens now, at least as many.
      behind: blocks that there is room for behind the choice.
      block: slots of a block.
      count: blocks of the cache.
    """
    kept = chosen.blocks.shape[-1]
    lead = (slice(None), *[None] * (chosen.blocks.ndim - 1))
    then = -(-chosen.length // block)
    taken = jnp.minimum(then, kept)
    index, left_out = jnp.arange(kept + behind), then - taken
    room = jnp.pad(chosen.blocks, [*[(0, 0)] * (chosen.blocks.ndim - 1), (0, behind)])
    blocks = jnp.where(index < taken[lead], room, index + left_out[lead])
    # Blocks that the cache does not have lie behind all tokens: any will do.
    blocks = jnp.minimum(blocks, count - 1).astype(jnp.int32)
    slots = (kept + behind) * block
    # A row may have fewer tokens than its choice left out: one that does not take part.
    return BlockTable(blocks, jnp.clip(length - left_out * block, 0, slots))


def choose_blocks(
    scores: Float[Array, "B *heads n"], length: Lengths, budget: BlockBudget
) -> BlockTable:
    """The first and the last blocks of every row, and of the others those that score highest.

    Args:
      scores: of every block; of a block without committed tokens it may be anything. The axes
        between choose each for themselves.
      length: committed tokens of every row.
      budget: how many blocks.
    """
    count, block = scores.shape[-1], budget.block
    kept = min(budget.blocks, count)
    present = -(-length // block)
    last = jnp.maximum(present - 1, 0)
    lead = (slice(None), *[None] * (scores.ndim - 1))
    index, final = jnp.arange(count), last[lead]
    always = (index < budget.sinks // block) | (index > final - budget.recent // block)
    # Numbers beyond all bounds would hide what is always read, or what does not exist.
    bounded = jnp.nan_to_num(scores.astype(jnp.float32))
    ranked = jnp.where(always, jnp.inf, bounded)
    ranked = jnp.where(index < final, ranked, -jnp.inf)
    _, best = jax.lax.top_k(ranked, kept - 1)
    # The last block is the only one that may not be full: it goes behind the others that exist.
    taken = jnp.minimum(present, kept)
    best = jnp.pad(best, [*[(0, 0)] * (best.ndim - 1), (0, 1)])
    blocks = jnp.where(jnp.arange(kept) == jnp.maximum(taken - 1, 0)[lead], final, best)
    # Behind it stand blocks that are not the row's: they need not exist, but must be in the cache.
    filled = length - last * block
    return BlockTable(blocks.astype(jnp.int32), jnp.maximum(taken - 1, 0) * block + filled)
