"""Arrays and memory: what a program's arrays take, in which memory they lie, and moving them.

An array's type says which memory it lies in, and operations on arrays of several memories are
refused while a program is traced.
"""

from typing import TypeVar

import jax
from jaxtyping import PyTree

HOST_MEMORY = "pinned_host"
"""What jax calls the host's memory that a device reads directly."""

Tree = TypeVar("Tree")


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def on_host(array: jax.Array) -> bool:
    """Whether an array lies in the host's memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_device(tree: Tree) -> Tree:
    """Arrays on the device; those that lie there stay."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if on_host(leaf) else leaf, tree
    )


def to_host(array: jax.Array) -> jax.Array:
    """An array in the host's memory."""
    return jax.device_put(array, jax.memory.Space.Host)
