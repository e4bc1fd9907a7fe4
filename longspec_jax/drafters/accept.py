"""Verification: the target's own draws walk the draft tree.

At every node the target has drawn the next token. Starting at the root, the walk follows the child
that carries the drawn token and stops at the first node without one, whose draw is the bonus token.
There is no accept ratio and no residual distribution: every emitted token is the target's own draw
at its position, so the output is that of plain decoding whatever the draft proposed.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Int

from longspec_jax.axes import Array
from longspec_jax.drafters.tree import Tree


class AcceptedPath(NamedTuple):
    """The accepted path of every row, in a static height of levels + 1."""

    path: Int[Array, "B h"]
    """Tree nodes on the path, root first; entries beyond the count repeat the last node."""
    tokens: Int[Array, "B h"]
    """The target's draw at each node of the path: accepted tokens, then the bonus."""
    # Shadows tuple.count on purpose.
    count: Int[Array, " B"]  # pyright: ignore[reportIncompatibleMethodOverride]
    """Tokens emitted, bonus included: 1 to levels + 1."""


AcceptRule: TypeAlias = Callable[[Tree, Array, int], AcceptedPath]
"""``(tree, draws[B, T], levels) -> path``: the type of :func:`accept`."""


def accept(tree: Tree, draws: Int[Array, "B T"], levels: int) -> AcceptedPath:
    """Follow the target's draws down the tree.

    Args:
      tree: candidates below each row's pending token.
      draws: the target's draw at every node.
      levels: levels of the tree below its root.
    """
    batch = draws.shape[0]
    node = jnp.zeros((batch,), jnp.int32)
    alive = jnp.ones((batch,), bool)
    count = jnp.ones((batch,), jnp.int32)
    path = [node]
    for _ in range(levels):
        drawn = jnp.take_along_axis(draws, node[:, None], axis=1)
        child = (tree.parents == node[:, None]) & (tree.tokens == drawn)
        alive &= child.any(axis=1)
        node = jnp.where(alive, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        count += alive
        path.append(node)
    nodes = jnp.stack(path, axis=1)
    return AcceptedPath(nodes, jnp.take_along_axis(draws, nodes, axis=1), count)


def accept_trusted(
    tree: Tree, draws: Int[Array, "B T"], levels: int, *, trusted: int
) -> AcceptedPath:
    """All of a chain, whatever the target drew, and from there on its draws: *not* lossless.

    SpecPV's (arXiv:2512.02337, section 3.3): what was verified in part is emitted, and the full
    pass repairs its keys and values alone.

    Args:
      tree: a chain, maybe with a tree at its end.
      draws: the target's draw at every node.
      levels: of the tree.
      trusted: of the chain.
    """
    offered = tree.parents[:, 1 : trusted + 1] >= 0
    taken = jnp.where(offered, tree.tokens[:, 1 : trusted + 1], draws[:, :trusted])
    return accept(tree, jnp.concatenate([taken, draws[:, trusted:]], axis=1), levels)
