"""Matrix products of a decode step: few rows against weights that are read once.

Their time is that of reading the weights. On Hopper a kernel of our own reads them faster than
XLA's choice (``docs/kernels.md``) and saves the launches after it: the gate of a SwiGLU is in it,
and a product whose contraction is shared out leaves its *summands*, which the op that reads the
product next adds up as it goes (:func:`longspec_jax.ops.layer.residual_norm.residual_norm`).
Anywhere else these are XLA's products.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.partitioned import one_device
from longspec_jax.ops.products.tiles import ProductTile, product_tile


@jax.custom_jvp
def product(
    x: Float[Array, "*rows K"], weights: Float[Array, "K ..."], bias: Array | None = None
) -> Array:
    """``[*rows, *out]`` of ``weights[K, *out]``, plus ``bias[*out]``; differentiable."""
    tile = _tile(x, math.prod(weights.shape[1:]))
    if tile is None:
        return composed(x, weights, bias)
    from longspec_jax.ops.products import skinny_mosaic  # Its backend may be absent.

    flat = weights.reshape(weights.shape[0], -1)
    flat_bias = None if bias is None else bias.reshape(-1)
    out = skinny_mosaic.product(_rows(x), flat, flat_bias, tile=tile)
    return out.reshape(*x.shape[:-1], *weights.shape[1:])


@jax.custom_jvp
def summands(x: Float[Array, "*rows K"], weights: Float[Array, "K N"]) -> Float[Array, "S *rows N"]:
    """Arrays whose sum is the product: itself alone, or several float32 ones; differentiable."""
    tile = _tile(x, weights.shape[1], split=True)
    if tile is None:
        return composed(x, weights)[None]
    from longspec_jax.ops.products import skinny_mosaic  # Its backend may be absent.

    out = skinny_mosaic.summands(_rows(x), weights, tile=tile)
    return out.reshape(tile.splits, *x.shape[:-1], weights.shape[1])


@jax.custom_jvp
def gated_product(
    x: Float[Array, "*rows K"], weights: Float[Array, "K 2 F"]
) -> Float[Array, "*rows F"]:
    """``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``; differentiable."""
    tile = _tile(x, weights.shape[2], gated=True)
    if tile is None:
        return composed_gate(x, weights)
    from longspec_jax.ops.products import skinny_mosaic  # Its backend may be absent.

    out = skinny_mosaic.gated_product(_rows(x), weights, tile=tile)
    return out.reshape(*x.shape[:-1], weights.shape[2])


def composed(x: Array, weights: Array, bias: Array | None = None) -> Array:
    """The product in plain JAX; float32 products are exact, not TF32."""
    # The produced axes stay apart: [2, F] in one axis could not be sharded over F. It is one plain
    # matrix product all the same.
    over = ((x.ndim - 1,), (0,)), ((), ())
    out = jax.lax.dot_general(x, weights, over, precision=matmul_precision(weights.dtype))
    return out if bias is None else out + bias


def composed_gate(x: Array, weights: Array) -> Array:
    """The gated product in plain JAX."""
    return gate(composed(x, weights))


def gate(gate_up: Array) -> Array:
    """``silu`` of the first half of ``[..., 2, F]`` times the second."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """Full float32 products for float32 models; Ampere and later would use TF32 otherwise."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


@product.defjvp
def _differentiate(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(composed, primals, tangents)


@summands.defjvp
def _differentiate_summands(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(lambda x, weights: composed(x, weights)[None], primals, tangents)


@gated_product.defjvp
def _differentiate_gate(primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(composed_gate, primals, tangents)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _tile(x: Array, columns: int, gated: bool = False, split: bool = False) -> ProductTile | None:
    """The kernel's tile, where it serves this product: on one Hopper GPU, for whole groups of rows.

    A mesh of devices cuts the weights, which only XLA's products follow.
    """
    rows = x.size // x.shape[-1]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or not one_device():
        return None
    if not hardware.mosaic_is_supported() or not hardware.is_hopper():
        return None
    return product_tile(rows, x.shape[-1], columns, gated=gated, split=split)
