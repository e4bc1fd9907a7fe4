"""A node budget: of all grown nodes, the target verifies the best of every row.

A verification takes its time by whole tiles of query rows, so 64 nodes may be cheaper than 69; and
a search can be wide though only its best part is verified (EAGLE-2 reranks its tree in this way).
Which nodes are kept differs from row to row and round to round; how many is static.

A cumulative log-probability is never above its parent's, so the best nodes are a tree themselves.
The output does not rest on it: a node that is kept without its parent is never walked to.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.tree import Tree
from longspec_jax.ops.selection.ranking import top_by_rank


def within_budget(tree: Tree, totals: Sequence[Float[Array, "B _"]], config: TreeConfig) -> Tree:
    """The nodes of a grown tree that are verified: ``config.num_nodes``, the root among them.

    Args:
      tree: all ``config.num_grown`` nodes.
      totals: cumulative log-probabilities of the levels below the root, first level first.
      config: widths and budget; without one the tree is returned as it is.
    """
    if not config.selective:
        return tree
    root = jnp.zeros((tree.tokens.shape[0], 1), jnp.float32)
    scores = jnp.concatenate([root, *totals], axis=1)
    return subtree(tree, best_nodes(scores, config.num_nodes))


def expected_acceptance(
    totals: Sequence[Float[Array, "B _"]], config: TreeConfig
) -> Float[Array, " B"]:
    """How many tokens the best nodes of the levels so far are expected to have accepted.

    A node is accepted with all its ancestors or not at all, so the expectation is the sum of the
    nodes' own probabilities (OPT-Tree, arXiv:2406.17276, theorem 3.1).

    Args:
      totals: cumulative log-probabilities of the levels grown so far, first level first.
      config: whose budget says how many nodes are verified.
    """
    grown = jnp.concatenate(totals, axis=1)
    best, _ = top_by_rank(grown, min(config.num_nodes - 1, grown.shape[1]))
    return jnp.exp(best).sum(axis=1)


def best_nodes(scores: Float[Array, "B T"], count: int) -> Int[Array, "B n"]:
    """The root and the ``count - 1`` best other nodes, in ascending order.

    Ties go to the lower index. Parents come before their children, so a kept node's ancestors are
    kept wherever no score is above its parent's, minus infinity included.
    """
    root = jnp.arange(scores.shape[1]) == 0
    _, nodes = top_by_rank(jnp.where(root, jnp.inf, scores), count)
    return jnp.sort(nodes, axis=1)


def subtree(tree: Tree, nodes: Int[Array, "B n"]) -> Tree:
    """The tree of the given nodes, node ``nodes[b, i]`` of row ``b`` becoming node ``i``.

    Args:
      tree: any tree.
      nodes: in ascending order, the root first; a node whose parent is missing gets parent -1.
    """
    parents = jnp.take_along_axis(tree.parents, nodes, axis=1)
    found = parents[:, :, None] == nodes[:, None, :]
    rows = jnp.take_along_axis(tree.mask, nodes[:, :, None], axis=1)
    return Tree(
        tokens=jnp.take_along_axis(tree.tokens, nodes, axis=1),
        parents=jnp.where(found.any(axis=2), jnp.argmax(found, axis=2), -1).astype(jnp.int32),
        mask=jnp.take_along_axis(rows, nodes[:, None, :], axis=2),
    )
