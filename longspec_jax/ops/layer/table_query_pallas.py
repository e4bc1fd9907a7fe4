"""The stream and its folded queries in one Pallas kernel for Triton: 16 heads of a token a program.

Every program adds up its token's whole stream, for the norm's factor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.attention.packing import PackedShape, packed_rows, unpack
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.products.int8 import Int8Rows
from longspec_jax.ops.triton_compiler import compiler_params

HEADS = 16


@functools.partial(jax.jit, static_argnames=("place", "eps", "kv_heads", "interpret"))
def table_query(
    table: Int8Rows,
    bias: Array,
    embedding: Array,
    tokens: Array,
    summands: Array,
    angles: Angles,
    *,
    place: int,
    eps: float,
    kv_heads: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See :func:`longspec_jax.ops.layer.table_query.table_query`."""
    (batch, length), (heads, width) = tokens.shape, bias.shape
    queries = PackedShape(tokens=length, heads=heads, kv_heads=kv_heads)
    dtype = embedding.dtype
    total, q = pl.pallas_call(
        functools.partial(_kernel, queries=queries, half=width // 2, place=place, eps=eps),
        grid=(pl.cdiv(heads, HEADS), length, batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, length, embedding.shape[1]), dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, queries.packed, width), dtype),
        ),
        compiler_params=compiler_params(warps=8, stages=1),
        interpret=interpret,
        name="table_query",
    )(
        table.steps,
        table.scale,
        bias,
        embedding,
        tokens.astype(jnp.int32),
        summands,
        angles.cos,
        angles.sin,
    )
    return total, unpack(q, length)


def _kernel(
    steps_ref: Any,
    scale_ref: Any,
    bias_ref: Any,
    embedding_ref: Any,
    tokens_ref: Any,
    summands_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    total_ref: Any,
    q_ref: Any,
    *,
    queries: PackedShape,
    half: int,
    place: int,
    eps: float,
) -> None:
    """Write the queries of some heads of one token, and of the first of them its stream."""
    block, column, row = (pl.program_id(axis) for axis in range(3))
    vocabulary, model_width = embedding_ref.shape
    token = jnp.clip(tokens_ref[row, column], 0, vocabulary - 1)

    def added(at: jax.Array, mask: jax.Array) -> jax.Array:
        total = jnp.zeros(at.shape, jnp.float32)
        for index in range(summands_ref.shape[0]):
            some = pltriton.load(summands_ref.at[index, row, column, at], mask=mask, other=0.0)
            total += some.astype(jnp.float32)
        return total

    d = jnp.arange(pl.next_power_of_2(model_width))
    inside = d < model_width
    embedded = pltriton.load(embedding_ref.at[token, d], mask=inside, other=0.0)
    total = (embedded.astype(jnp.float32) + added(d, inside)).astype(total_ref.dtype)
    pl.when(block == 0)(lambda: pltriton.store(total_ref.at[row, column, d], total, mask=inside))
    wide = total.astype(jnp.float32)
    factor = jax.lax.rsqrt((wide * wide).sum() / model_width + eps)

    head = block * HEADS + jnp.arange(HEADS)
    exists = head < queries.heads
    h = jnp.arange(pl.next_power_of_2(half))
    within = h < half
    mask = exists[:, None] & within[None, :]
    scale = pltriton.load(scale_ref.at[token, head], mask=exists, other=0.0)[:, None]

    def query(h: jax.Array) -> jax.Array:
        at = head[:, None], h[None, :]
        steps = pltriton.load(steps_ref.at[token, *at], mask=mask, other=0)
        of_output = added(model_width + at[0] * 2 * half + at[1], mask)
        bias = pltriton.load(bias_ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
        return (steps.astype(jnp.float32) * scale + of_output) * factor + bias

    low, high = query(h), query(h + half)
    cos = pltriton.load(cos_ref.at[row, place, h], mask=within, other=0.0)[None, :]
    sin = pltriton.load(sin_ref.at[row, place, h], mask=within, other=0.0)[None, :]
    low, high = low * cos - high * sin, high * cos + low * sin
    kv_head, packed_row = packed_rows(column * queries.heads + head, queries)
    at = row, kv_head[:, None], packed_row[:, None]
    pltriton.store(q_ref.at[*at, h[None, :]], low.astype(q_ref.dtype), mask=mask)
    pltriton.store(q_ref.at[*at, h[None, :] + half], high.astype(q_ref.dtype), mask=mask)
