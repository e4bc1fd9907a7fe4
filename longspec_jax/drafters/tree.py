"""The draft tree: dynamic tokens and parents in a static shape.

Node 0 is the root, the pending token. A level's nodes follow the previous level's, so a grown
node's depth is known at trace time from :class:`TreeConfig`, while its token, its parent and
therefore the ancestor mask are device arrays that differ from row to row and round to round
(LongSpec appendix E: nodes that fall out of the beam get no children, and nothing moves). Where a
budget has chosen among the grown nodes (:mod:`longspec_jax.drafters.budget`), or the tree hangs at
the end of a chain (:func:`at_end`), depths differ as well.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.config import TreeConfig

BLOCK = 128
"""Neighbouring tokens whose maximum decides whether they are searched."""
SMALL_VOCABULARY = 4096
"""Up to here searching in blocks saves nothing."""

TopK: TypeAlias = Callable[[Array, int], tuple[Array, Array]]
"""``(values[..., n], count) -> (best, indices)``, as ``lax.top_k``: ties go to the lower index."""


@struct.dataclass
class Tree:
    """Candidate continuations of the pending token."""

    tokens: Leaf[Int[Array, "B T"]]
    """Token of every node; column 0 is the pending token."""
    parents: Leaf[Int[Array, "B T"]]
    """Index of every node's parent; -1 for the root and for nodes not grown
    yet."""
    mask: Leaf[Bool[Array, "B T T"]]
    """``mask[b, i, j]`` where node ``j`` is node ``i`` or its ancestor."""


def plant(pending: Int[Array, " B"], config: TreeConfig) -> Tree:
    """A tree that holds its root only, with room for all nodes that will be grown."""
    batch, nodes = pending.shape[0], config.num_grown
    tokens = jnp.zeros((batch, nodes), jnp.int32).at[:, 0].set(pending)
    parents = jnp.full((batch, nodes), -1, jnp.int32)
    mask = jnp.zeros((batch, nodes, nodes), bool).at[:, 0, 0].set(True)
    return Tree(tokens, parents, mask)


def grow(tree: Tree, first: int, tokens: Int[Array, "B w"], parents: Int[Array, "B w"]) -> Tree:
    """Append one level as nodes ``first ... first + w - 1`` under the given parent nodes."""
    width = tokens.shape[1]
    nodes = slice(first, first + width)
    ancestors = jnp.take_along_axis(tree.mask, parents[:, :, None], axis=1)
    itself = jnp.eye(tree.tokens.shape[1], dtype=bool)[nodes]
    return Tree(
        tokens=tree.tokens.at[:, nodes].set(tokens.astype(jnp.int32)),
        parents=tree.parents.at[:, nodes].set(parents.astype(jnp.int32)),
        mask=tree.mask.at[:, nodes].set(ancestors | itself),
    )


def branch(pending: Int[Array, " B"], tokens: Int[Array, "B n"]) -> Tree:
    """A single branch: below the pending token each of these follows the one before."""
    rows, nodes = tokens.shape[0], tokens.shape[1] + 1
    return Tree(
        tokens=jnp.concatenate([pending[:, None], tokens], axis=1).astype(jnp.int32),
        parents=jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32) - 1, (rows, nodes)),
        mask=jnp.broadcast_to(jnp.tri(nodes, dtype=bool), (rows, nodes, nodes)),
    )


def at_end(chain: Tree, count: Int[Array, " B"], end: Tree) -> Tree:
    """A chain with a tree at its end, whose root is the chain's node ``count[b]``.

    Args:
      chain: of :func:`branch`; in each row ``count[b]`` links of it count.
      count: may be more than the chain has nodes for: no walk comes to such a row's tree.
      end: its nodes but the root follow the chain's.
    """
    nodes = chain.tokens.shape[1]
    below, ended = end.parents[:, 1:], count[:, None]
    root = jnp.where(ended < nodes, ended, -1)
    parents = jnp.where(below == 0, root, jnp.where(below > 0, below + nodes - 1, -1))
    batch, added = below.shape
    links = jnp.broadcast_to((jnp.arange(nodes) <= ended)[:, None], (batch, added, nodes))
    mask = jnp.pad(chain.mask, ((0, 0), (0, 0), (0, added)))
    return Tree(
        tokens=jnp.concatenate([chain.tokens, end.tokens[:, 1:]], axis=1),
        parents=jnp.concatenate([chain.parents, parents.astype(jnp.int32)], axis=1),
        mask=jnp.concatenate([mask, jnp.concatenate([links, end.mask[:, 1:, 1:]], axis=2)], axis=1),
    )


def node_depths(tree: Tree, config: TreeConfig) -> Int[Array, "#B T"]:
    """Depth of every node; one row for all where it is known beforehand.

    Args:
      tree: a grown tree, or the part of it within the budget.
      config: the shape it was grown in.
    """
    if config.varies:
        return tree.mask.sum(axis=2, dtype=jnp.int32) - 1  # A node sees itself and its ancestors.
    return jnp.asarray(config.depths, jnp.int32)[None]


def best_continuations(
    scores: Float[Array, "B w V"], count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"], Int[Array, "B count"]]:
    """The ``count`` best (node, token) pairs of a level: their scores, nodes and tokens."""
    nodes, vocabulary = scores.shape[1:]
    if nodes * min(count, vocabulary) < count:
        raise ValueError(
            f"a level of {count} nodes cannot follow one of {nodes} over a vocabulary of "
            f"{vocabulary}: "
            f"there are only {nodes * vocabulary} continuations. Use a narrower tree."
        )
    if vocabulary <= SMALL_VOCABULARY:
        return _best_per_row(scores, count)
    return _best_in_blocks(scores, count)


def _best_per_row(
    scores: Array, count: int, top: TopK = jax.lax.top_k
) -> tuple[Array, Array, Array]:
    """Top-k of every row, then of the survivors: never a sort over ``w * V``."""
    batch, _, columns = scores.shape
    values, column = top(scores, min(count, columns))
    best, flat = top(values.reshape(batch, -1), min(count, values[0].size))
    column = jnp.take_along_axis(column.reshape(batch, -1), flat, axis=1)
    return best, flat // values.shape[2], column


def _best_in_blocks(scores: Array, count: int) -> tuple[Array, Array, Array]:
    """The best entries lie in the blocks with the best maxima, so only those are searched.

    One pass over the scores yields the maxima; what remains is a few thousand numbers.
    """
    batch, nodes, vocabulary = scores.shape
    ragged = -vocabulary % BLOCK
    if ragged:
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, ragged)), constant_values=-jnp.inf)
    blocks = scores.reshape(batch, nodes, -1, BLOCK)
    _, node, block = _best_per_row(blocks.max(axis=-1), count, top_by_rank)
    found = jnp.take_along_axis(
        blocks.reshape(batch, -1, BLOCK), (node * blocks.shape[2] + block)[:, :, None], axis=1
    )
    best, at, inside = _best_per_row(found, count, top_by_rank)
    token = jnp.take_along_axis(block, at, axis=1) * BLOCK + inside
    # Where fewer tokens are possible than wanted, the padding may be chosen: name a real token.
    token = jnp.minimum(token, vocabulary - 1)
    return best, jnp.take_along_axis(node, at, axis=1), token


def top_by_rank(values: Float[Array, "*rows n"], count: int) -> tuple[Array, Array]:
    """``lax.top_k`` of a few hundred numbers per row by comparing all pairs.

    A million comparisons are one small reduction on a GPU; ``lax.top_k`` of 2048 numbers took 73 us
    on an H200, four times per round.
    """
    place = jnp.arange(values.shape[-1])
    mine, other = values[..., :, None], values[..., None, :]
    ahead = (other > mine) | ((other == mine) & (place < place[:, None]))
    rank = ahead.sum(axis=-1, dtype=jnp.int32)
    hit = rank[..., None, :] == jnp.arange(count)[:, None]
    index = jnp.where(hit, place, 0).sum(axis=-1, dtype=jnp.int32)
    return jnp.take_along_axis(values, index, axis=-1), index
