"""Prefix attention on NVIDIA GPUs: FlashDecoding as a Pallas kernel for Triton.

The cache is cut into splits of a fixed number of slots. One program attends with a tile of packed
query rows (the queries of every token and every head that read one key/value head) to one split
and leaves a float32 partial result, which :mod:`longspec_jax.ops.attention.splits` merges.

Programs whose split lies outside ``start <= s < length`` exit at once and write nothing, so time
follows the rows' lengths and not the capacity.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries
from longspec_jax.ops.attention import bounds
from longspec_jax.ops.attention.online_softmax import (
    LOG2_E,
    empty_state,
    finish,
)
from longspec_jax.ops.attention.packing import PackedShape, pack
from longspec_jax.ops.attention.row_access import load_queries, store_rows
from longspec_jax.ops.attention.slots import attend_to_slots, slots_of_split
from longspec_jax.ops.attention.tiles import PrefixTile
from longspec_jax.ops.triton_compiler import compiler_params


def split_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    start: Lengths | None = None,
    *,
    scale: float | None = None,
    tile: PrefixTile,
    interpret: bool = False,
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split, unmerged, each with its natural log-sum-exp.

    ``R`` counts the packed rows of :class:`PackedShape`. The entries of splits that a row does not
    reach are never written: read only the splits of :func:`bounds.reached_splits`.
    """
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    splits = pl.cdiv(slots, tile.split)
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads)
    kernel = functools.partial(
        _split_kernel,
        shape=shape,
        tile=tile,
        scale=(width**-0.5 if scale is None else scale) * LOG2_E,
        interpret=interpret,
    )
    return pl.pallas_call(
        bounds.with_optional_start(kernel, start),
        # Programs that share a split are neighbours, so its keys and values are read from memory
        # once and from the second-level cache afterwards.
        grid=(pl.cdiv(shape.packed, tile.total_rows), splits, kv_heads * batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, splits, kv_heads, shape.packed, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, kv_heads, shape.packed), jnp.float32),
        ),
        compiler_params=compiler_params(tile.warps, tile.stages),
        interpret=interpret,
        name="prefix_attention",
    )(*bounds.operands(length, start), pack(q, kv_heads), k, v)


def _split_kernel(
    length_ref: Any,
    start_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    shape: PackedShape,
    tile: PrefixTile,
    scale: float,
    interpret: bool,
) -> None:
    """Attend with one row tile of one key/value head to one split."""
    row_tile, split = pl.program_id(0), pl.program_id(1)
    batch, kv_head = head = pl.program_id(2) // shape.kv_heads, pl.program_id(2) % shape.kv_heads
    length, start = length_ref[batch], None if start_ref is None else start_ref[batch]
    lower, upper = slots_of_split(split, length, start, tile=tile, slots=k_ref.shape[2])

    def attend() -> None:
        queries, parts = load_queries(q_ref, head, row_tile * tile.total_rows, tile.rows, shape)
        states = [empty_state(*q.shape) for q in queries]
        states = attend_to_slots(
            *(queries, k_ref, v_ref, head, states, lower, upper),
            bounded=start is not None,
            tile=tile,
            scale=scale,
            interpret=interpret,
        )
        for state, rows in zip(states, parts, strict=True):
            store_rows(out_ref, lse_ref, (batch, split, kv_head), rows, finish(state))

    pl.when(lower < upper)(attend)
