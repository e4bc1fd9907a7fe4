"""Residual addition and RMS norm as one Pallas kernel for Triton: a program per row."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_compiler import compiler_params


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
@partitioned("b t d, s b t d, d -> b t d")
def residual_norm(
    x: Array, summands: Array, scale: Array, *, eps: float, interpret: bool = False
) -> tuple[Array, Array]:
    """See :func:`longspec_jax.ops.layer.residual_norm.residual_norm`; ``x`` is ``[B, T, D]``."""
    batch, tokens, width = x.shape
    rows = batch * tokens
    padded = pl.next_power_of_2(width)

    def kernel(x_ref, summands_ref, scale_ref, total_ref, out_ref) -> None:
        row, column = pl.program_id(0), jnp.arange(padded)
        mask = column < width
        delta = jnp.zeros(padded, jnp.float32)
        for index in range(summands.shape[0]):
            delta += pltriton.load(summands_ref.at[index, row, column], mask=mask, other=0.0)
        total = pltriton.load(x_ref.at[row, column], mask=mask, other=0.0) + delta
        total = total.astype(x.dtype)
        factor = pltriton.load(scale_ref.at[column], mask=mask, other=0.0).astype(jnp.float32)
        wide = total.astype(jnp.float32)
        wide *= jax.lax.rsqrt((wide * wide).sum() / width + eps)
        pltriton.store(total_ref.at[row, column], total, mask=mask)
        out = (wide * factor).astype(out_ref.dtype)
        pltriton.store(out_ref.at[row, column], out, mask=mask)

    shape = jax.ShapeDtypeStruct((rows, width), x.dtype)
    total, out = pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=(shape, shape),
        compiler_params=compiler_params(warps=8, stages=1),
        interpret=interpret,
        name="residual_norm",
    )(x.reshape(rows, width), summands.reshape(-1, rows, width), scale)
    return total.reshape(x.shape), out.reshape(x.shape)
