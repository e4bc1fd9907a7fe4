"""Products with weights of 8 bits: half the bytes to read, for what need not be exact.

The weights are rounded row by row, a row being what one output sums over: 127 steps of its largest
element, with a scale of its own in float32. The rounding of the weights is what this costs; the
other factor keeps its precision.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int8

from longspec_jax.axes import Array
from longspec_jax.ops.hardware import decodes_on_ampere
from longspec_jax.ops.products.skinny import matmul_precision

FEW = 4
"""Up to so many vectors XLA widens the weights as fast as it reads them, if there are exactly
four."""


@jax.jit  # As one program it holds no float32 copy of the weights.
def round_rows(weights: Float[Array, "v D"]) -> tuple[Int8[Array, "v D"], Float[Array, " v"]]:
    """The weights in 8 bits and the scale of each row; a row of zeros stays zero."""
    wide = weights.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=1) / 127
    steps = jnp.round(wide / jnp.where(scale > 0, scale, 1)[:, None])
    return steps.astype(jnp.int8), scale


def int8_product(
    x: Float[Array, "*vectors D"], rows: Int8[Array, "v D"], scale: Float[Array, " v"]
) -> Float[Array, "*vectors v"]:
    """``x @ (rows * scale[:, None]).T`` in float32."""
    flat = x.reshape(-1, x.shape[-1])
    count = flat.shape[0]
    if not decodes_on_ampere(count, x.dtype):
        out = _widened(flat, rows)
    elif count <= FEW:
        out = _widened(jnp.pad(flat, ((0, FEW - count), (0, 0))), rows)[:count]
    else:
        out = _of_integers(flat, rows)
    return (out * scale).reshape(*x.shape[:-1], rows.shape[0])


def _widened(x: Array, rows: Array) -> Array:
    """The product in the dtype of ``x``, in which each of the 255 steps is exact."""
    over = ((1,), (1,)), ((), ())
    precision = matmul_precision(x.dtype)
    rows = rows.astype(x.dtype)
    return jax.lax.dot_general(
        x, rows, over, precision=precision, preferred_element_type=jnp.float32
    )


def _of_integers(x: Array, rows: Array) -> Array:
    """The product on 8-bit matrix units, which take the weights as they are stored.

    Widening costs more than reading: 56 us for 16 vectors and 32000 rows of 4096, against 44 us
    here and 69 us with bfloat16 weights (H200). A vector becomes the sum of two 8-bit ones, the
    second 254 times finer: its error is 2^-16 of its largest element, less than bfloat16's own for
    every element above 1/128 of that.
    """
    wide = x.astype(jnp.float32)
    top = jnp.abs(wide).max(axis=1, keepdims=True)
    coarse = jnp.where(top > 0, top, 1) / 127
    fine = coarse / 254
    first = jnp.round(wide / coarse)
    second = jnp.round((wide - first * coarse) / fine)
    both = jnp.concatenate([first, second]).astype(jnp.int8)
    count = x.shape[0]
    # Whole groups of 8, as the matrix units take them.
    both = jnp.pad(both, ((0, -2 * count % 8), (0, 0)))
    over = ((1,), (1,)), ((), ())
    sums = jax.lax.dot_general(both, rows, over, preferred_element_type=jnp.int32)
    sums = sums.astype(jnp.float32)
    return sums[:count] * coarse + sums[count : 2 * count] * fine
