"""The EAGLE-3 draft's layer and its parameters.

Hidden states of several layers of the target are fused to one feature of the draft's width. The
layer reads a token's embedding beside the feature of the token before it; attention takes both,
twice as wide as the model. Its output stands in for the feature of the token itself, which only the
target knows: so the next level of a tree goes on from it.

Keys and values of a committed token depend on (feature, token, position) alone, because there is
one layer. So a prompt costs one matmul a token, and a window of the last entries is exact.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array
from longspec_jax.drafters.eagle3.config import Eagle3Config
from longspec_jax.drafters.tables import TableParams
from longspec_jax.models.layers import GroupedQKV, Projection, RMSNorm, SwiGLU
from longspec_jax.models.target import HEADS
from longspec_jax.ops.layer import add, split_heads
from longspec_jax.ops.partitioned import with_sharding


class LevelOutput(NamedTuple):
    """What one forward over the nodes of a level yields."""

    hidden: Array
    """``[B, T, D]``; the draft's LM head turns it into logits."""
    feedback: Array
    """``[B, T, D]``; what the children of these nodes take as their feature."""


class Eagle3Layer(nn.Module):
    """The draft as pure functions of features and embeddings; attention is the caller's."""

    config: Eagle3Config
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        fused = len(c.features) * c.target_width
        self.fuse = Projection((fused,), (c.model_width,), dtype)
        if c.norm_before_fuse:
            self.fuse_norm = RMSNorm(c.norm_eps, dtype)
        if c.feature_norms:
            self.feature_norms = [RMSNorm(c.norm_eps, dtype) for _ in c.features]
        self.embedding_norm = RMSNorm(c.norm_eps, dtype)
        self.hidden_norm = RMSNorm(c.norm_eps, dtype)
        self.self_qkv = GroupedQKV(
            2 * c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=c.qkv_bias,
        )
        if c.qk_norm:
            self.q_norm = RMSNorm(c.norm_eps, dtype)
            self.k_norm = RMSNorm(c.norm_eps, dtype)
        self.self_out = Projection((c.num_heads, c.head_width), (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype, chunk=self.mlp_chunk)
        if c.normed_head or c.normed_feedback:
            self.final_norm = RMSNorm(c.norm_eps, dtype)

    def fused(self, hidden: Sequence[Array]) -> Array:
        """One feature ``[B, n, D]`` of each token, of the target's states at ``config.features``.

        Args:
          hidden: ``[B, n, target_width]`` each.
        """
        if self.config.feature_norms:
            pairs = zip(self.feature_norms, hidden, strict=True)
            hidden = [norm(state) for norm, state in pairs]
        together = jnp.concatenate(hidden, axis=-1)
        if self.config.norm_before_fuse:
            together = self.fuse_norm(together)
        [feature] = with_sharding("b t d", self.fuse(together))
        return feature

    def keys_values(self, embedded: Array, feature: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values ``[B, T, K, H]`` of tokens; arguments as of :meth:`__call__`."""
        _, k, v = self._heads(embedded, self.hidden_norm(feature), positions)
        return k, v

    def __call__(
        self,
        embedded: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """Run the layer over ``T`` tokens.

        Args:
          embedded: their embeddings ``[B, T, D]``.
          feature: of the token before each, ``[B, T, D]``.
          positions: of the token before each, ``[B, T]``.
          attend: ``(q, k, v) -> out`` over what each token sees.
        """
        c, normed = self.config, self.hidden_norm(feature)
        q, k, v = self._heads(embedded, normed, positions)
        residual = normed if c.norm_before_residual else feature
        x, normalised = with_sharding(
            "b t d, b t d", *self.mlp_norm.add(residual, self.self_out.partials(attend(q, k, v)))
        )
        delta = self.mlp(normalised)
        if not (c.normed_head or c.normed_feedback):
            [out] = with_sharding("b t d", add(x, delta))
            return LevelOutput(out, out)
        out, normed = with_sharding("b t d, b t d", *self.final_norm.add(x, delta))
        return LevelOutput(normed if c.normed_head else out, normed if c.normed_feedback else out)

    def _heads(
        self, embedded: Array, normed: Array, positions: Array
    ) -> tuple[Array, Array, Array]:
        c, scales = self.config, None
        if c.qk_norm:
            scales = self.q_norm.weights(c.head_width), self.k_norm.weights(c.head_width)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        heads = split_heads(self.self_qkv(both), *c.angles(positions), scales, c.norm_eps)
        q, k, v = with_sharding(HEADS, *heads)
        return q, k, v


@struct.dataclass
class Eagle3Params(TableParams):
    """The draft's layer and its tables, of which some may be the target's."""

    module = Eagle3Layer

    def fused(self, config: Eagle3Config, hidden: Sequence[Array]) -> Array:
        """As of :meth:`Eagle3Layer.fused`."""
        return self._apply(config, hidden, method="fused")

    def keys_values(
        self, config: Eagle3Config, tokens: Array, feature: Array, positions: Array
    ) -> tuple[Array, Array]:
        """Keys and values of tokens ``[B, T]``; arguments as of :class:`Eagle3Layer`."""
        embedded = self.embedded(tokens)
        return self._apply(config, embedded, feature, positions, method="keys_values")

    def level(
        self,
        config: Eagle3Config,
        tokens: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """The layer over tokens ``[B, T]``; arguments as of :class:`Eagle3Layer`."""
        return self._apply(config, self.embedded(tokens), feature, positions, attend)
