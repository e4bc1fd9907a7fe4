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
from longspec_jax.drafters.tree import Tree, best_nodes, tree_paths

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
    first = jnp.argmax(same, axis=2) == jnp.arange(path.shape[1])
    worths, begin = [], 0
    for tree in trees:
        # What each tree offers at every path, wherever it lies in it.
        end = begin + tree.tokens.shape[1] - bool(begin)
        own = jnp.where(same[:, :, begin:end], total[:, None, begin:end], -jnp.inf)
        worths.append(own.max(axis=2))
        begin = end
    worth = jnp.where(first & there, _most(worths), -jnp.inf)
    bits = zip(offered, worths, strict=True)
    sources = sum(jnp.isfinite(each).astype(jnp.int32) << index for index, each in bits)
    if nodes > path.shape[1]:
        missing = nodes - path.shape[1]
        path = jnp.pad(path, ((0, 0), (0, missing), (0, 0)), constant_values=NO_TOKEN)
        worth = jnp.pad(worth, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        tokens, sources = (jnp.pad(each, ((0, 0), (0, missing))) for each in (tokens, sources))
    best = best_nodes(worth, nodes)
    of_best = partial(jnp.take_along_axis, indices=best, axis=1)
    worth = of_best(worth)
    sources = jnp.where(jnp.isfinite(worth), of_best(sources), 0)
    parents, mask = _links(jnp.take_along_axis(path, best[:, :, None], axis=1), worth)
    return Tree(of_best(tokens), parents, mask, worth, sources)


def _together(parts: Sequence[Array]) -> Array:
    """The nodes of all trees, which have one root."""
    return jnp.concatenate([parts[0], *(part[:, 1:] for part in parts[1:])], axis=1)


def _most(worths: Sequence[Float[Array, "B T"]]) -> Float[Array, "B T"]:
    """What paths are worth that several trees may offer: as much as the tree that trusts most."""
    return jnp.stack(worths).max(axis=0)


def _links(
    path: Int[Array, "B T levels"], worth: Float[Array, "B T"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T T"]]:
    """Parents and mask of nodes with different paths; those that are worth nothing have neither."""
    there = jnp.isfinite(worth)
    depth = (path != NO_TOKEN).sum(axis=2)
    above = (path[:, None] == NO_TOKEN) | (path[:, None] == path[:, :, None])
    mask = above.all(axis=3) & there[:, :, None] & there[:, None]
    parent = mask & (depth[:, None] + 1 == depth[:, :, None])
    parents = jnp.where(parent.any(axis=2), jnp.argmax(parent, axis=2), -1)
    # Every query must see something.
    return parents.astype(jnp.int32), mask | jnp.eye(path.shape[1], dtype=bool)
