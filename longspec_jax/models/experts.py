"""The MLP of a sparse layer: a router and the experts that it chooses among."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config.layers import ExpertsConfig
from longspec_jax.models.layers import INITIAL_SCALE, Projection, RMSNorm, SwiGLU, parameter
from longspec_jax.ops.matmul.experts import (
    ExpertWeights,
    choose_experts,
    expert_mlp,
    expert_mlp_partials,
)
from longspec_jax.ops.matmul.packed import PackedMatrix
from longspec_jax.ops.matmul.quantised_weights import QuantisedWeights
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.slicing import chunk_length, cut, put, whole_chunks


class Experts(nn.Module):
    """``sum_i share_i down_i(silu(gate_i) * up_i)`` over the experts that a token's router chose.

    And the shared expert, if there is one. Next to an MLP they read the residual stream, through
    norms of their own.

    The router's logits and the sum are float32. Where the parameters hold quantised experts they
    are multiplied as they are stored.
    """

    width: int
    config: ExpertsConfig
    dtype: jnp.dtype
    chunk: int = 0
    """Most tokens of a device that are computed at once, for long rows; 0: all."""
    ordered: bool = False
    """Whether the bits of a row depend on no other row, where there is a kernel for it."""
    gelu: bool = False
    """Whether the gate is a GELU by its tanh formula."""
    eps: float = 0.0
    """Of the norms."""

    def setup(self) -> None:
        """Declare the parameters."""
        c, normal = self.config, nn.initializers.normal(INITIAL_SCALE)
        self.router = Projection((self.width,), (c.count,), self.dtype, c.biases)
        if c.shared is not None:
            self.shared = SwiGLU(self.width, c.shared, self.dtype, chunk=self.chunk)
            self.shared_gate = Projection((self.width,), (1,), self.dtype)
        # Expert e's gate is at 2 e and its up at 2 e + 1, as [2 E, F, D].
        shapes = (2 * c.count, c.width, self.width), (c.count, self.width, c.width)
        names = "expert_gate_up", "expert_down"
        self.expert_gate_up, self.expert_down = (
            stored
            if isinstance(stored := self.get_variable("params", name), QuantisedWeights)
            else parameter(self, name, normal, shape, self.dtype)
            for name, shape in zip(names, shapes, strict=True)
        )
        if c.parallel_mlp:
            ones = nn.initializers.ones
            self.norm, self.router_norm = (RMSNorm(self.eps, self.dtype) for _ in range(2))
            self.expert_factor = parameter(self, "expert_factor", ones, (c.count,), self.dtype)
        if c.biases:
            zeros = nn.initializers.zeros
            self.expert_gate_up_bias = parameter(
                self, "expert_gate_up_bias", zeros, shapes[0][:2], self.dtype
            )
            self.expert_down_bias = parameter(
                self, "expert_down_bias", zeros, shapes[1][:2], self.dtype
            )

    def __call__(self, x: Array) -> Array:
        """Map ``[B, T, D]`` to partials ``[S, B, T, D]`` of the result."""
        mixed = self._mixed(x)
        if self.config.shared is None:
            return mixed
        share = jax.nn.sigmoid(self.shared_gate(x).astype(jnp.float32))
        return jnp.concatenate([mixed.astype(jnp.float32), self.shared(x) * share])

    def _mixed(self, x: Array) -> Array:
        """Partials of what the chosen experts yield: one, or one for each in one order."""
        router, weights = self.router.weights(), self._weights()
        routed = x
        if self.config.parallel_mlp:
            wide = self.router_norm(x).astype(jnp.float32) * self.width**-0.5
            x, routed = self.norm(x), wide.astype(x.dtype)
        if self.ordered:
            chosen = self._choose(routed, router)
            return expert_mlp_partials(x, *chosen, weights, self.config.limit)
        rows, length, _ = x.shape
        device_rows = rows // row_shares(rows)
        if not self.chunk or device_rows * length <= self.chunk:
            return self._mix(x, routed, router, weights)[None]
        size = chunk_length(device_rows, length, self.chunk)
        padded = whole_chunks(x, size), whole_chunks(routed, size)

        def step(out: Array, start: Array) -> tuple[Array, None]:
            parts = (cut(each, start, size) for each in padded)
            part, read = with_sharding("b t d, b t d", *parts)
            return put(out, self._mix(part, read, router, weights), start), None

        starts = jnp.arange(0, padded[0].shape[1], size)
        out, _ = jax.lax.scan(step, jnp.zeros_like(padded[0]), starts)
        return out[None, :, :length]

    def _weights(self) -> ExpertWeights:
        c, biases = self.config, (None, None)
        if c.biases:
            biases = self.expert_gate_up_bias.reshape(c.count, 2, -1), self.expert_down_bias
        gate_up = self.expert_gate_up
        if not isinstance(gate_up, PackedMatrix):
            gate_up = jax.tree.map(lambda each: each.reshape(c.count, 2, c.width, -1), gate_up)
        return ExpertWeights(gate_up, self.expert_down, *biases, gelu=self.gelu)

    def _mix(
        self, x: Array, routed: Array, router: tuple[Array, Any], weights: ExpertWeights
    ) -> Array:
        experts, shares = self._choose(routed, router)
        return expert_mlp(x, experts, shares, weights, self.config.limit)

    def _choose(self, x: Array, router: tuple[Array, Any]) -> tuple[Array, Array]:
        c = self.config
        experts, shares = choose_experts(
            x, *router, chosen=c.chosen, renormalised=c.renormalised, ordered=self.ordered
        )
        return experts, shares * self.expert_factor[experts] if c.parallel_mlp else shares
