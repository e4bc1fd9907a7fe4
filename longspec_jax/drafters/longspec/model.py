"""The LongSpec draft's layer and its parameters.

The layer (LongSpec section 3.1): ``x += self_attention(norm(x)); x += cross_attention(norm(x));
x += mlp(norm(x))``, on the target's token embeddings, read by the target's LM head without a final
norm. Self-attention comes first, so its keys and values depend on (token, position) alone.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.tables import TableParams
from longspec_jax.models.layers import GroupedQKV, Projection, RMSNorm, SwiGLU, rotary_angles
from longspec_jax.models.target import HEADS, scaled
from longspec_jax.ops.layer import add, rotate, split_heads
from longspec_jax.ops.matmul.quantised_weights import QuantisedWeights
from longspec_jax.ops.partitioned import with_sharding


class DraftOutput(NamedTuple):
    """What one forward of the draft over ``T`` tokens yields."""

    hidden: Array
    """``[B, T, D]``; the target's LM head turns it into logits."""
    keys: Array
    """Self-attention keys ``[B, T, K, H]``, rotary applied."""
    values: Array
    """Self-attention values ``[B, T, K, H]``."""


class LongSpecLayer(nn.Module):
    """The draft layer as a pure function of embeddings; attention patterns are the caller's."""

    config: DraftConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0 for all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        heads = (c.num_heads, c.head_width)
        self.self_norm = RMSNorm(c.norm_eps, dtype)
        self.self_qkv = GroupedQKV(
            c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=True,
        )
        self.self_out = Projection(heads, (c.model_width,), dtype)
        self.cross_norm = RMSNorm(c.norm_eps, dtype)
        self.cross_q = Projection((c.model_width,), heads, dtype, bias=True)
        self.cross_out = Projection(heads, (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype, chunk=self.mlp_chunk)

    def __call__(
        self,
        embedded: Array,
        positions: Array,
        attend_self: Callable[[Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> DraftOutput:
        """Run the layer over ``T`` tokens.

        Args:
          embedded: the target's token embeddings ``[B, T, D]``.
          positions: rotary positions ``[B, T]``, the target's own.
          attend_self: ``(q, k, v) -> out`` over the window and the path to each token.
          attend_cross: ``q -> out`` over keys and values of the target.
        """
        angles = _angles(self.config, positions)
        embedded = scaled(embedded, self.config.embedding_factor)
        q, k, v = with_sharding(
            HEADS, *split_heads(self.self_qkv(self.self_norm(embedded)), *angles)
        )
        attended = self.self_out.partials(attend_self(q, k, v))
        x, normalised = with_sharding("b t d, b t d", *self.cross_norm.add(embedded, attended))
        cross_q, *_ = with_sharding(HEADS, rotate(self.cross_q(normalised), angles), k, v)
        attended = self.cross_out.partials(attend_cross(cross_q))
        x, normalised = with_sharding("b t d, b t d", *self.mlp_norm.add(x, attended))
        [hidden] = with_sharding("b t d", add(x, self.mlp(normalised)))
        return DraftOutput(scaled(hidden, 1 / self.config.logits_divisor), k, v)

    def keys_values(self, embedded: Array, positions: Array) -> tuple[Array, Array]:
        """Self-attention keys and values of tokens, which depend on (token, position) alone."""
        angles = _angles(self.config, positions)
        embedded = scaled(embedded, self.config.embedding_factor)
        _, k, v = split_heads(self.self_qkv(self.self_norm(embedded)), *angles)
        return k, v


@struct.dataclass
class LongSpecParams(TableParams):
    """The draft's own parameters and the two tables it shares with the target."""

    module = LongSpecLayer

    def restricted(self, vocabulary: Int[Array, " v"]) -> "LongSpecParams":
        """Propose only these tokens, the most frequent ones: a cheaper LM head at every level.

        Verification stays over the whole vocabulary, so the output is unchanged. Call it before
        :meth:`in_int8`.
        """
        if isinstance(self.head, QuantisedWeights):
            raise ValueError("the draft is in 8 bits already; restrict it before in_int8")
        rows = jnp.take(self.head, vocabulary, axis=0)
        return dataclasses.replace(self, head=rows, vocabulary=vocabulary, own_head=True)

    @property
    def proposable(self) -> int:
        """How many tokens it may propose."""
        head = self.head
        return head.out_axes[0] if isinstance(head, QuantisedWeights) else head.shape[0]

    def keys_values(
        self, config: DraftConfig, tokens: Array, positions: Array
    ) -> tuple[Array, Array]:
        """Self-attention keys and values of tokens ``[B, T]`` at positions ``[B, T]``."""
        return self._apply(config, self.embedded(tokens), positions, method="keys_values")

    def hidden(
        self,
        config: DraftConfig,
        tokens: Array,
        positions: Array,
        attend_self: Callable[[Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> Array:
        """What the LM head reads of tokens ``[B, T]``, ``[B, T, D]``."""
        embedded = self.embedded(tokens)
        return self._apply(config, embedded, positions, attend_self, attend_cross).hidden


def _angles(config: DraftConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines at positions ``[B, T]``."""
    return rotary_angles(positions, config.head_width, config.rotary)
