"""Parting and rotating heads in one Pallas kernel for Triton: 16 heads of a token a program.

Queries are written in the order in which the attention kernels read them, packed; their usual shape
is a view of it that nobody copies (:mod:`longspec_jax.ops.attention.packing`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.attention.packing import PackedShape, packed_rows, unpack
from longspec_jax.ops.layer.written_heads import HEADS, write_heads
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_compiler import compiler_params


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
    row = pl.program_id(1)

    def packed(head: jax.Array) -> tuple[Any, ...]:
        flat = row % queries.tokens * queries.heads + head
        kv_head, place = packed_rows(flat, queries)
        return row // queries.tokens, kv_head[:, None], place[:, None]

    def read(slot: jax.Array, _: jax.Array, mask: jax.Array) -> Callable[[jax.Array], jax.Array]:
        at = row, slot[:, None]
        return lambda h: pltriton.load(qkv_ref.at[*at, h[None, :]], mask=mask, other=0.0)

    write_heads(
        (q_ref, k_ref, v_ref),
        (packed, lambda head: (row, head[:, None])),
        (cos_ref, sin_ref),
        (row,),
        read,
        queries=queries,
        half=half,
    )
