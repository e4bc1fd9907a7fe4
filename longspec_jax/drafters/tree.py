"""The draft tree: dynamic tokens and parents in a static shape.

Node 0 is the root, the pending token. A level's nodes follow the previous level's, so a node's
depth is known at trace time from :class:`TreeConfig`, while its token, its parent and therefore the
ancestor mask are device arrays that differ from row to row and round to round (LongSpec appendix E:
nodes that fall out of the beam get no children, and nothing moves).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.config import TreeConfig


@struct.dataclass
class Tree:
    """Candidate continuations of the pending token."""

    tokens: Leaf
    """``[B, T]`` int32 token of every node; column 0 is the pending token."""
    parents: Leaf
    """``[B, T]`` int32 index of every node's parent; -1 for the root and for nodes not grown yet."""
    mask: Leaf
    """``[B, T, T]`` bool; ``mask[b, i, j]`` where node ``j`` is node ``i`` or its ancestor."""


def plant(pending: Int[Array, " B"], config: TreeConfig) -> Tree:
    """A tree that holds its root only."""
    batch, nodes = pending.shape[0], config.num_nodes
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


def best_continuations(
    scores: Float[Array, "B w V"], count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"], Int[Array, "B count"]]:
    """The ``count`` best (node, token) pairs of a level: their scores, nodes and tokens.

    Two stages: a flat top-k over ``w * V`` scores is an order of magnitude slower on a GPU than the
    same choice made per node first.
    """
    nodes, vocabulary = scores.shape[1:]
    per_node = min(count, vocabulary)
    if nodes * per_node < count:
        raise ValueError(
            f"a level of {count} nodes cannot follow one of {nodes} over a vocabulary of {vocabulary}: "
            f"there are only {nodes * per_node} continuations. Use a narrower tree."
        )
    values, tokens = jax.lax.top_k(scores, per_node)
    best, flat = jax.lax.top_k(values.reshape(scores.shape[0], -1), count)
    tokens = jnp.take_along_axis(tokens.reshape(scores.shape[0], -1), flat, axis=1)
    return best, flat // per_node, tokens
