"""The meaning of every selection op: dense, float32, row by row, no tricks.

Each function has the signature of the op that it defines. Nothing here is fast, and most of it is
numpy in a loop; everything is short enough to check by eye.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Lengths
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable


def extremes_of(
    keys: CacheSlots, length: Lengths, block: int
) -> tuple[Float[Array, "B n K H"], Float[Array, "B n K H"]]:
    """The largest and the smallest of the numbers of every block's keys ``s < length[b]``."""
    batch, heads, slots, width = keys.shape
    seen = (jnp.arange(slots) < length[:, None])[:, None, :, None]
    shape = (batch, heads, slots // block, block, width)
    high = jnp.where(seen, keys, -jnp.inf).reshape(shape).max(axis=3)
    low = jnp.where(seen, keys, jnp.inf).reshape(shape).min(axis=3)
    return high.swapaxes(1, 2), low.swapaxes(1, 2)


def bound(
    query: Float[np.ndarray, " H"], high: Float[np.ndarray, " H"], low: Float[np.ndarray, " H"]
) -> float:
    """The largest product that a query can have with a key between two others (Quest)."""
    return float(np.maximum(query * high, query * low).sum())


def attended_scores(
    q: Float[Array, "B N H"], keys: CacheSlots, length: Lengths, block: int
) -> Float[Array, "B n"]:
    """One softmax a head over the row's own slots; shares of a block are added."""
    batch, heads, width = q.shape
    groups, factor = heads // keys.shape[1], width**-0.5
    shares = np.zeros((batch, keys.shape[2] // block), np.float32)
    for row, end in enumerate(np.asarray(length)):
        for head in range(heads):
            mine = np.asarray(keys, np.float32)[row, head // groups, :end]
            weights = np.exp(factor * mine @ np.asarray(q, np.float32)[row, head])
            for slot, weight in enumerate(weights / weights.sum()):
                shares[row, slot // block] += weight / heads
    return jnp.asarray(shares)


def choose_blocks(
    scores: Float[Array, "B *heads n"], length: Lengths, budget: BlockBudget
) -> BlockTable:
    """The blocks that the op chooses, in the order of their slots; filled up with block 0."""
    lead, count = scores.shape[:-1], scores.shape[-1]
    kept = min(budget.blocks, count)
    blocks = np.zeros((*lead, kept), np.int32)
    held = np.zeros(lead[0], np.int32)
    for at in np.ndindex(*lead):
        end = int(length[at[0]])
        present = -(-end // budget.block)
        first = range(min(budget.sinks // budget.block, present))
        recent = range(max(present - budget.recent // budget.block, 0), present)
        always = {*first, *recent}
        others = [index for index in range(present) if index not in always]
        others.sort(key=lambda index: -float(scores[(*at, index)]))
        mine = sorted([*always, *others[: kept - len(always)]])
        blocks[at][: len(mine)] = mine
        held[at[0]] = sum(min(end - index * budget.block, budget.block) for index in mine)
    return BlockTable(jnp.asarray(blocks), jnp.asarray(held))


def gather_blocks(slots: CacheSlots, table: BlockTable, block: int) -> Float[Array, "B K c H"]:
    """Copies, block by block."""
    batch, heads, _, width = slots.shape
    blocks = np.asarray(table.blocks)
    if blocks.ndim == 2:
        blocks = np.repeat(blocks[:, None], heads, axis=1)
    cache = np.asarray(slots, np.float32)
    gathered = np.zeros((batch, heads, blocks.shape[2] * block, width), np.float32)
    for row, head, place in np.ndindex(*blocks.shape):
        at = int(blocks[row, head, place]) * block
        gathered[row, head, place * block : (place + 1) * block] = cache[row, head, at : at + block]
    return jnp.asarray(gathered)


def best_continuations(
    scores: Float[Array, "B w V"], totals: Float[Array, "B w"], count: int
) -> tuple[Float[np.ndarray, "B count"], Int[np.ndarray, "B count"], Int[np.ndarray, "B count"]]:
    """A sort of all pairs by their cumulative log-probability, in float64; NaN is -inf."""
    batch, nodes, vocabulary = scores.shape
    reached = np.full(scores.shape, -np.inf)
    for row, node in np.ndindex(batch, nodes):
        mine = np.asarray(scores[row, node], np.float64)
        possible = np.flatnonzero(mine > -np.inf)
        if possible.size and mine[possible].max() < np.inf:
            below = mine[possible] - mine[possible].max()
            total = float(totals[row, node]) - np.log(np.exp(below).sum())
            reached[row, node, possible] = below + total
    flat = reached.reshape(batch, -1)
    order = np.argsort(-flat, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(flat, order, axis=1), order // vocabulary, order % vocabulary
