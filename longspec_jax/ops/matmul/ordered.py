"""Matmuls of a target's pass whose order of summation follows only from the weights' shape.

A row of a result has the same bits alone and with a thousand others, so that a token's logits do
not depend on the tree it is verified in. On Hopper GPUs a kernel of our own computes them in 16
bits, the LM head included. Where it splits a contraction it leaves *split-K partials*, as
:mod:`longspec_jax.ops.matmul.few_rows` does. Anywhere else these are XLA's matmuls.

On a mesh every device multiplies its share of the weights, in the order of the share's shape. Where
``tp`` cuts the contraction, the results of all shares are partials, which every device gathers and
the op after the matmul adds up in the order of the devices. An all-reduce would add them up in an
order that its library chooses by the number of rows.
"""

from functools import partial

from jaxtyping import Float

from longspec_jax.axes import Array
from longspec_jax.ops.dispatch import op
from longspec_jax.ops.matmul.few_rows import (
    head_matmul_mosaic,
    head_matmul_xla,
    matmul_mosaic,
    matmul_xla,
)
from longspec_jax.ops.partitioned import partitioned, three_axes, width_shares, with_sharding

MATMUL, HEAD_MATMUL = op(matmul_xla), op(head_matmul_xla)
MATMUL.kernel("mosaic")(matmul_mosaic)
HEAD_MATMUL.kernel("mosaic")(head_matmul_mosaic)

_heads = partitioned("b t d, d k j h, k j h -> b t k j h")(MATMUL)
_gate_up = partitioned("b t d, d u f, u f -> b t u f")(MATMUL)
_gated = partitioned("b t d, d u f -> b t f")(partial(MATMUL, gated=True))
_partials = partitioned("b t f, f d -> s b t d")(partial(MATMUL, split=True))
_head = partitioned("b t d, v d -> b t v")(HEAD_MATMUL)


@partitioned("b t f, f d -> f b t d")
def _cut_partials(x: Array, weights: Array) -> Array:
    return MATMUL(x, weights)[None]


def matmul(
    x: Float[Array, "*rows K"],
    weights: Float[Array, "K ..."],
    bias: Array | None = None,
    gated: bool = False,
    split: bool = False,
) -> Array:
    """As :func:`longspec_jax.ops.matmul.few_rows.matmul`, but for the gradient.

    On a mesh ``*out`` are key/value heads and two more axes, or two and the width of an MLP. Where
    a mesh cuts ``K``, partials are of the dtype of ``x``, one for each part.
    """
    rows = three_axes(x)
    if gated:
        return _gated(rows, weights).reshape(*x.shape[:-1], -1)
    if not split:
        out = (_heads if weights.ndim == 4 else _gate_up)(rows, weights, bias)
        return out.reshape(*x.shape[:-1], *weights.shape[1:])
    cut = width_shares(len(weights)) > 1
    # One partial of a device: its 16 bits are half of what travels, and no launch adds up splits.
    parts = (_cut_partials if cut else _partials)(rows, weights)
    [parts] = with_sharding("s b t d", parts)
    return parts.reshape(-1, *x.shape[:-1], weights.shape[1])


def head_matmul(
    hidden: Float[Array, "*rows D"], table: Float[Array, "V D"]
) -> Float[Array, "*rows V"]:
    """Logits ``hidden @ table.T``, accumulated and returned in float32."""
    return _head(three_axes(hidden), table).reshape(*hidden.shape[:-1], -1)
