"""The draft tree: dynamic tokens and parents in a static shape.

Node 0 is the root, the pending token. A level's nodes follow the previous level's, so a grown
node's depth is known at trace time from :class:`TreeConfig`, while its token, its parent and
therefore the ancestor mask are device arrays that differ from row to row and round to round
(LongSpec appendix E: nodes that fall out of the beam get no children, and nothing moves). Where a
budget has chosen among the grown nodes (:mod:`longspec_jax.drafters.budget`), or the tree hangs at
the end of a chain (:func:`at_end`), depths differ as well.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.config import TreeConfig


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
    root = jnp.arange(nodes) == 0
    tokens = jnp.where(root, pending[:, None], 0).astype(jnp.int32)
    parents = jnp.full((batch, nodes), -1, jnp.int32)
    mask = jnp.broadcast_to(root[:, None] & root, (batch, nodes, nodes))
    return Tree(tokens, parents, mask)


def grow(tree: Tree, first: int, tokens: Int[Array, "B w"], parents: Int[Array, "B w"]) -> Tree:
    """Append one level as nodes ``first ... first + w - 1`` under the given parent nodes."""
    # As slices: an indexed update is a scatter, which asks the device whether its place exists.
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
    ancestors = jnp.take_along_axis(tree.mask, parents[:, :, None], axis=1)
    itself = jnp.eye(tokens.shape[1], tree.tokens.shape[1], first, dtype=bool)
    return Tree(
        tokens=write(tree.tokens, tokens.astype(jnp.int32)),
        parents=write(tree.parents, parents.astype(jnp.int32)),
        mask=write(tree.mask, ancestors | itself),
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
