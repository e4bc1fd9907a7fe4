"""The best continuations of all paths of a draft's level, as one op of its beam search.

The best entries lie in the blocks of neighbouring tokens with the best maxima. So only a few
thousand of ``w * V`` continuations are compared, and the rest are read once. XLA makes some twenty
kernels of it, whose launches take a third of a draft's level on a GPU. There our Pallas kernels do
it in three; without Triton XLA computes the numbers and a kernel chooses among them, twice.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.dispatch import op, traced_once
from longspec_jax.ops.hardware import require_decode_step, require_mosaic
from longspec_jax.ops.partitioned import one_device

SMALL_VOCABULARY = 4096
"""Up to here a search in blocks is no faster."""
MOST_NODES = 64
"""Of a level, for the kernels: they compare every node's entries with every other's in one tile."""
TopK: TypeAlias = Callable[[Array, int], tuple[Array, Array]]
"""``(values[..., n], count) -> (best, indices)``, as ``lax.top_k``: ties go to the lower index."""


def best_continuations(
    scores: Float[Array, "B w V"],
    totals: Float[Array, "B w"],
    count: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B count"], Int[Array, "B count"], Int[Array, "B count"]]:
    """The ``count`` best (node, token) pairs of a level, best first.

    Args:
      scores: what follows the nodes, as logarithms of probabilities up to a constant of each node;
        -inf for a token that cannot follow. NaN is read as -inf.
      totals: cumulative log-probabilities of the nodes.
      count: how many; ties go to the lower node, then to the lower token. Where fewer tokens are
        possible, impossible ones fill up.
      implementation: the drafter's choice for attention. None, and the names of Pallas kernels,
        take our kernels where they can run; all other names take plain JAX.

    Returns:
      The pairs' cumulative log-probabilities, none above its node's, float32; their nodes; and
      their tokens.
    """
    _, nodes, vocabulary = scores.shape
    if nodes * vocabulary < count:
        raise ValueError(
            f"a level of {count} nodes cannot follow one of {nodes} over a vocabulary of "
            f"{vocabulary}: "
            f"there are only {nodes * vocabulary} continuations. Use a narrower tree."
        )
    choice = None if implementation in (None, "pallas", "mosaic") else "xla"
    return chosen_continuations.named(choice)(scores, totals, count)


@op
@traced_once("count")
def chosen_continuations(scores: Array, totals: Array, count: int) -> tuple[Array, Array, Array]:
    """As :func:`best_continuations`, of which there are enough."""
    reached = cumulative(scores, totals)
    if scores.shape[2] <= SMALL_VOCABULARY:
        return _best_per_row(reached, count)
    return best_in_blocks(reached, count, block_size(scores.shape[2]))


def block_size(vocabulary: int) -> int:
    """Neighbouring tokens whose maximum decides whether they are searched: a power of two.

    Close to the square root, so that a node has about as many blocks as a block has tokens. What is
    compared of 16 nodes, and of the 16 best blocks, is then a few thousand numbers each.
    """
    return 1 << math.ceil(math.log2(vocabulary) / 2)


def cumulative(scores: Float[Array, "B w V"], totals: Float[Array, "B w"]) -> Float[Array, "B w V"]:
    """Cumulative log-probability of every continuation, never above its node's; -inf for NaN."""
    wide = scores.astype(jnp.float32)
    wide = jnp.where(jnp.isnan(wide), -jnp.inf, wide)
    # Two numbers that are never above zero are added to the node's: rounding keeps them there.
    below = wide - wide.max(axis=2, keepdims=True)
    mass = jnp.exp(below).sum(axis=2)
    reached = below + (totals - jnp.log(mass))[:, :, None]
    return jnp.where(jnp.isnan(reached), -jnp.inf, reached)  # None is possible: -inf less -inf.


def _best_per_row(
    values: Array, count: int, top: TopK = jax.lax.top_k
) -> tuple[Array, Array, Array]:
    """Top-k of every row, then of the survivors: never a sort over ``w * V``."""
    batch, _, columns = values.shape
    survivors, column = top(values, min(count, columns))
    if values.shape[1] == 1:
        return survivors[:, 0], jnp.zeros_like(column[:, 0]), column[:, 0]
    best, flat = top(survivors.reshape(batch, -1), min(count, survivors[0].size))
    column = jnp.take_along_axis(column.reshape(batch, -1), flat, axis=1)
    return best, flat // survivors.shape[2], column


def best_in_blocks(
    values: Float[Array, "B w V"], count: int, block: int
) -> tuple[Float[Array, "B k"], Int[Array, "B k"], Int[Array, "B k"]]:
    """The best of some numbers, their nodes and tokens: one pass yields the maxima of blocks.

    What remains is a few thousand numbers.
    """
    batch, nodes, vocabulary = values.shape
    blocks, padded = _in_blocks(values, block), vocabulary - vocabulary % -block
    _, node, column = _best_per_row(blocks.max(axis=3), count, top_by_rank)
    chosen = (node * blocks.shape[2] + column)[:, :, None]
    found = jnp.take_along_axis(blocks.reshape(batch, -1, block), chosen, axis=1)
    survivors, inside = top_by_rank(found, min(count, block))
    place = (chosen * block + inside).reshape(batch, -1)
    order = _padding_last(place, nodes, vocabulary, padded)
    best, at = top_by_rank(survivors.reshape(batch, -1), count, order)
    place = jnp.take_along_axis(place, at, axis=1)
    return best, place // padded, place % padded


def _in_blocks(values: Float[Array, "B w V"], block: int) -> Float[Array, "B w n b"]:
    """Numbers of every node in whole blocks of tokens; -inf after the last token."""
    batch, nodes, vocabulary = values.shape
    ragged = -vocabulary % block
    if ragged:
        values = jnp.pad(values, ((0, 0), (0, 0), (0, ragged)), constant_values=-jnp.inf)
    return values.reshape(batch, nodes, -1, block)


def _padding_last(place: Array, nodes: int, vocabulary: int, padded: int) -> Array:
    """Places in which the padding is after all tokens, impossible ones too."""
    return jnp.where(place % padded < vocabulary, place, place + nodes * padded)


def top_by_rank(
    values: Float[Array, "*rows n"], count: int, order: Int[Array, "*#rows n"] | None = None
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """``lax.top_k`` of a few hundred numbers per row by comparing all pairs.

    A million comparisons are one small reduction on a GPU; ``lax.top_k`` of 2048 numbers took 73 us
    on an H200, four times per round.

    Args:
      values: none of them NaN.
      count: how many of the best; there must be as many.
      order: ties go to the number that is lower in this; to the lower index if absent.
    """
    place = jnp.arange(values.shape[-1])
    order = place if order is None else order
    mine, other = values[..., :, None], values[..., None, :]
    ahead = (other > mine) | ((other == mine) & (order[..., None, :] < order[..., :, None]))
    rank = ahead.sum(axis=-1, dtype=jnp.int32)
    hit = rank[..., None, :] == jnp.arange(count)[:, None]
    index = jnp.where(hit, place, 0).sum(axis=-1, dtype=jnp.int32)
    return jnp.take_along_axis(values, index, axis=-1), index


@chosen_continuations.without_triton
def _ranked(scores: Array, totals: Array, count: int) -> tuple[Array, Array, Array]:
    """Choose as many blocks, then among their tokens: none other reaches the least of these."""
    block = _require_kernels(scores, count)
    require_mosaic("the kernel that ranks continuations")
    from longspec_jax.ops.selection import rank_ampere

    batch, nodes, vocabulary = scores.shape
    blocks = _in_blocks(cumulative(scores, totals), block).reshape(batch, -1, block)
    maxima = blocks.max(axis=2)
    places = jnp.broadcast_to(jnp.arange(maxima.shape[1]), maxima.shape)
    none = jnp.full(batch, -jnp.inf)
    edges, chosen = rank_ampere.top_by_rank(maxima, places, none, count=count)
    found = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(batch, -1)
    place = (chosen[:, :, None] * block + jnp.arange(block)).reshape(batch, -1)
    padded = vocabulary - vocabulary % -block
    order = _padding_last(place, nodes, vocabulary, padded)
    best, at = rank_ampere.top_by_rank(found, order, edges[:, -1], count=count)
    place = jnp.take_along_axis(place, at, axis=1)
    return best, place // padded, place % padded


@chosen_continuations.kernel("pallas")
def _kernels(scores: Array, totals: Array, count: int) -> tuple[Array, Array, Array]:
    block = _require_kernels(scores, count)
    from longspec_jax.ops.selection import continuations_pallas

    return continuations_pallas.best_continuations(scores, totals, count=count, block=block)


def _require_kernels(scores: Array, count: int) -> int:
    """Tokens of a block; refuse what the kernels do not serve."""
    batch, nodes, vocabulary = scores.shape
    block = block_size(vocabulary)
    require_decode_step("the kernels that choose continuations", batch * nodes, scores.dtype)
    if vocabulary <= SMALL_VOCABULARY:
        raise NotImplementedError(f"{vocabulary} tokens are not more than {SMALL_VOCABULARY}")
    if max(nodes, count) > MOST_NODES or count > nodes * -(-vocabulary // block):
        raise NotImplementedError(
            f"the kernels choose up to {MOST_NODES} of as many nodes, and no more than there are "
            f"blocks of {block} tokens"
        )
    if not one_device():
        raise NotImplementedError("the kernels run on one device")
    return block
