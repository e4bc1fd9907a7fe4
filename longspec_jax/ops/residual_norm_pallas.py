"""Residual addition and RMS norm as one Pallas kernel for Triton: a program a row."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.prefix_pallas import compiler_params


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def residual_norm(
    x: Array, delta: Array, scale: Array, eps: float, interpret: bool = False
) -> tuple[Array, Array]:
    """See :func:`longspec_jax.ops.residual_norm.residual_norm`."""
    rows = (-1, x.shape[-1])
    total, out = _rows(x.reshape(rows), delta.reshape(rows), scale, eps=eps, interpret=interpret)
    return total.reshape(x.shape), out.reshape(x.shape)


@partitioned("r d, r d, d -> r d, r d", cut=("r",))
def _rows(
    x: Array, delta: Array, scale: Array, *, eps: float, interpret: bool
) -> tuple[Array, Array]:
    """One launch: a program for each row."""
    width = x.shape[1]
    padded = pl.next_power_of_2(width)

    def kernel(x_ref, delta_ref, scale_ref, total_ref, out_ref) -> None:
        row, column = pl.program_id(0), jnp.arange(padded)
        mask = column < width
        total = pltriton.load(x_ref.at[row, column], mask=mask, other=0.0)
        total += pltriton.load(delta_ref.at[row, column], mask=mask, other=0.0)
        factor = pltriton.load(scale_ref.at[column], mask=mask, other=0.0).astype(jnp.float32)
        wide = total.astype(jnp.float32)
        wide *= jax.lax.rsqrt((wide * wide).sum() / width + eps)
        pltriton.store(total_ref.at[row, column], total, mask=mask)
        out = (wide * factor).astype(out_ref.dtype)
        pltriton.store(out_ref.at[row, column], out, mask=mask)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0],),
        out_shape=(shape, shape),
        compiler_params=compiler_params(warps=8, stages=1),
        interpret=interpret,
        name="residual_norm",
    )(x, delta, scale)
