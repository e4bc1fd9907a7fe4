"""Gated DeltaNet (arXiv:2412.06464): what takes the place of attention in a recurrent layer."""

from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config.layers import RecurrenceConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.models.layers import INITIAL_SCALE, Projection, RMSNorm, parameter
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.recurrence.operands import RecurrentTokens
from longspec_jax.ops.recurrence.recurrence import gated_norm

Recur: TypeAlias = Callable[[int, RecurrentTokens, Array], Array]
"""``(layer, what it makes of the fresh tokens, weights of its convolution) -> what the tokens read
[B,T,J,P,Y]``, float32: how the tokens of a recurrent layer see each other and the past."""


class Recurrence(nn.Module):
    """The sublayer, up to and after the caller's recurrence."""

    config: TargetConfig
    sizes: RecurrenceConfig
    projection: Callable[..., Any] = Projection

    def setup(self) -> None:
        """Declare the parameters; each key head's are together, so that they shard over these."""
        c, r, dtype = self.config, self.sizes, jnp.dtype(self.config.dtype)
        gate = r.shared * r.value_width
        self.inputs = self.projection((c.model_width,), (r.key_heads, r.inputs_width + gate), dtype)
        self.rates = self.projection((c.model_width,), (r.key_heads, 2 * r.shared), dtype)
        normal, shape = nn.initializers.normal(INITIAL_SCALE), (r.key_heads, r.shared)
        self.taps = parameter(self, "taps", normal, (r.key_heads, r.inputs_width, 1, r.taps), dtype)
        # In float32 whatever the model's dtype, as published files have them.
        self.decay = parameter(self, "decay", nn.initializers.zeros, shape, jnp.float32)
        self.decay_bias = parameter(self, "decay_bias", nn.initializers.zeros, shape, jnp.float32)
        self.norm = RMSNorm(c.norm_eps, jnp.dtype("float32"))
        self.out = self.projection((r.value_heads, r.value_width), (c.model_width,), dtype)

    def __call__(self, x: Array, recur: Callable[[RecurrentTokens, Array], Array]) -> Array:
        """Return partials ``[S, B, T, D]`` of the projected output for ``x[B, T, D]``."""
        r = self.sizes
        inputs, rates = with_sharding("b t k w, b t k p", self.inputs(x), self.rates(x))
        strength, step = jnp.split(rates.astype(jnp.float32), 2, axis=3)
        tokens = RecurrentTokens(
            inputs,
            -jnp.exp(self.decay) * jax.nn.softplus(step + self.decay_bias),
            jax.nn.sigmoid(strength),
        )
        read = recur(tokens, self.taps[:, :, 0])
        scale = self.norm.weights(r.value_width)
        return self.out.partials(gated_norm(read, inputs, scale, self.config.norm_eps))
