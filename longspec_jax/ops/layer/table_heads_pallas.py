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
from longspec_jax.ops.layer.head_table import Angles, HeadTable
from longspec_jax.ops.triton_compiler import compiler_params

HEADS = 16


@functools.partial(jax.jit, static_argnames=("place", "interpret"))
def table_heads(
    table: HeadTable,
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
    block, column, row = (pl.program_id(axis) for axis in range(3))
    token = jnp.clip(tokens_ref[row, column], 0, steps_ref.shape[0] - 1)
    angle = row, column if place is None else place
    h = jnp.arange(pl.next_power_of_2(half))
    within = h < half

    def packed(head: jax.Array) -> tuple[Any, ...]:
        kv_head, packed_row = packed_rows(column * queries.heads + head, queries)
        return row, kv_head[:, None], packed_row[:, None]

    def of_token(head: jax.Array) -> tuple[Any, ...]:
        return row, column, head[:, None]

    def write(
        ref: Any,
        heads: int,
        block: jax.Array,
        slots: Callable[[jax.Array], jax.Array],
        target: Callable[[jax.Array], tuple[Any, ...]],
        rotated: bool,
    ) -> None:
        head = block * HEADS + jnp.arange(HEADS)
        exists = head < heads
        slot, mask = slots(head), exists[:, None] & within[None, :]
        scale = pltriton.load(scale_ref.at[token, slot], mask=exists, other=0.0)[:, None]

        def look_up(h: jax.Array) -> jax.Array:
            at = slot[:, None], h[None, :]
            steps = pltriton.load(steps_ref.at[token, *at], mask=mask, other=0)
            added = pltriton.load(bias_ref.at[at], mask=mask, other=0.0)
            return steps.astype(jnp.float32) * scale + added.astype(jnp.float32)

        low, high = look_up(h), look_up(h + half)
        if rotated:
            cos = pltriton.load(cos_ref.at[*angle, h], mask=within, other=0.0)[None, :]
            sin = pltriton.load(sin_ref.at[*angle, h], mask=within, other=0.0)[None, :]
            low, high = low * cos - high * sin, high * cos + low * sin
        at = target(head)
        pltriton.store(ref.at[*at, h[None, :]], low.astype(ref.dtype), mask=mask)
        pltriton.store(ref.at[*at, h[None, :] + half], high.astype(ref.dtype), mask=mask)

    kv_heads, groups, size = queries.kv_heads, queries.groups, queries.groups + 2
    parts = (
        (q_ref, queries.heads, lambda n: n // groups * size + n % groups, packed, True),
        (k_ref, kv_heads, lambda n: n * size + groups, of_token, True),
        (v_ref, kv_heads, lambda n: n * size + groups + 1, of_token, False),
    )
    first = 0
    for ref, heads, slots, target, rotated in parts:
        blocks = pl.cdiv(heads, HEADS)
        pl.when((block >= first) & (block < first + blocks))(
            functools.partial(write, ref, heads, block - first, slots, target, rotated)
        )
        first += blocks
