"""The draft layer with its first products folded into tables: for decoding on a GPU.

The layer begins from token embeddings alone. What its first product makes of a token, queries, keys
and values, is therefore a row of a table, and so is the token's share of the queries of
cross-attention; the share of self-attention's output is a product that is made beforehand from the
two that stand there, ``cross_q(norm(x + self_out(a)))`` being linear in ``x`` and ``a`` but for the
norm's factor. Of a level's seven products five are left, and fewer small ops between them. Scores
differ by rounding alone, and no token of the output does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.layer.residual_norm import add, residual_norm, rms_factor
from longspec_jax.ops.layer.split_heads import Heads
from longspec_jax.ops.layer.table_heads import table_heads
from longspec_jax.ops.layer.table_query import table_query
from longspec_jax.ops.products.int8 import MOST_ELEMENTS, Int8Rows

TOKENS = 256
"""Of the vocabulary, whose rows of the tables are computed together: common sizes of vocabularies
are multiples of it, and of a remainder XLA copies what is there already."""


@struct.dataclass
class FoldedLayer:
    """What is left of the draft's layer beside tables of the tokens."""

    heads: Int8Rows
    """Of every token ``[V, K, G + 2, H]``: queries, key and value."""
    heads_bias: Leaf[Float[Array, "K G2 H"]]
    """What is added to each token's."""
    queries: Int8Rows
    """Of every token ``[V, N, H]``: cross-attention's queries of its embedding, before the norm's
    factor."""
    queries_bias: Leaf[Float[Array, "N H"]]
    """What is added behind that factor."""
    out: Int8Rows
    """Of self-attention's output: what is added to the stream, and behind it to the queries."""
    cross_out: Int8Rows
    """Of cross-attention's output."""
    mlp_norm: Leaf[Float[Array, " D"]]
    """The norm's weights."""
    gate_up: Int8Rows
    """Rows of the gate, then those of what it gates."""
    down: Int8Rows
    """Back to the model's width."""

    def keys_values(self, tokens: Array, angles: Angles) -> tuple[Array, Array]:
        """Self-attention keys and values of tokens ``[B, T]``, each at an angle of its own."""
        _, keys, values = table_heads(self.heads, self.heads_bias, tokens, angles)
        return keys, values

    def run(
        self,
        config: DraftConfig,
        embedding: Array,
        angles: Angles,
        depth: int,
        tokens: Array,
        attend_self: Callable[..., Array],
        attend_cross: Callable[[Array], Array],
    ) -> Array:
        """Run the layer over tokens that stand at one position.

        Args:
          config: of the draft.
          embedding: the target's embedding table.
          angles: of several positions of every row.
          depth: which of them is the tokens'.
          tokens: ids ``[B, T]``.
          attend_self: as of :class:`~longspec_jax.drafters.longspec.model.LongSpecLayer`.
          attend_cross: the same.

        Returns:
          What the LM head reads, ``[B, T, D]``.
        """
        heads: Heads = table_heads(self.heads, self.heads_bias, tokens, angles, depth)
        summands = self.out.summands(_flat(attend_self(*heads)))
        x, cross_q = table_query(
            self.queries,
            self.queries_bias,
            embedding,
            tokens,
            summands,
            angles,
            depth,
            eps=config.norm_eps,
            kv_heads=config.num_kv_heads,
        )
        attended = self.cross_out.summands(_flat(attend_cross(cross_q)))
        x, normalised = residual_norm(x, attended, self.mlp_norm, config.norm_eps)
        return add(x, self.down.summands(self.gate_up.gated_product(normalised)))


def fold(layer: Mapping[str, Any], embedding: Array, eps: float) -> FoldedLayer:
    """Fold a layer for the tokens of a vocabulary; products and tables are of 8 bits.

    Args:
      layer: parameters of :class:`~longspec_jax.drafters.longspec.model.LongSpecLayer`, as trained.
      embedding: the target's embedding table ``[V, D]``.
      eps: of the layer's norms.

    Raises:
      ValueError: if the kernels could not count a table's elements.
    """
    if not foldable(layer, embedding.shape[0]):
        elements = max(table_bytes(layer, embedding.shape[0]))
        raise ValueError(
            f"the draft cannot be folded: a table would have {elements} elements, and its "
            f"kernels count up to {MOST_ELEMENTS}; leave it whole"
        )
    heads, queries, out = _folded(layer, embedding, eps)
    width = embedding.shape[1]
    return FoldedLayer(
        heads=heads,
        heads_bias=layer["self_qkv"]["fused"]["bias"],
        queries=queries,
        queries_bias=layer["cross_q"]["bias"],
        out=Int8Rows.of(out),
        cross_out=Int8Rows.of(layer["cross_out"]["kernel"].reshape(-1, width).T),
        mlp_norm=layer["mlp_norm"]["scale"],
        gate_up=Int8Rows.of(layer["mlp"]["gate_up"]["kernel"].reshape(width, -1).T),
        down=Int8Rows.of(layer["mlp"]["down"]["kernel"].T),
    )


def table_bytes(layer: Mapping[str, Any], vocabulary: int) -> tuple[int, int]:
    """Bytes of both tables of so many tokens, but for their scales: one for each element."""
    of_heads, of_queries = layer["self_qkv"]["fused"]["bias"], layer["cross_q"]["bias"]
    return vocabulary * of_heads.size, vocabulary * of_queries.size


def foldable(layer: Mapping[str, Any], vocabulary: int) -> bool:
    """Whether the kernels can count the elements of both tables."""
    return max(table_bytes(layer, vocabulary)) <= MOST_ELEMENTS


@partial(jax.jit, static_argnames=("eps",))  # As one program it holds no table in float32.
def _folded(
    layer: Mapping[str, Any], embedding: Array, eps: float
) -> tuple[Int8Rows, Int8Rows, Array]:
    """Both tables, and the rows of the one product that is left of two."""

    def weights(norm: str, kernel: Array) -> Array:
        """Of a product in float32, those of the norm before it in them."""
        factor = layer[norm]["scale"].astype(jnp.float32)
        return factor.reshape(-1, *[1] * (kernel.ndim - 1)) * kernel.astype(jnp.float32)

    qkv = weights("self_norm", layer["self_qkv"]["fused"]["kernel"])
    query = weights("cross_norm", layer["cross_q"]["kernel"])

    def of_token(row: Array) -> tuple[Int8Rows, Int8Rows]:
        x = row.astype(jnp.float32)
        heads = jnp.einsum("d,dkgh->kgh", x * rms_factor(x, eps), qkv)
        return Int8Rows.of(heads), Int8Rows.of(jnp.einsum("d,dnh->nh", x, query))

    heads, queries = jax.lax.map(of_token, embedding, batch_size=TOKENS)
    width = embedding.shape[1]
    out = layer["self_out"]["kernel"].astype(jnp.float32).reshape(-1, width)
    return heads, queries, jnp.concatenate([out, out @ query.reshape(width, -1)], axis=1).T


def _flat(heads: Array) -> Array:
    """Heads ``[B, T, N, H]`` side by side."""
    return heads.reshape(*heads.shape[:2], -1)
