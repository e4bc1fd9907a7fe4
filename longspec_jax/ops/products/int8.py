"""Products with weights of 8 bits: half the bytes to read, for what need not be exact.

The weights are rounded row by row, a row being what one output sums over: 127 steps of its largest
element, with a scale of its own in float32. The rounding of the weights is what this costs; the
other factor keeps its precision.

For the 16 rows of a draft's level and fewer, a kernel of our own reads the weights as fast as XLA's
products and spares the launches around them (``docs/kernels.md``). Of more rows, on a mesh of
devices and anywhere else these are XLA's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, Int8

from longspec_jax.axes import Array, Leaf
from longspec_jax.ops.hardware import decodes_on_ampere
from longspec_jax.ops.partitioned import one_device
from longspec_jax.ops.products.skinny import gate, matmul_precision
from longspec_jax.ops.products.tiles import Int8Tile, int8_tile

MOST_ELEMENTS = 2**31 - 1
"""Of an array of one byte each: kernels count them with 32 bits."""
FEW = 4
"""Up to so many vectors XLA widens the weights as fast as it reads them, if there are exactly
four."""


@struct.dataclass
class Int8Rows:
    """Rows of numbers in 8 bits, ``steps * scale``: a product's, one for each output, or a table's.

    The products are of weights ``[v, D]``.
    """

    steps: Leaf[Int8[Array, "*v D"]]
    scale: Leaf[Float[Array, "*v"]]

    @classmethod
    def of(cls, whole: Float[Array, "*v D"]) -> "Int8Rows":
        """Round rows; one of zeros stays zero."""
        return cls(*round_rows(whole))

    def product(
        self, x: Array, bias: Array | None = None, *, dtype: Any = jnp.float32
    ) -> Float[Array, "*vectors v"]:
        """As :func:`int8_product`."""
        return int8_product(x, self.steps, self.scale, bias, dtype=dtype)

    def summands(self, x: Array) -> Float[Array, "S *vectors v"]:
        """As :func:`int8_summands`."""
        return int8_summands(x, self.steps, self.scale)

    def gated_product(self, x: Array) -> Float[Array, "*vectors F"]:
        """As :func:`int8_gated_product`."""
        return int8_gated_product(x, self.steps, self.scale)

    def take(self, places: Int[Array, "*w"]) -> "Int8Rows":
        """Those at some places of the first axis; for one that is not there the nearest that is."""
        parts = self.steps, self.scale
        return Int8Rows(*(jnp.take(part, places, axis=0, mode="clip") for part in parts))

    def widened(self) -> Float[Array, "*v D"]:
        """The numbers in float32."""
        return self.steps.astype(jnp.float32) * self.scale[..., None]


@jax.jit  # As one program it holds no float32 copy of the weights.
def round_rows(weights: Float[Array, "*v D"]) -> tuple[Int8[Array, "*v D"], Float[Array, "*v"]]:
    """The weights in 8 bits and the scale of each row; a row of zeros stays zero."""
    wide = weights.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / 127
    steps = jnp.round(wide / jnp.where(scale > 0, scale, 1)[..., None])
    return steps.astype(jnp.int8), scale


def int8_product(
    x: Float[Array, "*vectors D"],
    rows: Int8[Array, "v D"],
    scale: Float[Array, " v"],
    bias: Float[Array, " v"] | None = None,
    *,
    dtype: Any = jnp.float32,
) -> Float[Array, "*vectors v"]:
    """``x @ (rows * scale[:, None]).T + bias`` in the given dtype."""
    tile = _tile(x, rows.shape[0])
    if tile is None:
        out = composed(x, rows, scale).astype(dtype)
        return out if bias is None else out + bias
    return _launched(x, rows, scale, bias, tile=tile, dtype=dtype)[0]


def int8_summands(
    x: Float[Array, "*vectors D"], rows: Int8[Array, "v D"], scale: Float[Array, " v"]
) -> Float[Array, "S *vectors v"]:
    """Arrays whose sum is the product: itself alone, in the dtype of ``x``, or float32 ones."""
    tile = _tile(x, rows.shape[0], split=True)
    if tile is None:
        return composed(x, rows, scale).astype(x.dtype)[None]
    return _launched(x, rows, scale, tile=tile, dtype=x.dtype)


def int8_gated_product(
    x: Float[Array, "*vectors D"],
    rows: Int8[Array, "both D"],
    scale: Float[Array, " both"],
) -> Float[Array, "*vectors F"]:
    """``silu`` of the first half of the product times the second, in the dtype of ``x``."""
    tile = _tile(x, rows.shape[0] // 2, gated=True)
    if tile is None:
        return composed_gate(x, rows, scale)
    return _launched(x, rows, scale, tile=tile, gated=True, dtype=x.dtype)[0]


def _tile(x: Array, outputs: int, gated: bool = False, split: bool = False) -> Int8Tile | None:
    """The kernel's tile, where it serves this product."""
    count = x.size // x.shape[-1]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or not one_device():
        return None
    elements = x.shape[-1] * outputs * (2 if gated else 1)
    if not decodes_on_ampere(count, x.dtype) or elements > MOST_ELEMENTS:
        return None
    return int8_tile(count, x.shape[-1], outputs, gated=gated, split=split)


def _launched(x: Array, rows: Array, *operands: Array | None, **options: Any) -> Array:
    """The kernel's summands, ``[S, *vectors, ...]``."""
    from longspec_jax.ops.products import int8_pallas  # Its backend may be absent.

    out = int8_pallas.product(x.reshape(-1, x.shape[-1]), rows, *operands, **options)
    return out.reshape(out.shape[0], *x.shape[:-1], out.shape[2])


def composed_gate(x: Array, rows: Array, scale: Array) -> Array:
    """The gated product in plain JAX, in the dtype of ``x``."""
    both = composed(x, rows, scale).astype(x.dtype)
    return gate(both.reshape(*x.shape[:-1], 2, rows.shape[0] // 2))


def composed(x: Array, rows: Array, scale: Array) -> Array:
    """The product in plain JAX, in float32."""
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
