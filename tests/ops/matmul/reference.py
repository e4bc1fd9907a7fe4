"""A mixture of experts as it is defined, which every form of the op must equal."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.ops.matmul.experts import ExpertWeights, _gated


def expert_mlp_reference(
    x: Array, experts: Array, shares: Array, weights: ExpertWeights, limit: float | None = None
) -> Array:
    """``expert_mlp`` in float32, all experts of all rows, nothing sorted or gathered."""
    weights = weights.plain().whole(x.astype(jnp.float32))
    wide: Any = jax.tree.map(lambda each: each.astype(jnp.float32), weights)
    dot = partial(jnp.einsum, precision="highest")
    inner = dot("btd,eufd->bteuf", x.astype(jnp.float32), wide.gate_up)
    if wide.gate_up_bias is not None:
        inner += wide.gate_up_bias
    out = dot("btef,edf->bted", _gated(inner, wide, limit), wide.down)
    if wide.down_bias is not None:
        out += wide.down_bias
    chosen = jax.nn.one_hot(experts, wide.down.shape[0]) * shares[..., None]
    return dot("btke,bted->btd", chosen, out).astype(x.dtype)
