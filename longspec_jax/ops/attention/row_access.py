"""Reading and writing packed query rows inside of the Triton kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.ops.attention.packing import PackedShape

Head = tuple[jax.Array, jax.Array]
"""A batch row and one of its key/value heads."""

Rows = tuple[jax.Array, jax.Array]
"""Numbers of some packed rows, and which of them there are."""


def load_queries(
    q_ref: Any, head: Head, first: jax.Array, counts: tuple[int, ...], shape: PackedShape
) -> tuple[list[jax.Array], list[Rows]]:
    """The packed queries of a key/value head from row ``first`` on, in parts of ``counts``.

    Returns:
      For each part its queries, ``[R, H]`` with ``H`` a power of two, zero where there are none;
      and its rows.
    """
    width = q_ref.shape[3]
    h = jnp.arange(pl.next_power_of_2(width))
    queries, parts = [], []
    for count in counts:
        packed = first + jnp.arange(count)
        valid = packed < shape.packed
        mask = valid[:, None] & (h < width)[None, :]
        source = q_ref.at[*head, packed[:, None], h[None, :]]
        queries.append(pltriton.load(source, mask=mask, other=0.0))
        parts.append((packed, valid))
        first += count
    return queries, parts


def store_rows(
    out_ref: Any,
    lse_ref: Any,
    place: tuple[jax.Array | int, ...],
    rows: Rows,
    found: tuple[jax.Array, jax.Array],
) -> None:
    """Write the output and log-sum-exp of the rows that there are, at ``[*place, row]``."""
    (row, valid), (out, lse) = rows, found
    h = jnp.arange(out.shape[1])
    mask = valid[:, None] & (h < out_ref.shape[-1])[None, :]
    out = out.astype(out_ref.dtype)
    pltriton.store(out_ref.at[*place, row[:, None], h[None, :]], out, mask=mask)
    pltriton.store(lse_ref.at[*place, row], lse, mask=valid)
