"""Matmuls of a target's pass whose order of summation follows from the weights' shape alone.

A row of a result has the same bits alone and beside a thousand others, so that a token's logits do
not depend on the tree it is verified in. On one Hopper GPU a kernel of our own computes them in 16
bits, the LM head included. Where it splits a contraction it leaves *split-K partials*, as
:mod:`longspec_jax.ops.matmul.few_rows` does. Anywhere else these are XLA's matmuls.
"""

import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.matmul import ordered_tiles
from longspec_jax.ops.matmul.few_rows import (
    gated_matmul_xla,
    head_matmul_xla,
    matmul_partials_xla,
    matmul_xla,
)
from longspec_jax.ops.partitioned import one_device


def matmul(
    x: Float[Array, "*rows K"], weights: Float[Array, "K ..."], bias: Array | None = None
) -> Array:
    """``[*rows, *out]`` of ``weights[K, *out]``, plus ``bias[*out]``."""
    return MATMUL(x, weights, bias)


def matmul_partials(
    x: Float[Array, "*rows K"], weights: Float[Array, "K N"]
) -> Float[Array, "S *rows N"]:
    """Split-K partials, whose sum is the result: one of the dtype of ``x``, or several float32."""
    return MATMUL_PARTIALS(x, weights)


def gated_matmul(
    x: Float[Array, "*rows K"], weights: Float[Array, "K 2 F"]
) -> Float[Array, "*rows F"]:
    """``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``."""
    return GATED_MATMUL(x, weights)


def head_matmul(
    hidden: Float[Array, "*rows D"], table: Float[Array, "V D"]
) -> Float[Array, "*rows V"]:
    """Logits ``hidden @ table.T``, accumulated and returned in float32."""
    return HEAD_MATMUL(hidden, table)


def _matmul_mosaic(x: Array, weights: Array, bias: Array | None = None) -> Array:
    flat = weights.reshape(weights.shape[0], -1)
    flat_bias = None if bias is None else bias.reshape(-1)
    return _launch(x, flat, flat_bias).reshape(*x.shape[:-1], *weights.shape[1:])


def _matmul_partials_mosaic(x: Array, weights: Array) -> Array:
    out = _launch(x, weights, split=True)
    return out if out.ndim > x.ndim else out[None]


def _gated_matmul_mosaic(x: Array, weights: Array) -> Array:
    return _launch(x, weights)


def _head_matmul_mosaic(hidden: Array, table: Array) -> Array:
    _refuse_unserved(hidden, table)
    from longspec_jax.ops.matmul import ordered_mosaic

    tile = ordered_tiles.head_tile(table.shape[1], table.shape[0])
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = ordered_mosaic.head_matmul(flat, table, tile=tile)
    return out.reshape(*hidden.shape[:-1], -1)


def _launch(x: Array, weights: Array, bias: Array | None = None, *, split: bool = False) -> Array:
    """``[*rows, N]``, or the kernel's split-K partials ``[S, *rows, N]``."""
    _refuse_unserved(x, weights)
    from longspec_jax.ops.matmul import ordered_mosaic

    contracted, columns, gated = x.shape[-1], weights.shape[-1], weights.ndim == 3
    tile = ordered_tiles.matmul_tile(contracted, columns, gated=gated, split=split)
    out = ordered_mosaic.matmul(x.reshape(-1, contracted), weights, bias, tile=tile)
    return out.reshape(*out.shape[:-2], *x.shape[:-1], columns)


def _refuse_unserved(x: Array, weights: Array) -> None:
    """Raise for machines, dtypes and rows that the kernel does not serve."""
    hardware.require_hopper("the Mosaic matmul")
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        raise NotImplementedError(
            "the Mosaic matmul takes rows and weights both in bfloat16 or both in float16, not "
            f"{x.dtype} and {weights.dtype}"
        )
    if not one_device():
        raise NotImplementedError("a mesh cuts the weights, which only XLA's matmuls follow")
    if not x.size:
        raise NotImplementedError("the Mosaic matmul takes one row or more")


MATMUL = Op("matmul", {"mosaic": _matmul_mosaic, "xla": matmul_xla})
MATMUL_PARTIALS = Op(
    "matmul_partials", {"mosaic": _matmul_partials_mosaic, "xla": matmul_partials_xla}
)
GATED_MATMUL = Op("gated_matmul", {"mosaic": _gated_matmul_mosaic, "xla": gated_matmul_xla})
HEAD_MATMUL = Op("head_matmul", {"mosaic": _head_matmul_mosaic, "xla": head_matmul_xla})
