"""Choosing blocks of a row's cache slots, and reading them: scores, the choice, the gather.

Every block of consecutive slots gets a score. The best blocks of a row are chosen next to its first
and its last ones, and what lies in them is gathered into a compact cache, whose first ``length``
slots are committed tokens; the rest may be anything. The budget is static and rows differ in
length, so a row with fewer blocks than the budget reads each of them once.

Scores come from the attention of one query (:func:`attended_scores`, SpecExtend) or from a summary
of a block's keys (:func:`bound_scores`, Quest): the largest and the smallest value of each of their
numbers. No key of the block has a larger product with a query than the sum, over the width, of the
larger of the two products: an upper bound on what attention could find there (Tang et al.,
arXiv:2406.10774, section 3.3; SpecPV, arXiv:2512.02337, section 3.2). As the largest value is never
below the smallest, the bound takes it where the query is positive and the other one where it is
negative: two products, which are linear, so that queries may be averaged before them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Num

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths
from longspec_jax.ops.attention.float8 import CODES, widened
from longspec_jax.ops.dispatch import op
from longspec_jax.ops.hardware import KERNEL_DTYPES, require_ampere
from longspec_jax.ops.placement import on_host, to_device, to_host
from longspec_jax.ops.slicing import along


@dataclass(frozen=True)
class BlockBudget:
    """How many cache slots of a row are read, in whole blocks."""

    slots: int = 4096
    """Slots of all blocks together, sinks and recent ones included."""
    sinks: int = 32
    """The first slots, which are always read (StreamingLLM)."""
    recent: int = 512
    """Slots of the last blocks, which are always read; the last one may be partly filled."""
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
        """How many blocks a long row reads."""
        return self.slots // self.block

    def gathers(self, capacity: int) -> int:
        """How many slots of a cache are copied; 0 if the budget holds the whole cache."""
        return self.slots if self.slots < capacity else 0

    def blocks_of(self, capacity: int) -> int:
        """Blocks of a cache with this many slots.

        Raises:
          ValueError: if the slots are not whole blocks.
        """
        if capacity % self.block:
            raise ValueError(
                f"a cache of {capacity} slots is not a whole number of blocks of {self.block}; "
                "choose a block, and a prefill chunk, that are powers of two"
            )
        return capacity // self.block


@struct.dataclass
class BlockTable:
    """The blocks that a row reads, and how many of their slots hold committed tokens."""

    blocks: Leaf[Int[Array, "B *heads k"]]
    """Distinct blocks. The row's own come first, its last one after the others; the rest pad."""
    length: Leaf[Lengths]
    """Committed tokens in these blocks. Laid end to end, they come before all other slots."""


def followed(
    chosen: BlockTable, length: Lengths, behind: int, block: int, count: int
) -> BlockTable:
    """An earlier choice of blocks, followed by the blocks that were committed since.

    The last block of the choice may have been partly filled; the first new tokens filled it.

    Args:
      chosen: the earlier choice, whose ``length`` is all tokens the row had committed then.
      length: committed tokens now.
      behind: how many newer blocks fit after the choice.
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
    # Blocks that the cache does not have lie after all tokens: any will do.
    blocks = jnp.minimum(blocks, count - 1).astype(jnp.int32)
    slots = (kept + behind) * block
    # A row may have fewer tokens than its choice left out: one that does not take part.
    return BlockTable(blocks, jnp.clip(length - left_out * block, 0, slots))


def choose_blocks(
    scores: Float[Array, "B *heads n"], length: Lengths, budget: BlockBudget
) -> BlockTable:
    """The first and the last blocks of every row, and those of the others that score highest.

    Args:
      scores: of every block; anything for a block without committed tokens. Every index of the
        axes between has a choice of its own.
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
    # The last block is the only one that may not be full: it goes after the others that exist.
    taken = jnp.minimum(present, kept)
    best = jnp.pad(best, [*[(0, 0)] * (best.ndim - 1), (0, 1)])
    blocks = jnp.where(jnp.arange(kept) == jnp.maximum(taken - 1, 0)[lead], final, best)
    # After it stand blocks that are not the row's: they need not exist, but must be in the cache.
    filled = length - last * block
    return BlockTable(blocks.astype(jnp.int32), jnp.maximum(taken - 1, 0) * block + filled)


def attended_scores(
    q: Float[Array, "B N H"], keys: CacheSlots, length: Lengths, block: int
) -> Float[Array, "B n"]:
    """Softmax attention to the slots ``s < length[b]``, averaged over heads and summed by blocks.

    Args:
      q: the query of one token, rotary applied.
      keys: one layer's cache; its slots must be whole blocks.
      length: slots of every row that hold tokens; those beyond may hold anything.
      block: slots of a block.

    Returns:
      A share of 1 for every block, float32; zeros for a row without tokens.
    """
    batch, heads, width = q.shape
    kv_heads, slots = keys.shape[1:3]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "BKGH,BKSH->BKGS",
        grouped,
        widened(keys, q.dtype),
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    seen = (jnp.arange(slots) < length[:, None])[:, None, None]
    scores = jnp.where(seen, scores * width**-0.5, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    shares = weights / jnp.where(total > 0, total, 1.0)
    return shares.mean(axis=(1, 2)).reshape(batch, slots // block, block).sum(axis=2)


@struct.dataclass
class Extremes:
    """Quest's summary of every block of every layer's keys. DONATED by what returns new ones.

    Blocks lead, layers follow: what is read and written of a block is then one piece of memory, for
    all layers at once.
    """

    highest: Leaf[Float[Array, "B n L K H"]]
    """-inf for a block without keys."""
    lowest: Leaf[Float[Array, "B n L K H"]]
    """+inf for a block without keys."""


def no_extremes(
    batch: int, blocks: int, layers: int, heads: int, width: int, dtype: DTypeLike
) -> Extremes:
    """The extremes of caches without a key; ``dtype`` is the keys'."""
    shape = (batch, blocks, layers, heads, width)
    return Extremes(jnp.full(shape, -jnp.inf, dtype), jnp.full(shape, jnp.inf, dtype))


def extend_extremes(
    extremes: Extremes, keys: Float[Array, "B n L K H"], start: Lengths, count: Lengths, block: int
) -> Extremes:
    """The summaries after ``count[b]`` more keys from slot ``start[b]`` on.

    A block that was not full goes on from what it was. Nothing but the blocks in question is read
    or written.
    """
    given = keys.shape[1]
    touched = (given + block - 2) // block + 1
    places = (start // block)[:, None] + jnp.arange(touched)
    slots = places[:, :, None] * block + jnp.arange(block)
    offsets = (slots - start[:, None, None]).reshape(slots.shape[0], -1)
    joined = (offsets >= 0) & (offsets < count[:, None])
    found = along(jnp.clip(offsets, 0, given - 1), keys)
    shape = (*places.shape, block, *keys.shape[2:])
    joined = joined[:, :, None, None, None]
    above = jnp.where(joined, found, -jnp.inf).reshape(shape).max(axis=2)
    below = jnp.where(joined, found, jnp.inf).reshape(shape).min(axis=2)
    # Blocks after the last one do not exist, and are dropped.
    rows = jnp.arange(keys.shape[0])[:, None]
    high, low = extremes.highest.at[rows, places], extremes.lowest.at[rows, places]
    return Extremes(
        high.max(above, mode="drop", unique_indices=True),
        low.min(below, mode="drop", unique_indices=True),
    )


def bound_scores(
    queries: Float[Array, "B Q L N H"], counts: Bool[Array, "B Q"], extremes: Extremes
) -> Float[Array, "B L K n"]:
    """The upper bound of every block for the average query; of one without keys it may be anything.

    Products and sums in float32, written so that the summaries are read once and in their dtype.

    Args:
      queries: of some tokens, rotary applied; a key/value head averages those of its query heads.
      counts: which of the tokens count; without any, all bounds are 0.
      extremes: the summaries.
    """
    kv_heads = extremes.highest.shape[3]
    grouped = queries.reshape(*queries.shape[:3], kv_heads, -1, queries.shape[4])
    grouped = grouped.astype(jnp.float32).transpose(0, 2, 3, 1, 4, 5)
    count = jnp.where(counts[:, None, None, :, None], 1.0, 0.0)
    total = jnp.maximum(count.sum(axis=3), 1)
    positive, negative = (
        (sign(grouped, 0).mean(axis=4) * count).sum(axis=3) / total
        for sign in (jnp.maximum, jnp.minimum)
    )
    highest, lowest = extremes.highest, extremes.lowest
    bounds = (positive[:, None] * highest + negative[:, None] * lowest).sum(axis=-1)
    return bounds.transpose(0, 2, 3, 1)


def gather_blocks(
    slots: CacheSlots, table: BlockTable, block: int, cache_rows: Lengths | None = None
) -> Num[Array, "B K c H"]:
    """The slots of the table's blocks, one after the other, on the device.

    Args:
      slots: keys or values of one layer, on the device or in the host's memory. Of the latter
        nothing else is moved.
      table: the blocks of every row ``[B, k]``, or of every row and key/value head ``[B, K, k]``.
      block: slots of a block; the cache must be whole blocks.
      cache_rows: the row of the cache for every row of the table; its own if absent. Only for a
        cache on the device.
    """
    rows, heads, count, width = slots.shape
    blocks, batch = table.blocks, len(table.length)
    if blocks.ndim == 2:
        blocks = blocks[:, None].repeat(heads, axis=1)
    whole = slots.reshape(rows, heads, count // block, block, width)
    if cache_rows is not None:
        found = whole.at[cache_rows[:, None, None], jnp.arange(heads)[:, None], blocks]
        return found.get(mode="promise_in_bounds").reshape(batch, heads, -1, width)
    return gather(whole, blocks).reshape(batch, heads, -1, width)


@op
def gather(whole: Num[Array, "B K n b H"], blocks: Int[Array, "B K k"]) -> Num[Array, "B K k b H"]:
    """The gather, where the cache lies; from there the result goes to the device."""

    def take(blocks_of_head: Array, at: Array) -> Array:
        return blocks_of_head.at[at].get(mode="promise_in_bounds")

    hosted = on_host(whole)
    found = jax.vmap(jax.vmap(take))(whole, to_host(blocks) if hosted else blocks)
    return to_device(found) if hosted else found


@gather.kernel("pallas")
def _gather_pallas(whole: Array, blocks: Array) -> Array:
    if not on_host(whole):
        raise NotImplementedError("XLA gathers as fast from the device's memory")
    require_ampere("the kernel that gathers blocks")
    if whole.dtype not in (*KERNEL_DTYPES, CODES):
        raise NotImplementedError(f"the kernel that gathers blocks takes no {whole.dtype}")
    from longspec_jax.ops.selection import gather_pallas

    return gather_pallas.gather(whole, blocks)
