"""Several trees below the same tokens as one tree, whose likeliest nodes remain.

A node is its path of tokens: nodes of several trees with equal paths are one node. Paths are rows
of a matrix, so that all pairs are compared in one reduction, without a loop over levels. A node is
worth how likely the accepted path comes to it, which is never more than its parent's worth. So the
best nodes form a tree, in every row its own mix of what was offered.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array
from longspec_jax.drafters.tree import Tree, tree_paths
from longspec_jax.ops.selection.continuations import top_by_rank

NO_TOKEN = -1
"""After the end of a path."""


def union(offered: Mapping[int, Tree], levels: int, nodes: int) -> Tree:
    """The best nodes of some trees, the root among them, no two of them with the same path.

    Args:
      offered: trees below the same pending tokens by who offers them, each with
        :attr:`Tree.totals`. Nodes of one tree may have the same path.
      levels: of the tallest of them.
      nodes: how many remain. Where fewer are offered, nodes that no path reaches fill up.
    """
    trees = list(offered.values())
    paths = [tree_paths(tree, levels) for tree in trees]
    tokens = _together([tree.tokens for tree in trees])
    totals = [tree.totals for tree in trees if tree.totals is not None]
    assert len(totals) == len(trees), "a tree without totals cannot be joined"
    total = _together(totals)
    path, there = _together(paths), jnp.isfinite(total)
    same = (path[:, :, None] == path[:, None]).all(axis=3) & there[:, :, None] & there[:, None]
    node = jnp.arange(path.shape[1])
    repeats = (same & (node < node[:, None])).any(axis=2)
    # What all trees offer at every path, wherever it lies in them: as much as who trusts it most.
    most = jnp.where(same, total[:, None], -jnp.inf).max(axis=2)
    worth = jnp.where(repeats, -jnp.inf, most)
    offers = _together([jnp.full_like(t.tokens, 1 << i) for i, t in offered.items()])
    sources = jnp.bitwise_or.reduce(jnp.where(same, offers[:, None], 0), axis=2)
    if nodes > path.shape[1]:
        missing = nodes - path.shape[1]
        path = jnp.pad(path, ((0, 0), (0, missing), (0, 0)), constant_values=NO_TOKEN)
        worth = jnp.pad(worth, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        tokens, sources = (jnp.pad(each, ((0, 0), (0, missing))) for each in (tokens, sources))
    # The root is the likeliest, and the first of equals; parents stay before their children.
    best = jnp.sort(top_by_rank(worth, nodes)[1], axis=1)
    of_best = partial(jnp.take_along_axis, indices=best, axis=1)
    worth = of_best(worth)
    sources = jnp.where(jnp.isfinite(worth), of_best(sources), 0)
    parents, mask = _links(jnp.take_along_axis(path, best[:, :, None], axis=1), worth)
    return Tree(of_best(tokens), parents, mask, worth, sources)


def _together(parts: Sequence[Array]) -> Array:
    """The nodes of all trees, which have one root."""
    return jnp.concatenate([parts[0], *(part[:, 1:] for part in parts[1:])], axis=1)


def _links(
    path: Int[Array, "B T levels"], worth: Float[Array, "B T"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T T"]]:
    """Parents and mask of nodes with different paths; those that are worth nothing have neither."""
    there = jnp.isfinite(worth)
    above = (path[:, None] == NO_TOKEN) | (path[:, None] == path[:, :, None])
    mask = above.all(axis=3) & there[:, :, None] & there[:, None]
    # Of a node's ancestors, the last one is its parent.
    node = jnp.arange(path.shape[1], dtype=jnp.int32)
    parents = jnp.where(mask & (node < node[:, None]), node, -1).max(axis=2)
    # Every query must see something.
    return parents, mask | jnp.eye(path.shape[1], dtype=bool)
