"""EAGLE-1, EAGLE-2 and multi-token prediction: layers over the target's last hidden state.

The target's hidden state of a token, behind the final norm, and the embedding of the token behind
it are projected to one vector of the model's width, which a layer reads. The target's own LM head
makes logits of its output. The output stands in for the hidden state that only the target knows, so
the next level of a tree goes on from it. The drafter is EAGLE-3's.

- EAGLE (arXiv 2401.15077, section 3): no norm before the attention, and none behind the layer. Both
  papers train the same weights; EAGLE-2's tree, the best paths under a budget, is the one that all
  drafters here grow.
- MTP (arXiv 2412.19437, section 2.2; arXiv 2509.18362): the two inputs are normed, each by itself.
  A layer like the target's own reads them, and a norm of its own precedes the LM head. One layer
  serves all levels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array
from longspec_jax.config.target import TargetConfig
from longspec_jax.drafters.eagle3 import Eagle3Config, Eagle3Options, Eagle3Params, LevelOutput
from longspec_jax.drafters.tables import check_sizes
from longspec_jax.models.layers import GroupedQKV, Projection, RMSNorm, SwiGLU
from longspec_jax.models.target import HEADS
from longspec_jax.ops.layer import add, split_heads
from longspec_jax.ops.partitioned import with_sharding


@dataclass(frozen=True)
class EagleConfig(Eagle3Config):
    """Shape of an EAGLE-1 or 2 draft; ``features`` holds what leaves the target's final norm."""

    fuse_bias: bool = True
    """Whether the projection of embedding and hidden state has a bias."""

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's hidden states and tokens."""
        check_sizes(self.target_width, self.vocab_size, target)


class EagleLayer(nn.Module):
    """The draft as pure functions of hidden states and embeddings; attention is the caller's.

    Arguments and results as of :class:`longspec_jax.drafters.eagle3.Eagle3Layer`.
    """

    config: EagleConfig

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.fuse = Projection((2 * c.model_width,), (c.model_width,), dtype, c.fuse_bias)
        self.self_qkv = GroupedQKV(
            c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=c.qkv_bias,
        )
        self.self_out = Projection((c.num_heads, c.head_width), (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype)

    def fused(self, hidden: Sequence[Array]) -> Array:
        """The hidden state itself."""
        [feature] = hidden
        return feature

    def keys_values(self, embedded: Array, feature: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values ``[B, T, K, H]`` of tokens."""
        _, k, v = self._heads(self._joined(embedded, feature), positions)
        return k, v

    def __call__(
        self,
        embedded: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """Run the layer over ``T`` tokens."""
        joined = self._joined(embedded, feature)
        attended = self.self_out.partials(attend(*self._heads(joined, positions)))
        x, normed = with_sharding("b t d, b t d", *self.mlp_norm.add(joined, attended))
        out = self._left(x, self.mlp(normed))
        return LevelOutput(out, out)

    def _left(self, x: Array, delta: Array) -> Array:
        """What leaves the layer, of the residual stream and the partials of its last increment."""
        [out] = with_sharding("b t d", add(x, delta))
        return out

    def _joined(self, embedded: Array, feature: Array) -> Array:
        both = jnp.concatenate([embedded, feature], axis=-1)
        [joined] = with_sharding("b t d", self.fuse(both))
        return joined

    def _heads(self, joined: Array, positions: Array) -> tuple[Array, Array, Array]:
        c = self.config
        heads = split_heads(self.self_qkv(joined), *c.angles(positions), None, c.norm_eps)
        q, k, v = with_sharding(HEADS, *heads)
        return q, k, v


@struct.dataclass
class EagleParams(Eagle3Params):
    """The draft's layer and its tables; the LM head is the target's."""

    module = EagleLayer


@dataclass(frozen=True)
class MtpConfig(EagleConfig):
    """Shape of an MTP layer; ``features`` holds what leaves the target's final norm."""

    hidden_first: bool = False
    """Whether the projection reads the hidden state before the embedding."""


class MtpLayer(EagleLayer):
    """The layer as pure functions of hidden states and embeddings; attention is the caller's."""

    config: Any

    def setup(self) -> None:
        """Declare the submodules."""
        super().setup()
        norm = partial(RMSNorm, self.config.norm_eps, jnp.dtype(self.config.dtype))
        self.embedding_norm, self.hidden_norm, self.attention_norm = norm(), norm(), norm()
        self.output_norm = norm()
        if self.config.qk_norm:
            self.q_norm, self.k_norm = norm(), norm()

    def _joined(self, embedded: Array, feature: Array) -> Array:
        parts = self.embedding_norm(embedded), self.hidden_norm(feature)
        return super()._joined(*(parts[::-1] if self.config.hidden_first else parts))

    def _heads(self, joined: Array, positions: Array) -> tuple[Array, Array, Array]:
        c, scales = self.config, None
        if c.qk_norm:
            scales = self.q_norm.weights(c.head_width), self.k_norm.weights(c.head_width)
        qkv = self.self_qkv(self.attention_norm(joined))
        q, k, v = with_sharding(HEADS, *split_heads(qkv, *c.angles(positions), scales, c.norm_eps))
        return q, k, v

    def _left(self, x: Array, delta: Array) -> Array:
        [out] = with_sharding("b t d", self.output_norm.add(x, delta)[1])
        return out


@struct.dataclass
class MtpParams(EagleParams):
    """The layer and the target's tables."""

    module = MtpLayer


@dataclass(frozen=True)
class EagleOptions(Eagle3Options):
    """Options of an EAGLE-1 or 2 draft, or of an MTP layer; none changes a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            raise ValueError(
                f"layers={self.layers!r}: an EAGLE-1 or 2 draft reads the last hidden state; leave "
                "layers out"
            )
