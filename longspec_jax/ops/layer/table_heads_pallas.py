"""Looking up and rotating heads in one Pallas kernel for Triton: 16 heads of a token a program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.axes import Array
from longspec_jax.ops.attention.packing import PackedShape, packed_rows, unpack
from longspec_jax.ops.layer.angles import Angles
from longspec_jax.ops.layer.written_heads import HEADS, write_heads
from longspec_jax.ops.products.int8 import Int8Rows
from longspec_jax.ops.triton_compiler import compiler_params


@functools.partial(jax.jit, static_argnames=("place", "interpret"))
def table_heads(
    table: Int8Rows,
    bias: Array,
    tokens: Array,
    angles: Angles,
    *,
    place: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See :func:`longspec_jax.ops.layer.table_heads.table_heads`."""
    vocabulary, kv_heads, slots, width = table.steps.shape
    batch, length = tokens.shape
    queries = PackedShape(tokens=length, heads=kv_heads * (slots - 2), kv_heads=kv_heads)
    q, k, v = pl.pallas_call(
        functools.partial(_kernel, queries=queries, half=width // 2, place=place),
        grid=(pl.cdiv(queries.heads, HEADS) + 2 * pl.cdiv(kv_heads, HEADS), length, batch),
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, bias.dtype)
            for shape in (
                (batch, kv_heads, queries.packed, width),
                (batch, length, kv_heads, width),
                (batch, length, kv_heads, width),
            )
        ),
        compiler_params=compiler_params(warps=4, stages=1),
        interpret=interpret,
        name="table_heads",
    )(
        table.steps.reshape(vocabulary, kv_heads * slots, width),
        table.scale.reshape(vocabulary, kv_heads * slots),
        bias.reshape(kv_heads * slots, width),
        tokens.astype(jnp.int32),
        angles.cos,
        angles.sin,
    )
    return unpack(q, length), k, v


def _kernel(
    steps_ref: Any,
    scale_ref: Any,
    bias_ref: Any,
    tokens_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *,
    queries: PackedShape,
    half: int,
    place: int | None,
) -> None:
    """Write some heads of one token: of queries, or of keys, or of values."""
    column, row = pl.program_id(1), pl.program_id(2)
    token = jnp.clip(tokens_ref[row, column], 0, steps_ref.shape[0] - 1)

    def packed(head: jax.Array) -> tuple[Any, ...]:
        kv_head, packed_row = packed_rows(column * queries.heads + head, queries)
        return row, kv_head[:, None], packed_row[:, None]

    def read(
        slot: jax.Array, exists: jax.Array, mask: jax.Array
    ) -> Callable[[jax.Array], jax.Array]:
        scale = pltriton.load(scale_ref.at[token, slot], mask=exists, other=0.0)[:, None]

        def look_up(h: jax.Array) -> jax.Array:
            at = slot[:, None], h[None, :]
            steps = pltriton.load(steps_ref.at[token, *at], mask=mask, other=0)
            added = pltriton.load(bias_ref.at[at], mask=mask, other=0.0)
            return steps.astype(jnp.float32) * scale + added.astype(jnp.float32)

        return look_up

    write_heads(
        (q_ref, k_ref, v_ref),
        (packed, lambda head: (row, column, head[:, None])),
        (cos_ref, sin_ref),
        (row, column if place is None else place),
        read,
        queries=queries,
        half=half,
    )
