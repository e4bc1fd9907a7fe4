"""Prefix attention on NVIDIA GPUs: FlashDecoding as a Pallas kernel for Triton.

The cache is cut into splits of a fixed number of slots. One program attends with a tile of packed
query rows (the queries of every token and every head that read one key/value head) to one split
and leaves a float32 partial result, which :mod:`longspec_jax.ops.attention.splits` merges.

Programs whose split lies outside ``start <= s < length`` exit at once and write nothing, so time
follows the rows' lengths and not the capacity.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries
from longspec_jax.ops.attention import bounds
from longspec_jax.ops.attention.online_softmax import (
    LOG2_E,
    State,
    empty_state,
    exp2,
    finish,
    product,
)
from longspec_jax.ops.attention.packing import PackedShape, pack
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
    batch, kv_head = pl.program_id(2) // shape.kv_heads, pl.program_id(2) % shape.kv_heads
    lower = split * tile.split
    slots, width = k_ref.shape[2:]
    upper = jnp.minimum(jnp.minimum(length_ref[batch], slots), lower + tile.split)
    if start_ref is not None:
        lower = jnp.maximum(lower, start_ref[batch])
    padded = pl.next_power_of_2(width)
    h = jnp.arange(padded)
    within = (h < width)[None, :]

    def attend() -> None:
        first = row_tile * tile.total_rows
        queries, places = _load_queries(q_ref, batch, kv_head, h, within, first, tile.rows, shape)

        def visit(offset: jax.Array, states: list[State], edge: bool) -> list[State]:
            slot = offset + jnp.arange(tile.slots)
            seen = (slot >= lower) & (slot < upper)
            # Slots beyond the length may hold anything, NaN included: they are never read.
            mask = within if not edge else within & seen[:, None]
            plain = not edge and padded == width

            def read(ref: Any) -> jax.Array:
                source = ref.at[batch, kv_head, slot[:, None], h[None, :]]
                if plain:
                    return pltriton.load(source)
                return pltriton.load(source, mask=mask, other=0.0)

            k = read(k_ref)
            scores = [product(q, k, (1, 1)) * scale for q in queries]
            if edge:
                scores = [jnp.where(seen[None, :], s, -jnp.inf) for s in scores]
            return _update(states, scores, read(v_ref), interpret)

        bounded = start_ref is not None
        states = _visit_blocks(visit, tile, padded, lower, upper, bounded)
        for state, (packed, valid, mask) in zip(states, places, strict=True):
            out, lse = finish(state)
            target = out_ref.at[batch, split, kv_head, packed[:, None], h[None, :]]
            pltriton.store(target, out, mask=mask)
            pltriton.store(lse_ref.at[batch, split, kv_head, packed], lse, mask=valid)

    pl.when(lower < upper)(attend)


def _load_queries(
    q_ref: Any,
    batch: jax.Array,
    kv_head: jax.Array,
    h: jax.Array,
    within: jax.Array,
    first: jax.Array,
    counts: tuple[int, ...],
    shape: PackedShape,
) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array, jax.Array]]]:
    """The packed rows from ``first`` on in parts of ``counts``: rows and masks of each."""
    queries, places = [], []
    for count in counts:
        packed = first + jnp.arange(count)
        valid = packed < shape.packed
        mask = valid[:, None] & within
        rows = q_ref.at[batch, kv_head, packed[:, None], h[None, :]]
        queries.append(pltriton.load(rows, mask=mask, other=0.0))
        places.append((packed, valid, mask))
        first += count
    return queries, places


def _update(
    states: list[State], scores: list[jax.Array], v: jax.Array, interpret: bool
) -> list[State]:
    """The softmax of each part of the rows after one more block, of which it sees a slot."""
    new = []
    for s, (top, total, acc) in zip(scores, states, strict=True):
        # Every visited block holds a slot the row sees, so this maximum is finite.
        new_top = jnp.maximum(top, s.max(axis=1))
        weight = exp2(s - new_top[:, None], interpret)
        keep = exp2(top - new_top, interpret)
        total = total * keep + weight.sum(axis=1)
        acc = acc * keep[:, None] + product(weight.astype(v.dtype), v, (1, 0))
        new.append((new_top, total, acc))
    return new


def _visit_blocks(
    visit: Callable[..., list[State]],
    tile: PrefixTile,
    width: int,
    lower: jax.Array,
    upper: jax.Array,
    bounded: bool,
) -> list[State]:
    """The softmax over the slots ``lower <= s < upper``, a block of slots at a time.

    Whole blocks need no mask; at most one partial block at either end does, at the lower one only
    where rows are ``bounded`` below.
    """
    inner = pl.cdiv(lower, tile.slots)
    outer = upper // tile.slots
    states = [empty_state(count, width) for count in tile.rows]
    if bounded:
        ragged = ((lower % tile.slots) > 0) & (inner <= outer)
        states = jax.lax.fori_loop(
            0,
            ragged.astype(jnp.int32),
            lambda _, s: visit((inner - 1) * tile.slots, s, edge=True),
            states,
        )
    states = jax.lax.fori_loop(
        inner, outer, lambda block, s: visit(block * tile.slots, s, edge=False), states
    )
    ragged = upper > jnp.maximum(outer * tile.slots, lower)
    return jax.lax.fori_loop(
        0,
        ragged.astype(jnp.int32),
        lambda _, s: visit(outer * tile.slots, s, edge=True),
        states,
    )
