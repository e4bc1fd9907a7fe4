"""The layers of a DFlash draft, its parameters, and the Markov head of a DSpark draft.

Hidden states of several layers of the target are fused to one feature a token (arXiv:2602.06036).
Every layer makes keys and values of it with the weights that serve the block's own tokens, so the
committed tokens are context for all layers without passing through any. Their entries depend on
(feature, position) alone.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array
from longspec_jax.drafters.dflash.config import DFlashConfig, Markov
from longspec_jax.drafters.tables import BlockParams
from longspec_jax.drafters.window import Rows
from longspec_jax.models.layers import Projection, RMSNorm, rotary_angles
from longspec_jax.models.target import HEADS, Attend, Layer, stored_logits
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.layer import split_heads
from longspec_jax.ops.partitioned import with_sharding


class DFlashLayers(nn.Module):
    """The draft as pure functions of features and embeddings; attention is the caller's."""

    config: DFlashConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0 for all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config.trunk, jnp.dtype(self.config.trunk.dtype)
        fused = len(self.config.features) * self.config.target_width
        self.fuse = Projection((fused,), (c.model_width,), dtype)
        self.hidden_norm = RMSNorm(c.norm_eps, dtype)
        self.layers = [Layer(c, self.mlp_chunk) for _ in range(c.num_layers)]
        self.final_norm = RMSNorm(c.norm_eps, dtype)

    def keys_values(self, hidden: Sequence[Array], positions: Array) -> tuple[Rows, ...]:
        """Keys and values ``[B, n, K, H]`` of committed tokens, for every layer.

        Args:
          hidden: the target's states at ``config.features``, ``[B, n, target_width]`` each.
          positions: of the tokens, ``[B, n]``.
        """
        c, angles = self.config.trunk, self._angles(positions)
        [fused] = with_sharding("b t d", self.fuse(jnp.concatenate(hidden, axis=-1)))
        feature = self.hidden_norm(fused)
        rows = []
        for layer in self.layers:
            attention, scales = layer.attention, None
            if c.qk_norm:
                norms = attention.q_norm, attention.k_norm
                scales = norms[0].weights(c.head_width), norms[1].weights(c.head_width)
            heads = split_heads(attention.qkv(feature), *angles, scales, c.norm_eps)
            _, k, v = with_sharding(HEADS, *heads)
            rows.append((k, v))
        return tuple(rows)

    def __call__(self, embedded: Array, positions: Array, attend: Attend) -> Array:
        """Run the layers over a block; returns what the LM head reads, ``[B, T, D]``.

        Args:
          embedded: embeddings of the block's tokens ``[B, T, D]``.
          positions: theirs, ``[B, T]``.
          attend: ``(layer, q, k, v) -> out`` over what the slots see.
        """
        x, delta, angles = embedded, None, self._angles(positions)
        for index, layer in enumerate(self.layers):
            x, delta, _, _ = layer(x, delta, angles, lambda q, k, v, i=index: attend(i, q, k, v))
        [hidden] = with_sharding("b t d", self.final_norm.add(x, delta)[1])
        return hidden

    def _angles(self, positions: Array) -> tuple[Array, Array]:
        c = self.config.trunk
        return rotary_angles(positions, c.head_width, c.rotary)


@struct.dataclass
class DFlashParams(BlockParams):
    """The draft's layers, its heads, and its tables, of which some may be the target's."""

    module = DFlashLayers
    confidence: Any = None
    """``kernel [1, C]`` and ``bias [1]`` of the confidence head; None without one."""

    @property
    def own_params(self) -> Any:
        """Those not shared with the target."""
        return *super().own_params, self.confidence

    def keys_values(
        self, config: DFlashConfig, hidden: Sequence[Array], positions: Array
    ) -> tuple[Rows, ...]:
        """As of :meth:`DFlashLayers.keys_values`."""
        return self._apply(config, hidden, positions, method=DFlashLayers.keys_values)

    def block(self, config: DFlashConfig, tokens: Array, positions: Array, attend: Attend) -> Array:
        """The layers over tokens ``[B, T]``; arguments as of :class:`DFlashLayers`."""
        return self._apply(config, self.embedded(tokens), positions, attend)

    def trust(self, config: DFlashConfig, tokens: Array, hidden: Array) -> Array:
        """How likely the target accepts a slot's token, a logarithm ``[B, w]`` (DSpark, 3.3).

        Args:
          config: of the draft, which has a confidence head.
          tokens: those before the slot, ``[B, w]``.
          hidden: the slot's, ``[B, 1, D]``.
        """
        parts = [jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))]
        if config.confidence is not None and config.confidence.with_markov:
            parts.append(look_up(self.markov["embedding"], tokens))
        joint = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
        kernel, bias = (self.confidence[name].astype(jnp.float32) for name in ("kernel", "bias"))
        return jax.nn.log_sigmoid((joint * kernel).sum(axis=-1) + bias)


def markov_step(
    params: Any, config: Markov, tokens: Array, hidden: Array, state: Array
) -> tuple[Array, Array]:
    """What a Markov head adds to a slot's logits behind each of some tokens (DSpark, section 3.2).

    Args:
      params: :attr:`DFlashParams.markov`.
      config: of the head.
      tokens: those before the slot, ``[B, w]``.
      hidden: the slot's, ``[B, 1, D]``.
      state: what the recurrent head knows of the tokens before these, ``[B, w, r]``.

    Returns:
      What is added, ``[B, w, v]`` in float32, and the state behind the tokens.
    """
    before = look_up(params["embedding"], tokens)
    latent = before
    if config.gated or config.recurrent:
        slot = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        parts = (state, before, slot) if config.recurrent else (slot, before)
        joint = params["fuse"]
        mixed = jnp.concatenate(parts, axis=-1) @ joint["kernel"] + joint["bias"]
        if config.gated:
            latent = jax.nn.sigmoid(mixed) * before
        else:
            gate, candidate, output = jnp.split(mixed, 3, axis=-1)
            gate, latent = jax.nn.sigmoid(gate), jnp.tanh(output)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
    return stored_logits(params["head"], latent), state
