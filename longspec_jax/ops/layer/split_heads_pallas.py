"""Parting and rotating heads in one Pallas kernel for Triton: 16 heads of a token a program.

Queries are written in the order in which the attention kernels read them, packed; their usual shape
is a view of it that nobody copies (:mod:`longspec_jax.ops.attention.packing`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.attention.packing import PackedShape, packed_rows, unpack
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_compiler import compiler_params

HEADS = 16


@functools.partial(jax.jit, static_argnames=("interpret",))
@partitioned("b t k j h, b t c, b t c -> b t (k g) h, b t k h, b t k h")
def split_heads(
    qkv: Array, cos: Array, sin: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """See :func:`longspec_jax.ops.layer.split_heads.split_heads`."""
    batch, tokens, kv_heads, slots, width = qkv.shape
    rows, half = batch * tokens, width // 2
    queries = PackedShape(tokens=tokens, heads=kv_heads * (slots - 2), kv_heads=kv_heads)
    kernel = functools.partial(_kernel, queries=queries, half=half)
    q, k, v = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(queries.heads, HEADS) + 2 * pl.cdiv(kv_heads, HEADS), rows),
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, qkv.dtype)
            for shape in (
                (batch, kv_heads, queries.packed, width),
                (rows, kv_heads, width),
                (rows, kv_heads, width),
            )
        ),
        compiler_params=compiler_params(warps=4, stages=1),
        interpret=interpret,
        name="split_heads",
    )(
        qkv.reshape(rows, kv_heads * slots, width),
        cos.reshape(rows, half),
        sin.reshape(rows, half),
    )
    shape = (batch, tokens, kv_heads, width)
    return unpack(q, tokens), k.reshape(shape), v.reshape(shape)


def _kernel(
    qkv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *,
    queries: PackedShape,
    half: int,
) -> None:
    """Write some heads of one token: of queries, or of keys, or of values."""
    row, block = pl.program_id(1), pl.program_id(0)
    h = jnp.arange(pl.next_power_of_2(half))
    within = h < half

    def packed(head: jax.Array) -> tuple[jax.Array, ...]:
        flat = row % queries.tokens * queries.heads + head
        kv_head, place = packed_rows(flat, queries)
        return row // queries.tokens, kv_head[:, None], place[:, None]

    def write(
        ref: Any, heads: int, block: jax.Array, slots: Any, places: Any, rotated: bool
    ) -> None:
        head = block * HEADS + jnp.arange(HEADS)
        mask = (head < heads)[:, None] & within[None, :]
        source, target = (row, slots(head)[:, None]), places(head)
        low = pltriton.load(qkv_ref.at[*source, h[None, :]], mask=mask, other=0.0)
        high = pltriton.load(qkv_ref.at[*source, h[None, :] + half], mask=mask, other=0.0)
        if rotated:
            cos = pltriton.load(cos_ref.at[row, h], mask=within, other=0.0)[None, :]
            sin = pltriton.load(sin_ref.at[row, h], mask=within, other=0.0)[None, :]
            dtype, low, high = low.dtype, low.astype(jnp.float32), high.astype(jnp.float32)
            low, high = low * cos - high * sin, high * cos + low * sin
            low, high = low.astype(dtype), high.astype(dtype)
        pltriton.store(ref.at[*target, h[None, :]], low, mask=mask)
        pltriton.store(ref.at[*target, h[None, :] + half], high, mask=mask)

    kv_heads, groups, size = queries.kv_heads, queries.groups, queries.groups + 2
    parts = (
        (q_ref, queries.heads, lambda n: n // groups * size + n % groups, packed, True),
        (k_ref, kv_heads, lambda n: n * size + groups, lambda n: (row, n[:, None]), True),
        (v_ref, kv_heads, lambda n: n * size + groups + 1, lambda n: (row, n[:, None]), False),
    )
    first = 0
    for ref, heads, slots, places, rotated in parts:
        blocks = pl.cdiv(heads, HEADS)
        pl.when((block >= first) & (block < first + blocks))(
            functools.partial(write, ref, heads, block - first, slots, places, rotated)
        )
        first += blocks
