"""Rotated heads of tokens from a table of what a product makes of every token.

As :mod:`longspec_jax.ops.layer.split_heads`, where a table stands for the product. The first layer
of a model that sees nothing but a token's embedding need not multiply when it decodes: a row of a
table is read where its product would read all of its weights (Graef, arXiv:2402.13388). The table
is of 8 bits, each head of each token with a scale of its own.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import decodes_on_ampere
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.layer.split_heads import Heads, part, rotate
from longspec_jax.ops.partitioned import one_device
from longspec_jax.ops.products.int8 import Int8Rows


def table_heads(
    table: Int8Rows,
    bias: Float[Array, "K G2 H"],
    tokens: Int[Array, "B T"],
    angles: Angles,
    place: int | None = None,
) -> Heads:
    """Look up queries, keys and values, and rotate queries and keys.

    Args:
      table: of every token and key/value head its queries, then its key, then its value.
      bias: added to each token's heads, in the dtype of the results.
      tokens: ids; one that is not in the table is the nearest that is.
      angles: of every token's position, ``L = T``, or of several that all tokens may stand at.
      place: where among the angles all tokens of a row stand; token ``t`` stands at the ``t``-th if
        None.

    Returns:
      Rotated queries ``[B, T, N, H]`` and keys ``[B, T, K, H]``, and values ``[B, T, K, H]``.
    """
    if decodes_on_ampere(tokens.size, bias.dtype) and one_device():
        from longspec_jax.ops.layer import table_heads_pallas  # Its backend may be absent.

        return table_heads_pallas.table_heads(table, bias, tokens, angles, place=place)
    return composed(table, bias, tokens, angles, place)


def composed(
    table: Int8Rows, bias: Array, tokens: Array, angles: Angles, place: int | None = None
) -> Heads:
    """The op in plain JAX: its definition, and what runs everywhere but in a GPU's decode step."""
    q, k, v = part(table.take(tokens).widened() + bias.astype(jnp.float32))
    cos_sin = angles.at(place)
    rotated = rotate(q, cos_sin), rotate(k, cos_sin), v
    q, k, v = (heads.astype(bias.dtype) for heads in rotated)
    return q, k, v
