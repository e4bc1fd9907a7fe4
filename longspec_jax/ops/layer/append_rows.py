"""Appending accepted rows to the caches of all layers as one op.

A layer at a time these are two small kernels per layer, whose launches cost more than the rows they
move: 2 % of a decode step over one token.
"""

from collections.abc import Sequence

import jax
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths, TreeRows
from longspec_jax.ops.hardware import decodes_on_ampere


def append_rows(
    caches: Sequence[CacheSlots],
    fresh: Sequence[TreeRows],
    path: Int[Array, "B h"],
    length: Lengths,
) -> tuple[CacheSlots, ...]:
    """Write fresh rows ``path[b]`` at slots ``length[b] ... length[b] + h - 1`` of every cache.

    Args:
      caches: keys or values of the layers, all of one shape; updated in place where they may be.
      fresh: the layers' fresh rows.
      path: the rows to append, in order.
      length: where; the caller guarantees ``length + h <= S``.
    """
    if decodes_on_ampere(path.size, caches[0].dtype):
        from longspec_jax.ops.layer import append_rows_pallas  # Its backend may be absent.

        return append_rows_pallas.append_rows(caches, fresh, path, length)
    return composed(caches, fresh, path, length)


def composed(
    caches: Sequence[CacheSlots],
    fresh: Sequence[TreeRows],
    path: Int[Array, "B h"],
    length: Lengths,
) -> tuple[CacheSlots, ...]:
    """The op in plain JAX: its definition, and what runs everywhere but in a GPU's decode step."""

    def write_row(slots: Array, fresh: Array, path: Array, at: Array) -> Array:
        rows = fresh[path].swapaxes(0, 1)
        return jax.lax.dynamic_update_slice_in_dim(slots, rows, at, axis=1)

    def write(slots: Array, fresh: Array) -> Array:
        if slots.shape[0] == 1:  # A plain slice update; vmap would turn it into a scatter.
            return write_row(slots[0], fresh[0], path[0], length[0])[None]
        return jax.vmap(write_row)(slots, fresh, path, length)

    return tuple(map(write, caches, fresh))
