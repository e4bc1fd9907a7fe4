"""The slots a row sees, ``start <= s < length``, as the Triton kernels take them.

Most calls have no lower bound; their kernels get no operand for it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array, Lengths


def operands(length: Lengths, start: Lengths | None) -> list[Array]:
    """The row bounds a kernel takes as its first operands."""
    bounds = [length.astype(jnp.int32)]
    return bounds if start is None else [*bounds, start.astype(jnp.int32)]


def with_optional_start(kernel: Any, start: Lengths | None) -> Any:
    """Give a kernel without a lower bound the reference ``None`` in its place."""
    if start is not None:
        return kernel
    return lambda length_ref, *refs: kernel(length_ref, None, *refs)


def reached_splits(
    length: jax.Array, start: jax.Array | None, *, split: int, slots: int
) -> tuple[jax.Array, jax.Array]:
    """First and one-past-last split that holds a slot a row sees; empty if it sees none."""
    last = (jnp.minimum(length, slots) + split - 1) // split
    if start is None:
        return jnp.zeros_like(last), last
    return jnp.where(start < length, jnp.maximum(start, 0) // split, last), last
