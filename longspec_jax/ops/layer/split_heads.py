"""From the fused product to rotated queries and keys, and values, as one op.

The fused projection yields queries, keys and values grouped by key/value head,
``[B, T, K, G + 2, H]``. XLA makes three kernels of rotating and parting them; for the few rows of a
decode step on a GPU one Pallas kernel does it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import decodes_on_ampere

Heads = tuple[Array, Array, Array]
"""Queries ``[B, T, N, H]``, keys and values ``[B, T, K, H]``."""


@jax.custom_jvp
def split_heads(
    qkv: Float[Array, "B T K G2 H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Heads:
    """Part queries, keys and values, and rotate queries and keys by the tokens' positions.

    Args:
      qkv: per key/value head its queries, then its key, then its value.
      cos: cosine of the rotary angles, float32.
      sin: sine of the rotary angles, float32.

    Returns:
      Rotated queries ``[B, T, N, H]`` and keys ``[B, T, K, H]``, and values ``[B, T, K, H]``;
      differentiable.
    """
    if decodes_on_ampere(qkv.shape[0] * qkv.shape[1], qkv.dtype):
        from longspec_jax.ops.layer import split_heads_pallas  # Its backend may be absent.

        return split_heads_pallas.split_heads(qkv, cos, sin)
    return composed(qkv, cos, sin)


@split_heads.defjvp
def _differentiate(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(composed, primals, tangents)


def composed(qkv: Array, cos: Array, sin: Array) -> Heads:
    """The op in plain JAX: its definition, and what runs everywhere but in a GPU's decode step."""
    q, k, v = part(qkv)
    return rotate(q, (cos, sin)), rotate(k, (cos, sin)), v


def part(qkv: Float[Array, "B T K G2 H"]) -> Heads:
    """Queries, keys and values of the fused product, none rotated."""
    batch, tokens, kv_heads, slots, width = qkv.shape
    q = qkv[:, :, :, : slots - 2].reshape(batch, tokens, kv_heads * (slots - 2), width)
    return q, qkv[:, :, :, -2], qkv[:, :, :, -1]


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Rotate the pairs ``(x[i], x[i + H/2])`` of every head of ``x[B, T, heads, H]``."""
    cos, sin = (table[:, :, None, :] for table in angles)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)
