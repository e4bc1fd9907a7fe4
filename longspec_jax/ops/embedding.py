"""Rows of an embedding table, whose vocabulary a mesh may cut."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.partitioned import partitioned, table_shares


def look_up(
    table: Float[Array, "V D"], tokens: Int[Array | np.ndarray, "B T"]
) -> Float[Array, "B T D"]:
    """The rows of the tokens. The table has all of them.

    Where a mesh cuts the vocabulary, every device reads the rows that its share has, and zeros of
    all other devices are added. Left to itself XLA gathers the table for a single token: on a GPU
    it makes a slice of such a lookup before it cuts the program up.
    """
    if table_shares(len(table)) == 1:
        return jnp.take(table, tokens, axis=0)
    held = jnp.arange(len(table), dtype=tokens.dtype)
    return _held_rows(held, table, tokens).sum(axis=0, dtype=table.dtype)


@partitioned("v, v d, b t -> v b t d")
def _held_rows(held: Array, table: Array, tokens: Array | np.ndarray) -> Array:
    """``[1, B, T, D]``: rows of the tokens ``held``, which are consecutive; 0 for others."""
    rows = tokens - held[0]
    present = (rows >= 0) & (rows < len(table))
    found = jnp.take(table, jnp.where(present, rows, 0), axis=0)
    return jnp.where(present[..., None], found, 0)[None]
