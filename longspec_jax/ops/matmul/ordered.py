"""Matmuls of a target's pass whose order of summation follows from the weights' shape alone.

A row of a result has the same bits alone and beside a thousand others, so that a token's logits do
not depend on the tree it is verified in. On Hopper GPUs a kernel of our own computes them in 16
bits, the LM head included. Where it splits a contraction it leaves *split-K partials*, as
:mod:`longspec_jax.ops.matmul.few_rows` does. Anywhere else these are XLA's matmuls.

On a mesh every device multiplies its share of the weights, in the order of the share's shape. Where
``tp`` cuts the contraction, the results of all shares are partials, which every device gathers and
the op behind the matmul adds up in the order of the devices. An all-reduce would add them up in an
order that its library chooses by the number of rows.
"""

from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.matmul.few_rows import (
    head_matmul_mosaic,
    head_matmul_xla,
    matmul_mosaic,
    matmul_xla,
)
from longspec_jax.ops.partitioned import partitioned, three_axes, width_shares, with_sharding


def matmul(
    x: Float[Array, "*rows K"], weights: Float[Array, "K ..."], bias: Array | None = None
) -> Array:
    """``[*rows, *out]`` of ``weights[K, *out]``, plus ``bias[*out]``.

    On a mesh ``*out`` are key/value heads and two more axes, or two and the width of an MLP.
    """
    share = _heads if weights.ndim == 4 else _gate_up
    out = share(three_axes(x), weights, bias)
    return out.reshape(*x.shape[:-1], *weights.shape[1:])


def matmul_partials(
    x: Float[Array, "*rows K"], weights: Float[Array, "K N"]
) -> Float[Array, "S *rows N"]:
    """Split-K partials, whose sum is the result: one of the dtype of ``x``, or several.

    Several are float32; where a mesh cuts ``K``, they are of the dtype of ``x``, one for each part.
    """
    cut = width_shares(len(weights)) > 1
    # One partial of a device: its 16 bits are half of what travels, and no launch adds up splits.
    parts = (_cut_partials if cut else _whole_partials)(three_axes(x), weights)
    [parts] = with_sharding("s b t d", parts)
    return parts.reshape(-1, *x.shape[:-1], weights.shape[1])


def gated_matmul(
    x: Float[Array, "*rows K"], weights: Float[Array, "K 2 F"]
) -> Float[Array, "*rows F"]:
    """``silu(x @ weights[:, 0]) * (x @ weights[:, 1])``."""
    return _gated(three_axes(x), weights).reshape(*x.shape[:-1], -1)


def head_matmul(
    hidden: Float[Array, "*rows D"], table: Float[Array, "V D"]
) -> Float[Array, "*rows V"]:
    """Logits ``hidden @ table.T``, accumulated and returned in float32."""
    return _head(three_axes(hidden), table).reshape(*hidden.shape[:-1], -1)


@partitioned("b t d, d k j h, k j h -> b t k j h")
def _heads(x: Array, weights: Array, bias: Array | None) -> Array:
    return MATMUL(x, weights, bias)


@partitioned("b t d, d u f, u f -> b t u f")
def _gate_up(x: Array, weights: Array, bias: Array | None) -> Array:
    return MATMUL(x, weights, bias)


@partitioned("b t f, f d -> s b t d")
def _whole_partials(x: Array, weights: Array) -> Array:
    return MATMUL(x, weights, split=True)


@partitioned("b t f, f d -> f b t d")
def _cut_partials(x: Array, weights: Array) -> Array:
    return MATMUL(x, weights)[None]


@partitioned("b t d, d u f -> b t f")
def _gated(x: Array, weights: Array) -> Array:
    return MATMUL(x, weights, gated=True)


@partitioned("b t d, v d -> b t v")
def _head(hidden: Array, table: Array) -> Array:
    return HEAD_MATMUL(hidden, table)


MATMUL = Op("matmul", {"mosaic": matmul_mosaic, "xla": matmul_xla})
HEAD_MATMUL = Op("head_matmul", {"mosaic": head_matmul_mosaic, "xla": head_matmul_xla})
