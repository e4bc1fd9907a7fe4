"""Arrays and memory: what a program's arrays take, in which memory they lie, and moving them.

An array's type says which memory it lies in, and operations on arrays of several memories are
refused while a program is traced.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

HOST_MEMORY = "pinned_host"
"""What jax calls the host's memory that a device reads directly."""

Tree = TypeVar("Tree")


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def free_device_bytes(devices: Sequence[Any]) -> int | None:
    """Bytes that each of some devices of this process can still allocate.

    None where one does not say, as a CPU.
    """
    known = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in stats for stats in known):
        return None
    return min(stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in known)


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
