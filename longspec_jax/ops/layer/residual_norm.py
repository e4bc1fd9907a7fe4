"""Residual addition and RMS norm of a transformer layer as one op.

XLA makes three kernels of it, which is a tenth of a decode step over one token: the arithmetic is
nothing, the launches count. For the few rows of a decode step on a GPU one Pallas kernel does it.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import decodes_on_ampere

MAX_WIDTH = 16384
"""One program holds a whole row in registers."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def residual_norm(
    x: Float[Array, "*rows D"],
    summands: Float[Array, "S *rows D"],
    scale: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Add a sublayer's output to the residual stream and normalise the sum.

    Args:
      x: the residual stream.
      summands: what is added to it, a sum of its own (:mod:`longspec_jax.ops.products.skinny`).
      scale: the norm's weights.
      eps: added to the mean square.

    Returns:
      ``x + summands.sum(0)`` and its RMS norm, both in the dtype of ``x``; differentiable.
    """
    rows = x.size // x.shape[-1]
    if decodes_on_ampere(rows, x.dtype) and x.shape[-1] <= MAX_WIDTH:
        from longspec_jax.ops.layer import residual_norm_pallas  # Its backend may be absent.

        return residual_norm_pallas.residual_norm(x, summands, scale, eps=eps)
    return composed(x, summands, scale, eps)


@residual_norm.defjvp
def _differentiate(eps: float, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(functools.partial(composed, eps=eps), primals, tangents)


def composed(x: Array, summands: Array, scale: Array, eps: float) -> tuple[Array, Array]:
    """The op in plain JAX: its definition, and what runs everywhere but in a GPU's decode step."""
    total = add(x, summands)
    return total, rms_norm(total, scale, eps)


def add(x: Array, summands: Array) -> Array:
    """``x + summands.sum(0)`` in the dtype of ``x``, rounded once."""
    if summands.shape[0] == 1:
        return x + summands[0]
    return (x.astype(jnp.float32) + summands.sum(axis=0)).astype(x.dtype)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / rms(x) * scale`` over the last axis, computed in float32, in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    return (wide * rms_factor(wide, eps) * scale.astype(jnp.float32)).astype(x.dtype)


def rms_factor(wide: Array, eps: float) -> Array:
    """``1 / rms(wide)`` over the last axis, which stays with size 1."""
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
