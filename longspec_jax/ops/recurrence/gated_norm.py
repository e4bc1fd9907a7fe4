"""What the tokens of a recurrent layer read, normalised by heads and gated."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.hardware import require_decode_step
from longspec_jax.ops.layer import rms_norm


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def gated_norm(
    read: Float[Array, "B T J P Y"],
    gates: Float[Array, "B T J _"],
    scale: Float[Array, " Y"],
    eps: float,
) -> Float[Array, "B T M Y"]:
    """The RMS norm of every value head, times the SiLU of its gate.

    Args:
      read: what the tokens read, float32.
      gates: of a key head's value heads; they are the last numbers of the last axis.
      scale: the norm's weights, float32.
      eps: added to the mean square.

    Returns:
      All value heads of a token, in the dtype of the gates; differentiable.
    """
    return GATED_NORM(read, gates, scale, eps)


@gated_norm.defjvp
def _differentiate(eps: float, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(partial(gated_norm_xla, eps=eps), primals, tangents)


def gated_norm_xla(read: Array, gates: Array, scale: Array, eps: float) -> Array:
    """:func:`gated_norm` in plain JAX."""
    batch, tokens, heads, shared, width = read.shape
    wide = gates[..., -shared * width :].reshape(read.shape).astype(jnp.float32)
    out = rms_norm(read, scale, eps) * jax.nn.silu(wide)
    return out.reshape(batch, tokens, heads * shared, width).astype(gates.dtype)


def _gated_norm_pallas(read: Array, gates: Array, scale: Array, eps: float) -> Array:
    require_decode_step("the kernel of gated norms", read.shape[0] * read.shape[1], gates.dtype)
    from longspec_jax.ops.recurrence import recurrence_pallas

    return recurrence_pallas.gated_norm(read, gates, scale, eps=eps)


GATED_NORM = Op("gated_norm", {"pallas": _gated_norm_pallas, "xla": gated_norm_xla})
