"""The order in which a program computes the nodes of a tree, with one state at hand.

Depth first: a node comes right after its parent, whose state is at hand but for what the parent
itself writes; or after a sibling, with the same state; or the state is made anew, from the one
before the root, of what the ancestors wrote. So a chain makes nothing anew, nor do leaves side by
side.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.slicing import along

CHILD, SIBLING, ANEW = 0, 1, 2
"""How a node comes to the state of its parent."""


@struct.dataclass
class Visits:
    """The nodes of each row's tree, whose number of levels is ``L - 1``."""

    path: Leaf[Int[Array, "B T L"]]
    """The ancestors of a node from the root on, itself included; nodes of no meaning after it."""
    count: Leaf[Int[Array, "B T"]]
    """Ancestors of a node, itself included."""
    order: Leaf[Int[Array, "B T"]]
    """The nodes in the order in which they are computed."""
    link: Leaf[Int[Array, "B T"]]
    """How the node in this place of the order comes to its state."""


@partial(jax.jit, static_argnames="levels")
def visits(mask: Bool[Array, "B T T"], levels: int) -> Visits:
    """The visits of trees.

    Args:
      mask: which nodes are a node or its ancestors; a node comes after its ancestors.
      levels: most ancestors of a node.
    """
    rows, nodes, _ = mask.shape
    if nodes == 1:
        none = jnp.zeros((rows, 1), jnp.int32)
        return Visits(none[..., None], none + 1, none, none + ANEW)
    height, node = levels + 1, jnp.arange(nodes, dtype=jnp.int32)
    count = mask.sum(axis=2, dtype=jnp.int32)
    ancestor = jnp.cumsum(mask, axis=2, dtype=jnp.int32)
    at = mask[..., None] & (ancestor[..., None] == jnp.arange(1, height + 1))
    path = jnp.where(at, node[:, None], 0).sum(axis=2, dtype=jnp.int32)
    # Of two nodes the one comes first whose ancestor is, where their paths part; or the ancestor.
    shared = (mask[:, :, None] & mask[:, None]).sum(axis=3, dtype=jnp.int32)
    parted = jnp.arange(height) == shared[..., None]
    of_one, of_other = (
        jnp.where(parted, each, 0).sum(axis=3) for each in (path[:, :, None], path[:, None])
    )
    ends = shared == count[:, :, None], shared == count[:, None]
    before = ~ends[1] & (ends[0] | (of_one < of_other))
    rank = before.sum(axis=1, dtype=jnp.int32)
    order = jnp.argmax(rank[:, None] == node[:, None], axis=2).astype(jnp.int32)
    counts, last = along(order, count), order[:, :-1]
    both = along(last * nodes + order[:, 1:], shared.reshape(rows, -1))
    beside = (counts[:, :-1] == counts[:, 1:]) & (both == counts[:, 1:] - 1)
    link = jnp.where(both == counts[:, :-1], CHILD, jnp.where(beside, SIBLING, ANEW))
    return Visits(path, count, order, jnp.pad(link, ((0, 0), (1, 0)), constant_values=ANEW))
