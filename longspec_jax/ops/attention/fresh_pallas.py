"""Attention to fresh tokens on NVIDIA GPUs: a tree or a prompt's chunk, in Pallas for Triton.

A tree is a few hundred keys under an arbitrary boolean mask (LongSpec section 3.3). Without a
prefix, keys that one step does not hold are split over programs, as a prefix's are. A chunk is a
few thousand tokens under the causal mask: tiles are large, what lies after a tile's last token is
not read, and no mask is. Each row's online softmax may start from the prefix's split partials, so
that prefix, fresh tokens and merge together are two kernels per layer.

Jitted, so that the equal layers of a model are traced and lowered once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Queries, Ref
from longspec_jax.ops.attention.online_softmax import (
    State,
    attend_to_fresh,
    empty_state,
    finish,
    load_queries,
    matmul,
    read_fresh,
    store_rows,
    update,
    visit_fresh,
)
from longspec_jax.ops.attention.operands import TREE_AXES, Fresh, Partial, Prefix
from longspec_jax.ops.attention.packing import Problem, pack, refuse_unsupported
from longspec_jax.ops.attention.splits import (
    counters,
    leave_and_merge,
    load_merged,
    partial_results,
    reached_splits,
)
from longspec_jax.ops.attention.tiles import TreeTile, chunk_tile, tree_tile
from longspec_jax.ops.hardware import require_ampere
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_launch import triton_call


@partitioned(TREE_AXES)
@launcher("scale", "cap", "dtype", "tile", "interpret")
def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    cap: float | None = None,
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
    problem = Problem.of(
        q, kv_heads, scale, slots=0, splits=0, step=0, interpret=interpret, cap=cap
    )
    out, lse = attend_to_tree(q, fresh, (), tile, problem, dtype)
    return Partial(out.reshape(q.shape), lse.reshape(batch, tokens, heads))


def attend_after(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    past: tuple[Array, ...],
    tile: TreeTile | None,
    problem: Problem,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Attend to a tree or a chunk after a prefix, as :func:`attend_to_tree`.

    ``past`` are the row lengths and the partial results of the prefix's splits.
    """
    sizes = problem.tokens, problem.heads, problem.kv_heads, q.shape[3]
    if fresh.mask is not None:
        tile = tile or tree_tile(*sizes, fresh.keys.shape[1], q.dtype.itemsize)
        return attend_to_tree(q, fresh, past, tile, problem, dtype)
    if prefix.oldest is not None:
        past += (prefix.oldest.astype(jnp.int32),)
    tile = tile or chunk_tile(*sizes, q.dtype.itemsize)
    return _attend_to_chunk(q, fresh, past, tile, problem, dtype)


def attend_to_tree(
    q: Queries,
    fresh: Fresh,
    prefix: tuple[Array, ...],
    tile: TreeTile,
    problem: Problem,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Launch the kernel: outputs of type ``dtype`` and log-sum-exps of the flattened [T N] axis.

    ``prefix`` is nothing, or the row lengths and the partial results of the prefix's splits. With
    nothing, keys that one step does not hold are split over programs.
    """
    batch, tokens, heads, width = q.shape
    kv_heads, keys = fresh.keys.shape[2], fresh.keys.shape[1]
    blocks = 1 if prefix else pl.cdiv(keys, tile.keys)
    row_tiles = pl.cdiv(problem.packed, tile.rows)
    operands = [pack(q, kv_heads), fresh.keys, fresh.values, fresh.mask, *prefix]
    results = [
        jax.ShapeDtypeStruct((batch, tokens * heads, width), dtype),
        jax.ShapeDtypeStruct((batch, tokens * heads), jnp.float32),
    ]
    if blocks > 1:
        arrived = counters(batch, kv_heads, row_tiles)
        operands.append(arrived)
        results += partial_results(batch, blocks, kv_heads, problem.packed, width, arrived)
    out, lse, *_ = triton_call(
        functools.partial(_tree_kernel, tile=tile, problem=problem, blocks=blocks),
        grid=(row_tiles * blocks, kv_heads, batch),
        out_shape=results,
        input_output_aliases={len(operands) - 1: 4} if blocks > 1 else {},
        warps=tile.warps,
        stages=tile.stages,
        interpret=problem.interpret,
        name="speculative_attention" if prefix else "tree_attention",
    )(*operands)
    return out, lse


def _tree_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    mask_ref: Ref,
    *refs: Ref,
    tile: TreeTile,
    problem: Problem,
    blocks: int,
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
    (q,), (rows,) = load_queries(q_ref, head, first, (tile.rows,), problem)
    whole = blocks > 1 or keys <= tile.keys
    fresh_refs = k_ref, v_ref, mask_ref
    tree = None
    if whole:
        tree = read_fresh(fresh_refs, rows, mine, block=tile.keys, width=q.shape[1])
    if prefix_refs:
        length_ref, *partial_refs = prefix_refs
        splits = reached_splits(length_ref[batch], None, problem)
        state = load_merged(partial_refs, splits, rows, tile.partials)
    else:
        state = empty_state(*q.shape)
    if tree is not None:
        state = visit_fresh(q, state, tree, problem)
    else:
        steps = pl.cdiv(keys, tile.keys)
        state = attend_to_fresh(q, rows, fresh_refs, state, steps=steps, block=tile.keys)
    flat, results = rows.flat, (out_ref, lse_ref)
    if not merging:
        store_rows(results, (batch,), flat, finish(state))
        return
    row_tile, splits = pl.program_id(0) // blocks, (0, blocks)
    leave_and_merge(
        merging, results, rows, flat, state, row_tile=row_tile, split=mine, splits=splits
    )


def _attend_to_chunk(
    q: Queries,
    fresh: Fresh,
    prefix: tuple[Array, ...],
    tile: TreeTile,
    problem: Problem,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    """Launch the kernel, as :func:`attend_to_tree`.

    In a layer with a window ``prefix`` has the first position that each query sees, too.
    """
    batch, tokens, heads, width = q.shape
    out, lse = triton_call(
        functools.partial(_chunk_kernel, tile=tile, problem=problem),
        grid=(pl.cdiv(problem.packed, tile.rows), problem.kv_heads, batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, tokens * heads, width), dtype),
            jax.ShapeDtypeStruct((batch, tokens * heads), jnp.float32),
        ),
        warps=tile.warps,
        stages=tile.stages,
        interpret=problem.interpret,
        name="chunk_attention",
    )(pack(q, problem.kv_heads), fresh.keys, fresh.values, *prefix)
    return out, lse


def _chunk_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    length_ref: Ref,
    partial_ref: Ref,
    partial_lse_ref: Ref,
    *refs: Ref,
    tile: TreeTile,
    problem: Problem,
) -> None:
    """Attend with a tile of packed query rows of one key/value head to the keys up to their own."""
    *window_refs, out_ref, lse_ref = refs
    # The last tokens see the most keys: their programs begin first.
    index = pl.num_programs(0) - 1 - pl.program_id(0)
    kv_head, batch = pl.program_id(1), pl.program_id(2)
    (q,), (rows,) = load_queries(q_ref, (batch, kv_head), index * tile.rows, (tile.rows,), problem)
    token = rows.packed // problem.groups
    h = jnp.arange(q.shape[1])
    within = (h < q_ref.shape[3])[None, :]
    oldest = None
    if window_refs:
        oldest = pltriton.load(window_refs[0].at[batch, token], mask=rows.valid, other=0)
        oldest = oldest - length_ref[batch]

    def visit(block: jax.Array, state: State, *, whole: bool) -> State:
        key = block * tile.keys + jnp.arange(tile.keys)
        place = (batch, key[:, None], kv_head, h[None, :])
        exists = within if whole else (key < problem.tokens)[:, None] & within
        k = pltriton.load(k_ref.at[place], mask=exists, other=0.0)
        v = pltriton.load(v_ref.at[place], mask=exists, other=0.0)
        scores = problem.scores(matmul(q, k, (1, 1)))
        if not whole:
            seen = key[None, :] <= token[:, None]
            if oldest is not None:
                seen &= key[None, :] >= oldest[:, None]
            scores = jnp.where(seen, scores, -jnp.inf)
        return update(state, scores, v, problem.interpret)

    splits = reached_splits(length_ref[batch], None, problem)
    state = load_merged((partial_ref, partial_lse_ref), splits, rows, tile.partials)
    first = index * tile.rows // problem.groups
    last = (index * tile.rows + tile.rows - 1) // problem.groups
    last = jnp.minimum(last, problem.tokens - 1)
    # Keys up to the tile's first token are seen by all of its rows; through windows, perhaps none.
    seen, end = (first + 1) // tile.keys, last // tile.keys + 1
    if oldest is not None:
        [oldest_ref] = window_refs
        seen = jnp.maximum(oldest_ref[batch, first] - length_ref[batch], 0) // tile.keys
    else:
        state = jax.lax.fori_loop(0, seen, functools.partial(visit, whole=True), state)
    state = jax.lax.fori_loop(seen, end, functools.partial(visit, whole=False), state)
    store_rows((out_ref, lse_ref), (batch,), rows.flat, finish(state))
