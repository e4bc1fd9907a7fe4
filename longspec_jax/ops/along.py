"""What a feature of many tokens is at some of them, in every batch row at others."""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from longspec_jax.axes import Array


def along(path: Int[Array, "B h ..."], feature: Array) -> Array:
    """A feature ``[B, T, ...]`` of the tokens, or tree nodes, on a path."""
    return jax.vmap(lambda nodes, row: row[nodes])(path, feature)


def last_along(feature: Array, count: Int[Array, " B"]) -> Array:
    """Of ``[B, T, ...]`` the last row of those that count; the first where none does."""
    return along(jnp.maximum(count - 1, 0)[:, None], feature)[:, 0]
