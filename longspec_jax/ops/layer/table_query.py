"""A residual stream and the rotated queries of its norm, where both products are folded.

Between two attentions of a layer stand an output product, a residual sum, a norm and the product
that makes the next queries. Up to the norm's factor, one number for each token, all of it is
linear: of the first attention's output, by a product that is made beforehand, and of the token's
embedding, by a table (:mod:`longspec_jax.ops.layer.table_heads`). So both products are one, and
what is left is done here.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array, Queries
from longspec_jax.ops.hardware import decodes_on_ampere
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.layer.residual_norm import MAX_WIDTH, rms_factor
from longspec_jax.ops.layer.split_heads import rotate
from longspec_jax.ops.partitioned import one_device
from longspec_jax.ops.products.int8 import Int8Rows


def table_query(
    table: Int8Rows,
    bias: Float[Array, "N H"],
    embedding: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    summands: Float[Array, "S B T both"],
    angles: Angles,
    place: int,
    *,
    eps: float,
    kv_heads: int,
) -> tuple[Float[Array, "B T D"], Queries]:
    """Add an attention's output to the embeddings, and make the queries of the sum's norm.

    Args:
      table: the queries of every token's embedding, but for the norm's factor and the bias.
      bias: of the queries.
      embedding: of every token.
      tokens: ids; one that is not in the table is the nearest that is.
      summands: arrays whose sum is, of each token, what is added to its embedding (``D``), and then
        to its queries (``N * H``).
      angles: cosines and sines of several positions.
      place: where among them all tokens stand.
      eps: added to the mean square of the stream.
      kv_heads: in whose order the queries are written.

    Returns:
      The stream, and the queries, rotated, both in the dtype of the embedding.
    """
    width = embedding.shape[1]
    if decodes_on_ampere(tokens.size, embedding.dtype) and one_device() and width <= MAX_WIDTH:
        from longspec_jax.ops.layer import table_query_pallas  # Its backend may be absent.

        call = table_query_pallas.table_query
    else:
        call = composed
    return call(
        table, bias, embedding, tokens, summands, angles, place=place, eps=eps, kv_heads=kv_heads
    )


def composed(
    table: Int8Rows,
    bias: Array,
    embedding: Array,
    tokens: Array,
    summands: Array,
    angles: Angles,
    *,
    place: int,
    eps: float,
    kv_heads: int,
) -> tuple[Array, Array]:
    """The op in plain JAX: its definition, and what runs everywhere but in a GPU's decode step."""
    del kv_heads  # The order is the compiler's here.
    added = summands.astype(jnp.float32).sum(axis=0)
    delta, query = jnp.split(added, [embedding.shape[1]], axis=-1)
    embedded = jnp.take(embedding, tokens, axis=0, mode="clip").astype(jnp.float32)
    total = (embedded + delta).astype(embedding.dtype)
    factor = rms_factor(total.astype(jnp.float32), eps)
    heads = table.take(tokens).widened()
    heads = (heads + query.reshape(heads.shape)) * factor[..., None] + bias.astype(jnp.float32)
    return total, rotate(heads, angles.at(place)).astype(embedding.dtype)
