"""Matmuls of a target's pass whose order of summation follows from the weights' shape alone.

A row of a result has the same bits alone and beside a thousand others, so that a token's logits do
not depend on the tree it is verified in. On one Hopper GPU a kernel of our own computes them in 16
bits, the LM head included. Where it splits a contraction it leaves *split-K partials*, as
:mod:`longspec_jax.ops.matmul.few_rows` does. Anywhere else these are XLA's matmuls.
"""

from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.matmul.few_rows import (
    gated_matmul_mosaic,
    gated_matmul_xla,
    head_matmul_mosaic,
    head_matmul_xla,
    matmul_mosaic,
    matmul_partials_mosaic,
    matmul_partials_xla,
    matmul_xla,
)


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


MATMUL = Op("matmul", {"mosaic": matmul_mosaic, "xla": matmul_xla})
MATMUL_PARTIALS = Op(
    "matmul_partials", {"mosaic": matmul_partials_mosaic, "xla": matmul_partials_xla}
)
GATED_MATMUL = Op("gated_matmul", {"mosaic": gated_matmul_mosaic, "xla": gated_matmul_xla})
HEAD_MATMUL = Op("head_matmul", {"mosaic": head_matmul_mosaic, "xla": head_matmul_xla})
