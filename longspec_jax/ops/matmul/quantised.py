"""Matmuls with weights of 8 or 4 bits: of a quantised checkpoint, and of a draft in 8 bits.

One type holds every format (:class:`QuantisedMatrix`). What it stands for is the matrix of its
*dequantised* weights, ``(code - zero) * scale`` in float32, rounded once to the dtype of the
activations; activations are not quantised. A text is the same with and without speculation because
both multiply with that matrix.

On GPUs kernels of our own widen the weights in registers. That of Hopper GPUs reads them packed
(:mod:`longspec_jax.ops.matmul.packed`), and multiplies sums by the scale of an output that has one,
which rounds less. Triton's reads them as they are, for up to 64 rows, and multiplies sums by every
scale. In plain JAX a matmul dequantises its weights first, one layer's at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, PyTree

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.dispatch import op
from longspec_jax.ops.layer import added
from longspec_jax.ops.matmul.few_rows import gate, matmul_precision
from longspec_jax.ops.matmul.packed_shares import PackedShares
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix, QuantisedWeights
from longspec_jax.ops.partitioned import one_device, partitioned, three_axes, with_sharding

MOST_ROWS = 1024
"""Of the kernel, where XLA may multiply as well. With more rows, widening whole weights costs less
than the kernel's passes over them."""


def quantised_matmul(
    x: Float[Array, "*rows C"],
    weights: QuantisedWeights,
    bias: Array | None = None,
    *,
    ordered: bool = False,
    gated: bool = False,
    split: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """``[*rows, *out]`` of ``x @ dequantised.T``, plus ``bias[*out]``.

    Args:
      x: rows.
      weights: as they are stored.
      bias: what is added.
      ordered: whether rows must have the same bits whatever rows are next to them, where the Hopper
        kernel runs.
      gated: whether to return ``silu`` of the first of two matmuls, ``out = (2, F)``, times the
        second.
      split: whether to return split-K partials ``[S, *rows, N]``, whose sum is the result: one of
        the dtype of ``x``, or several float32. Where a mesh cuts the contraction there is one for
        each part, of the dtype of ``x``; of a long chunk they are added up.
      dtype: of the result; that of ``x`` if absent.
    """
    if not isinstance(weights, PackedShares):
        return QUANTISED_MATMUL(
            x, weights, bias, ordered=ordered, gated=gated, split=split, dtype=dtype
        )
    rows = three_axes(x)
    if gated:
        return _shared_gate(rows, weights, ordered=ordered).reshape(*x.shape[:-1], -1)
    if not weights.cuts_inputs:
        share = _shared_outputs(len(weights.out_axes), weights.cut)
        out = share(rows, weights, bias, ordered=ordered, dtype=dtype)
        out = out.reshape(*x.shape[:-1], *weights.out_axes)
        return out[None] if split else out
    parts = _shared_inputs(rows, weights, ordered=ordered)
    if x.size // x.shape[-1] > most_rows(ordered):  # As much would be gathered of each device.
        parts = parts.sum(axis=0, dtype=parts.dtype).reshape(1, *x.shape[:-1], -1)
    else:
        [parts] = with_sharding("s b t d", parts)
        parts = parts.reshape(-1, *x.shape[:-1], *weights.out_axes)
    if split:
        return parts
    total = added(parts)
    return (total if bias is None else total + bias).astype(dtype or x.dtype)


@functools.cache
def _shared_outputs(axes: int, cut: int) -> Callable[..., Array]:
    """The matmul of which every device has some outputs, with ``axes`` axes of outputs."""
    names = " ".join("f" if axis == cut else f"o{axis}" for axis in range(axes))

    @partitioned(f"b t d, f ..., {names} -> b t {names}")
    def matmul(
        x: Array,
        weights: PackedShares,
        bias: Array | None,
        *,
        ordered: bool,
        dtype: DTypeLike | None,
    ) -> Array:
        return QUANTISED_MATMUL(x, weights.own, bias, ordered=ordered, dtype=dtype)

    return matmul


@partitioned("b t f, f ... -> f b t d")
def _shared_inputs(x: Array, weights: PackedShares, *, ordered: bool) -> Array:
    """``[1, B, T, D]``: what a device's inputs add to every result."""
    return QUANTISED_MATMUL(x, weights.own, ordered=ordered)[None]


@partitioned("b t d, f ... -> b t f")
def _shared_gate(x: Array, weights: PackedShares, *, ordered: bool) -> Array:
    return QUANTISED_MATMUL(x, weights.own, ordered=ordered, gated=True)


def most_rows(ordered: bool) -> int:
    """Rows that the Hopper kernel takes; with more, XLA multiplies."""
    return hardware.DECODE_ROWS if ordered else MOST_ROWS


def quantised_matmul_xla(
    x: Array,
    weights: QuantisedWeights,
    bias: Array | None = None,
    *,
    ordered: bool = False,
    gated: bool = False,
    split: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """The matmul in plain JAX, the only one of its partials; differentiable in ``x``."""
    x, weights = in_turn(x, weights)
    plain = weights.plain()
    if plain.order is not None:
        x = jnp.take(x, plain.order, axis=-1)
    matrix = plain.dequantised(x.dtype)
    over = ((x.ndim - 1,), (matrix.ndim - 1,)), ((), ())
    precision = matmul_precision(x.dtype)
    out = jax.lax.dot_general(x, matrix, over, precision, preferred_element_type=dtype)
    out = out if bias is None else out + bias
    out = gate(out) if gated else out
    return out[None] if split else out


def in_turn(x: Array, weights: PyTree) -> tuple[Array, Any]:
    """The operands, so that the weights are dequantised when the rows are there and not before.

    Else a compiler may do it for all layers at once, or before the loop over rounds: a whole model
    in 16 bits. XLA for CPUs drops barriers first and orders operations then, so the codes depend
    on a row's number being NaN and infinite, which none is. On a mesh reading that one number would
    cost a transfer.
    """
    if not one_device():
        return jax.lax.optimization_barrier((x, weights))
    first = x[(0,) * x.ndim]
    never = jax.lax.stop_gradient(jnp.isnan(first) & jnp.isinf(first))
    codes = jnp.where(never, 0, weights.codes)
    return x, dataclasses.replace(weights, codes=codes.astype(weights.codes.dtype))


QUANTISED_MATMUL = op(quantised_matmul_xla)


@QUANTISED_MATMUL.kernel("mosaic")
def _mosaic(
    x: Array,
    weights: QuantisedWeights,
    bias: Array | None = None,
    *,
    ordered: bool = False,
    gated: bool = False,
    split: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """The matmul by the Hopper kernel; refuses what that cannot do."""
    hardware.require_hopper("the kernel for quantised weights")
    from longspec_jax.ops.matmul.packed import PackedMatrix

    if not isinstance(weights, PackedMatrix) or weights.floating:
        raise NotImplementedError(
            "the kernel for quantised weights reads packed ones, and no floats of 4 bits"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the kernel for quantised weights takes 16 bits, not {x.dtype}")
    if not one_device():
        raise NotImplementedError("a mesh cuts the weights, which only XLA's matmuls follow")
    rows = x.size // x.shape[-1]
    if not 0 < rows <= most_rows(ordered):
        raise NotImplementedError(
            f"the kernel for quantised weights takes 1 to {most_rows(ordered)} rows, not {rows}"
        )
    from longspec_jax.ops.matmul import quantised_mosaic  # Older versions of jax lack its needs.
    from longspec_jax.ops.matmul.quantised_tiles import quantised_tile

    columns = weights.out_axes[-1] if gated else math.prod(weights.out_axes)
    tile = quantised_tile(
        x.shape[-1],
        columns,
        bits=weights.bits,
        gated=gated,
        split=split,
        draft_rows=None if ordered or weights.group else rows,
    )
    out = quantised_mosaic.matmul(
        x.reshape(rows, -1),
        weights,
        None if bias is None else bias.reshape(-1),
        tile=tile,
        gated=gated,
        dtype=jnp.dtype(dtype or x.dtype),
    )
    return _shaped(out, x, weights, gated=gated, split=split)


@QUANTISED_MATMUL.kernel("pallas")
def _triton(
    x: Array,
    weights: QuantisedWeights,
    bias: Array | None = None,
    *,
    ordered: bool = False,
    gated: bool = False,
    split: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """The matmul by Triton's kernel; refuses what that does not serve."""
    rows = x.size // x.shape[-1]
    hardware.require_decode_step("Triton's kernel for quantised weights", rows, x.dtype)
    if x.dtype == jnp.float32:
        raise NotImplementedError("Triton's kernel for quantised weights takes 16 bits")
    if ordered or not isinstance(weights, QuantisedMatrix):
        raise NotImplementedError("packed weights, and one order, are the Hopper kernel's")
    if not one_device():
        raise NotImplementedError("a mesh cuts the weights, which only XLA's matmuls follow")
    from longspec_jax.ops.matmul import quantised_pallas

    if weights.order is not None:
        x = jnp.take(x, weights.order, axis=-1)
    tile = quantised_pallas.triton_tile(rows, weights, gated=gated, split=split)
    out = quantised_pallas.matmul(
        x.reshape(rows, -1),
        weights.flat(),
        None if bias is None else bias.reshape(-1),
        tile=tile,
        gated=gated,
        dtype=jnp.dtype(dtype or x.dtype),
    )
    return _shaped(out, x, weights, gated=gated, split=split)


def _shaped(out: Array, x: Array, weights: QuantisedWeights, *, gated: bool, split: bool) -> Array:
    """A kernel's result with all axes of rows and outputs; or partials ``[S, *rows, N]``."""
    if split:
        return out.reshape(-1, *x.shape[:-1], out.shape[-1])
    return out.reshape(*x.shape[:-1], *weights.out_axes[gated:])
