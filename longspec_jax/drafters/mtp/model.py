"""The layer of multi-token prediction (MTP); the drafter is EAGLE-3's.

The target's hidden state of a token, behind the final norm, and the embedding of the token behind
it are normed, each by itself, and projected to one vector of the model's width. A layer like the
target's own reads it, and a norm of its own precedes the target's LM head (arXiv 2412.19437,
section 2.2; arXiv 2509.18362). The normed output stands in for the hidden state that only the
target knows, so one layer serves all levels of a tree.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array
from longspec_jax.drafters.eagle.model import EagleConfig, EagleLayer, EagleParams
from longspec_jax.models.layers import RMSNorm
from longspec_jax.models.target import HEADS
from longspec_jax.ops.layer import split_heads
from longspec_jax.ops.partitioned import with_sharding


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
