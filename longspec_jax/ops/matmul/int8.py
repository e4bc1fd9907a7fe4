"""Matmuls with weights of 8 bits: half the bytes to read, for what need not be exact.

The weights are rounded row by row, a row being what one output sums over: 127 steps of its largest
element, with a scale of its own in float32. Only the weights are rounded; the other factor keeps
its precision.

For the 16 rows of a draft's level and fewer, a kernel of our own reads the weights as fast as XLA's
matmuls and saves the launches around them (``docs/kernels.md``). Of more rows, on a mesh of
devices and anywhere else these are XLA's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int8

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops import hardware
from longspec_jax.ops.dispatch import Op
from longspec_jax.ops.matmul.few_rows import gate, matmul_precision
from longspec_jax.ops.partitioned import one_device

MOST_ELEMENTS = 2**31 - 1
"""Of an array of one byte each: kernels count them with 32 bits."""
FEW = 4
"""XLA widens the weights as fast as it reads them for exactly this many vectors; fewer are
padded."""


@struct.dataclass
class Int8Rows:
    """Rows of numbers in 8 bits, ``steps * scale``: of a weight ``[v, D]``, one for each output."""

    steps: Leaf[Int8[Array, "*v D"]]
    scale: Leaf[Float[Array, "*v"]]

    @classmethod
    def of(cls, whole: Float[Array, "*v D"]) -> "Int8Rows":
        """Round rows; one of zeros stays zero."""
        return cls(*round_rows(whole))


@jax.jit  # As one program it holds no float32 copy of the weights.
def round_rows(weights: Float[Array, "*v D"]) -> tuple[Int8[Array, "*v D"], Float[Array, "*v"]]:
    """The weights in 8 bits and the scale of each row; a row of zeros stays zero."""
    wide = weights.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / 127
    steps = jnp.round(wide / jnp.where(scale > 0, scale, 1)[..., None])
    return steps.astype(jnp.int8), scale


def int8_matmul(
    x: Float[Array, "*vectors D"],
    rows: Int8Rows,
    bias: Float[Array, " v"] | None = None,
    *,
    dtype: Any = jnp.float32,
) -> Float[Array, "*vectors v"]:
    """``x @ (steps * scale[:, None]).T + bias`` in the given dtype."""
    return INT8_MATMUL(x, rows, bias, dtype=dtype)


def int8_matmul_partials(
    x: Float[Array, "*vectors D"], rows: Int8Rows
) -> Float[Array, "S *vectors v"]:
    """Split-K partials, whose sum is the result: one of the dtype of ``x``, or several float32."""
    return INT8_MATMUL_PARTIALS(x, rows)


def int8_gated_matmul(x: Float[Array, "*vectors D"], rows: Int8Rows) -> Float[Array, "*vectors F"]:
    """``silu`` of the first half of the result times the second, in the dtype of ``x``."""
    return INT8_GATED_MATMUL(x, rows)


def int8_matmul_xla(
    x: Array, rows: Int8Rows, bias: Array | None = None, *, dtype: Any = jnp.float32
) -> Array:
    """The matmul in plain JAX."""
    flat = x.reshape(-1, x.shape[-1])
    count = flat.shape[0]
    if not (hardware.has_kernels(x.dtype) and count <= hardware.DECODE_ROWS):
        out = _widened(flat, rows.steps)
    elif count <= FEW:
        out = _widened(jnp.pad(flat, ((0, FEW - count), (0, 0))), rows.steps)[:count]
    else:
        out = _of_integers(flat, rows.steps)
    out = (out * rows.scale).reshape(*x.shape[:-1], rows.scale.size).astype(dtype)
    return out if bias is None else out + bias


def int8_matmul_partials_xla(x: Array, rows: Int8Rows) -> Array:
    """The whole result as the only partial."""
    return int8_matmul_xla(x, rows, dtype=x.dtype)[None]


def int8_gated_matmul_xla(x: Array, rows: Int8Rows) -> Array:
    """The gated matmul in plain JAX, in the dtype of ``x``."""
    both = int8_matmul_xla(x, rows, dtype=x.dtype)
    return gate(both.reshape(*x.shape[:-1], 2, -1))


def _widened(x: Array, steps: Array) -> Array:
    """The matmul in the dtype of ``x``, in which each of the 255 steps is exact."""
    over = ((1,), (1,)), ((), ())
    precision = matmul_precision(x.dtype)
    steps = steps.astype(x.dtype)
    return jax.lax.dot_general(
        x, steps, over, precision=precision, preferred_element_type=jnp.float32
    )


def _of_integers(x: Array, steps: Array) -> Array:
    """The matmul on 8-bit matrix units, which take the weights as they are stored.

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
    sums = jax.lax.dot_general(both, steps, over, preferred_element_type=jnp.int32)
    sums = sums.astype(jnp.float32)
    return sums[:count] * coarse + sums[count : 2 * count] * fine


def _matmul_pallas(
    x: Array, rows: Int8Rows, bias: Array | None = None, *, dtype: Any = jnp.float32
) -> Array:
    return _launched(x, rows, bias, dtype=dtype)[0]


def _matmul_partials_pallas(x: Array, rows: Int8Rows) -> Array:
    return _launched(x, rows, split=True, dtype=x.dtype)


def _gated_matmul_pallas(x: Array, rows: Int8Rows) -> Array:
    return _launched(x, rows, gated=True, dtype=x.dtype)[0]


def _launched(
    x: Array,
    rows: Int8Rows,
    bias: Array | None = None,
    *,
    gated: bool = False,
    split: bool = False,
    dtype: Any,
) -> Array:
    """The kernel's split-K partials, ``[S, *vectors, ...]``; refuses what it does not serve."""
    flat = x.reshape(-1, x.shape[-1])
    hardware.require_decode_step("the 8-bit matmul kernel", flat.shape[0], x.dtype)
    if x.dtype == jnp.float32:
        raise NotImplementedError("the 8-bit matmul kernel takes 16-bit types, not float32")
    if not one_device():
        raise NotImplementedError("a mesh cuts the weights, which only XLA's matmuls follow")
    if rows.steps.size > MOST_ELEMENTS:
        raise NotImplementedError(f"{rows.steps.size} weights are more than {MOST_ELEMENTS}")
    from longspec_jax.ops.matmul import int8_pallas

    outputs = rows.steps.shape[0] // (2 if gated else 1)
    tile = int8_pallas.int8_tile(len(flat), x.shape[-1], outputs, gated=gated, split=split)
    out = int8_pallas.int8_matmul(
        flat, rows.steps, rows.scale, bias, tile=tile, gated=gated, dtype=dtype
    )
    return out.reshape(out.shape[0], *x.shape[:-1], out.shape[2])


INT8_MATMUL = Op("int8_matmul", {"pallas": _matmul_pallas, "xla": int8_matmul_xla})
INT8_MATMUL_PARTIALS = Op(
    "int8_matmul_partials", {"pallas": _matmul_partials_pallas, "xla": int8_matmul_partials_xla}
)
INT8_GATED_MATMUL = Op(
    "int8_gated_matmul", {"pallas": _gated_matmul_pallas, "xla": int8_gated_matmul_xla}
)
