"""Chunks of a prompt on NVIDIA GPUs: causal attention behind a prefix, in Pallas for Triton.

What :mod:`longspec_jax.ops.attention.tree_pallas` does for a few nodes under any mask, for a few
thousand tokens under the one that prefill needs: tiles are large, what lies behind a tile's last
token is not read, and no mask is. Each row's online softmax starts from the prefix's split
partials.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from longspec_jax.axes import Array, Queries, TreeRows
from longspec_jax.ops.attention.bounds import reached_splits
from longspec_jax.ops.attention.online_softmax import LOG2_E, State, finish, product, update
from longspec_jax.ops.attention.packing import PackedShape, flat_rows, pack
from longspec_jax.ops.attention.row_access import load_queries
from longspec_jax.ops.attention.splits import load_merged
from longspec_jax.ops.attention.tiles import TreeTile
from longspec_jax.ops.triton_compiler import compiler_params


def attend(
    q: Queries,
    keys: TreeRows,
    values: TreeRows,
    prefix: tuple[Array, ...],
    *,
    tile: TreeTile,
    scale: float,
    split: int,
    slots: int,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """Launch the kernel.

    Args:
      q: the chunk's queries.
      keys: the chunk's own, as many as queries.
      values: likewise.
      prefix: the rows' cached tokens before the chunk, and what the prefix kernel left for these
        queries: the partial results of its splits.
      tile: how a program works.
      scale: factor on the scores.
      split: cache slots of a split.
      slots: of the cache.
      interpret: run step by step on any platform.
    """
    batch, tokens, heads, width = q.shape
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=keys.shape[2])
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            tile=tile,
            scale=scale * LOG2_E,
            split=split,
            slots=slots,
            interpret=interpret,
        ),
        grid=(pl.cdiv(shape.packed, tile.rows), shape.kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, tokens * heads, width), q.dtype),
        compiler_params=compiler_params(tile.warps, tile.stages),
        interpret=interpret,
        name="chunk_attention",
    )(pack(q, shape.kv_heads), keys, values, *prefix)
    return out.reshape(q.shape)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    length_ref: Any,
    partial_ref: Any,
    partial_lse_ref: Any,
    out_ref: Any,
    *,
    shape: PackedShape,
    tile: TreeTile,
    scale: float,
    split: int,
    slots: int,
    interpret: bool,
) -> None:
    """Attend with a tile of packed query rows of one key/value head to the keys up to their own."""
    # The last tokens see the most keys: their programs begin first.
    index = pl.num_programs(0) - 1 - pl.program_id(0)
    kv_head, batch = pl.program_id(1), pl.program_id(2)
    (q,), (rows,) = load_queries(q_ref, (batch, kv_head), index * tile.rows, (tile.rows,), shape)
    packed, valid = rows
    token = packed // shape.groups
    h = jnp.arange(q.shape[1])
    within = (h < q_ref.shape[3])[None, :]

    def visit(block: jax.Array, state: State, *, whole: bool) -> State:
        key = block * tile.keys + jnp.arange(tile.keys)
        place = (batch, key[:, None], kv_head, h[None, :])
        exists = within if whole else (key < shape.tokens)[:, None] & within
        k = pltriton.load(k_ref.at[place], mask=exists, other=0.0)
        v = pltriton.load(v_ref.at[place], mask=exists, other=0.0)
        scores = product(q, k, (1, 1)) * scale
        if not whole:
            scores = jnp.where(key[None, :] <= token[:, None], scores, -jnp.inf)
        return update(state, scores, v, interpret)

    splits = reached_splits(length_ref[batch], None, split=split, slots=slots)
    state = load_merged(
        *(partial_ref, partial_lse_ref, *splits, batch, kv_head, rows),
        chunk=tile.partials,
        interpret=interpret,
    )
    first = index * tile.rows // shape.groups
    last = jnp.minimum((index * tile.rows + tile.rows - 1) // shape.groups, shape.tokens - 1)
    # Keys up to the tile's first token are seen by all of its rows.
    seen, end = (first + 1) // tile.keys, last // tile.keys + 1
    state = jax.lax.fori_loop(0, seen, functools.partial(visit, whole=True), state)
    state = jax.lax.fori_loop(seen, end, functools.partial(visit, whole=False), state)
    out, _ = finish(state)
    row, mask = flat_rows(packed, kv_head, shape), valid[:, None] & within
    pltriton.store(
        out_ref.at[batch, row[:, None], h[None, :]], out.astype(out_ref.dtype), mask=mask
    )
