"""Tree attention on NVIDIA GPUs: masked speculative attention as a Pallas kernel for Triton.

A few hundred fresh keys under an arbitrary boolean mask (LongSpec section 3.3). Each row's online
softmax may start from a prefix's split partials, so that prefix, tree and merge together are two
kernels per layer. Without a prefix, keys that one step does not hold are split over programs, as a
prefix's are.

Jitted, so that the equal layers of a model are traced and lowered once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Queries
from longspec_jax.ops.attention import arrivals
from longspec_jax.ops.attention.bounds import reached_splits
from longspec_jax.ops.attention.fresh import attend_to_fresh, read_fresh, visit_fresh
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.online_softmax import (
    LOG2_E,
    empty_state,
    finish,
)
from longspec_jax.ops.attention.operands import TREE, Fresh
from longspec_jax.ops.attention.packing import PackedShape, flat_rows, pack, refuse_unsupported
from longspec_jax.ops.attention.row_access import load_queries, store_rows
from longspec_jax.ops.attention.splits import load_merged
from longspec_jax.ops.attention.tiles import TreeTile, tree_tile
from longspec_jax.ops.hardware import require_ampere
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_compiler import compiler_params


@functools.partial(jax.jit, static_argnames=("scale", "dtype", "tile", "interpret"))
@partitioned(TREE)
def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    tile: TreeTile | None = None,
    interpret: bool = False,
) -> Partial:
    """Attend where the mask is true; see :func:`reference.tree_attention`."""
    kv_heads, keys = fresh.keys.shape[2], fresh.keys.shape[1]
    refuse_unsupported(q, kv_heads)
    batch, tokens, heads, width = q.shape
    if not interpret and tile is None:
        require_ampere("the Pallas-Triton tree kernel")
    tile = tile or tree_tile(tokens, heads, kv_heads, width, keys, q.dtype.itemsize)
    out, lse = attend(
        *(q, fresh, ()),
        tile=tile,
        scale=width**-0.5 if scale is None else scale,
        split=0,
        slots=0,
        dtype=dtype,
        interpret=interpret,
    )
    return Partial(out.reshape(q.shape), lse.reshape(batch, tokens, heads))


def attend(
    q: Queries,
    fresh: Fresh,
    prefix: tuple[Array, ...],
    *,
    tile: TreeTile,
    scale: float,
    split: int,
    slots: int,
    dtype: DTypeLike,
    interpret: bool,
) -> tuple[Array, Array]:
    """Launch the kernel: outputs of type ``dtype`` and log-sum-exps of the flattened [T N] axis.

    ``prefix`` is nothing, or the row lengths and the partial results of the prefix's splits, each
    ``split`` of ``slots`` cache slots. With nothing, keys that one step does not hold are split
    over programs.
    """
    batch, tokens, heads, width = q.shape
    kv_heads, keys = fresh.keys.shape[2], fresh.keys.shape[1]
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads)
    blocks = 1 if prefix else pl.cdiv(keys, tile.keys)
    row_tiles = pl.cdiv(shape.packed, tile.rows)
    operands = [pack(q, kv_heads), fresh.keys, fresh.values, fresh.mask, *prefix]
    results = [
        jax.ShapeDtypeStruct((batch, tokens * heads, width), dtype),
        jax.ShapeDtypeStruct((batch, tokens * heads), jnp.float32),
    ]
    if blocks > 1:
        counters = arrivals.counters(batch, kv_heads, row_tiles)
        operands.append(counters)
        results += arrivals.partial_results(batch, blocks, kv_heads, shape.packed, width, counters)
    out, lse, *_ = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            tile=tile,
            scale=scale * LOG2_E,
            split=split,
            slots=slots,
            blocks=blocks,
            interpret=interpret,
        ),
        grid=(row_tiles * blocks, kv_heads, batch),
        out_shape=results,
        input_output_aliases={len(operands) - 1: 4} if blocks > 1 else {},
        compiler_params=compiler_params(tile.warps, tile.stages),
        interpret=interpret,
        name="speculative_attention" if prefix else "tree_attention",
    )(*operands)
    return out, lse


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    mask_ref: Any,
    *refs: Any,
    shape: PackedShape,
    tile: TreeTile,
    scale: float,
    split: int,
    slots: int,
    blocks: int,
    interpret: bool,
) -> None:
    """Attend with a tile of packed query rows of one key/value head to every tree key.

    Or, where the keys are split over programs, to those of one of several ``blocks``, which the
    last program to arrive merges.
    """
    refs, merging = (refs[1:3], refs[3:]) if blocks > 1 else (refs, ())
    *prefix_refs, out_ref, lse_ref = refs
    kv_head, batch = pl.program_id(1), pl.program_id(2)
    mine = pl.program_id(0) % blocks
    head, keys = (batch, kv_head), k_ref.shape[1]
    first = pl.program_id(0) // blocks * tile.rows
    (q,), (rows,) = load_queries(q_ref, head, first, (tile.rows,), shape)
    whole = blocks > 1 or keys <= tile.keys
    fresh_refs = k_ref, v_ref, mask_ref
    width = q.shape[1]
    tree = None
    if whole:
        tree = read_fresh(fresh_refs, head, rows, mine, block=tile.keys, width=width, shape=shape)
    if prefix_refs:
        length_ref, partial_ref, partial_lse_ref = prefix_refs
        splits = reached_splits(length_ref[batch], None, split=split, slots=slots)
        state = load_merged(
            *(partial_ref, partial_lse_ref, *splits, *head, rows),
            chunk=tile.partials,
            interpret=interpret,
        )
    else:
        state = empty_state(*q.shape)
    if tree is not None:
        state = visit_fresh(q, state, *tree, scale=scale, interpret=interpret)
    else:
        state = attend_to_fresh(
            *(q, rows, fresh_refs, head, state),
            steps=pl.cdiv(keys, tile.keys),
            block=tile.keys,
            shape=shape,
            scale=scale,
            interpret=interpret,
        )
    packed, valid = rows
    flat = flat_rows(packed, kv_head, shape), valid
    if not merging:
        store_rows(out_ref, lse_ref, (batch,), flat, finish(state))
        return
    arrivals.leave_and_merge(
        *(merging, (out_ref, lse_ref), head, pl.program_id(0) // blocks),
        *(mine, 0, blocks, rows, flat, state),
        interpret=interpret,
    )
