"""Prefix attention on NVIDIA GPUs: FlashDecoding as Pallas kernels for Triton.

A row is cut into splits by its own length, as many as the tile says. One program attends with a
tile of packed query rows (the queries of every token and every head that read one key/value head)
to one split. Programs whose split lies outside ``start <= s < length`` exit at once and write
nothing, so time follows the rows' lengths and not the capacity.

:func:`split_attention` leaves a float32 partial result of every split. :func:`joined_attention`
is for few query rows, as of a plain step, of which a second launch takes a tenth of the time at 4k:
attention to the prefix, to fresh tokens under a mask, and their merge in one launch. There the
program of a row's last split, which is seldom a whole one, begins with the fresh tokens. The last
program of a row tile to arrive merges the splits in ascending order: the order in which programs
arrive changes nothing but which one merges.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Queries, Ref
from longspec_jax.ops.attention.online_softmax import (
    attend_to_fresh,
    attend_to_slots,
    empty_state,
    finish,
    load_queries,
    load_windows,
    slots_of_split,
    store_rows,
)
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.packing import Problem, pack, refuse_unsupported
from longspec_jax.ops.attention.splits import (
    MERGE_ROWS,
    counters,
    leave_and_merge,
    partial_results,
    reached_splits,
    row_operands,
    with_row_operands,
)
from longspec_jax.ops.attention.tiles import PrefixTile
from longspec_jax.ops.triton_launch import triton_call


def split_attention(
    q: Queries, prefix: Prefix, tile: PrefixTile, problem: Problem
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split, unmerged, each with its natural log-sum-exp.

    ``R`` counts the packed rows of :class:`Problem`. The entries of splits that a row does not
    reach are never written: read only those of ``reached_splits``.
    """
    batch, kv_heads, width = q.shape[0], problem.kv_heads, q.shape[3]
    splits, packed = problem.splits, problem.packed
    kernel = functools.partial(_split_kernel, tile=tile, problem=problem)
    return triton_call(
        with_row_operands(kernel, prefix),
        # Programs that share a split are neighbours, so its keys and values are read from memory
        # once and from the second-level cache afterwards.
        grid=(pl.cdiv(packed, tile.total_rows), splits, kv_heads * batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, splits, kv_heads, packed, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, kv_heads, packed), jnp.float32),
        ),
        warps=tile.warps,
        stages=tile.stages,
        interpret=problem.interpret,
        name="prefix_attention",
    )(*row_operands(prefix), pack(q, kv_heads), prefix.keys, prefix.values)


def _split_kernel(
    length_ref: Ref,
    start_ref: Ref,
    row_ref: Ref,
    oldest_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    lse_ref: Ref,
    *,
    tile: PrefixTile,
    problem: Problem,
) -> None:
    """Attend with one row tile of one key/value head to one split."""
    row_tile, split = pl.program_id(0), pl.program_id(1)
    kv_heads = problem.kv_heads
    batch, kv_head = head = pl.program_id(2) // kv_heads, pl.program_id(2) % kv_heads
    start = None if start_ref is None else start_ref[batch]
    cached = head if row_ref is None else (row_ref[batch], kv_head)
    length = length_ref[batch]
    slots = slots_of_split(split, length, start, problem)

    def attend() -> None:
        queries, parts = load_queries(q_ref, head, row_tile * tile.total_rows, tile.rows, problem)
        windows = load_windows(oldest_ref, length, parts)
        states = [empty_state(*q.shape) for q in queries]
        cache, bounded = (k_ref, v_ref), start is not None
        found = attend_to_slots(
            queries, cache, cached, states, slots, tile, problem, bounded=bounded, windows=windows
        )
        for state, rows in zip(found, parts, strict=True):
            rows.store((out_ref, lse_ref), split, state)

    pl.when(slots[0] < slots[1])(attend)


def joins(tile: PrefixTile) -> bool:
    """Whether one program merges a row tile as fast as several would in a launch of their own.

    64 rows of 4 splits take equally long either way, of 16 splits 5 us longer in one.
    """
    return tile.rows == (MERGE_ROWS,)


def joined_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh | None,
    tile: PrefixTile,
    problem: Problem,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B R H"], Float[Array, "B R"]]:
    """Attend to the slots ``start <= s < length`` and to the fresh tokens, where there are any.

    Returns:
      Outputs of type ``dtype`` and natural log-sum-exps of the flattened [T N] axis; 0 and -inf for
      rows that see nothing.
    """
    batch, tokens, heads, width = q.shape
    kv_heads = problem.kv_heads
    refuse_unsupported(q, kv_heads)
    splits, row_tiles = problem.splits, pl.cdiv(problem.packed, tile.total_rows)
    operands = [*row_operands(prefix), pack(q, kv_heads), prefix.keys, prefix.values]
    if fresh is not None:
        operands += [fresh.keys, fresh.values, fresh.seen(prefix)]
    kernel = functools.partial(_joined_kernel, tile=tile, problem=problem)
    arrived = counters(batch, kv_heads, row_tiles)
    out, lse, *_ = triton_call(
        with_row_operands(kernel, prefix),
        # Programs that share a split are neighbours, as in the prefix kernel.
        grid=(row_tiles, splits, kv_heads * batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, tokens * heads, width), dtype),
            jax.ShapeDtypeStruct((batch, tokens * heads), jnp.float32),
            *partial_results(batch, splits, kv_heads, problem.packed, width, arrived),
        ),
        input_output_aliases={len(operands): 4},
        warps=tile.warps,
        stages=tile.stages,
        interpret=problem.interpret,
        name="joined_attention",
    )(*operands, arrived)
    return out, lse


def _joined_kernel(
    length_ref: Ref,
    start_ref: Ref,
    row_ref: Ref,
    oldest_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    *refs: Ref,
    tile: PrefixTile,
    problem: Problem,
) -> None:
    """Attend with one row tile of one key/value head to one split, and merge if it is the last."""
    *fresh_refs, _, out_ref, lse_ref = refs[:-3]
    row_tile, split = pl.program_id(0), pl.program_id(1)
    kv_heads = problem.kv_heads
    batch, kv_head = head = pl.program_id(2) // kv_heads, pl.program_id(2) % kv_heads
    length, start = length_ref[batch], None if start_ref is None else start_ref[batch]
    cached = head if row_ref is None else (row_ref[batch], kv_head)
    slots = slots_of_split(split, length, start, problem)
    first, last = reached_splits(length, start, problem)
    # A row that sees no slot is the first program's.
    first, last = jnp.where(first < last, first, 0), jnp.where(first < last, last, 1)

    def attend() -> None:
        row = row_tile * tile.total_rows
        (q,), (rows,) = load_queries(q_ref, head, row, (MERGE_ROWS,), problem)
        windows = load_windows(oldest_ref, length, [rows])
        state = empty_state(*q.shape)
        if fresh_refs:
            keys = fresh_refs[0].shape[1]
            block = min(tile.slots, max(16, pl.next_power_of_2(keys)))
            steps = (split == last - 1).astype(jnp.int32) * pl.cdiv(keys, block)
            state = attend_to_fresh(q, rows, fresh_refs, state, steps=steps, block=block)
        cache, bounded = (k_ref, v_ref), start is not None
        (state,) = attend_to_slots(
            [q], cache, cached, [state], slots, tile, problem, bounded=bounded, windows=windows
        )
        flat, results = rows.flat, (out_ref, lse_ref)

        @pl.when(last - first == 1)
        def _() -> None:
            store_rows(results, (batch,), flat, finish(state))

        @pl.when(last - first > 1)
        def _() -> None:
            leave_and_merge(
                refs[-3:],
                results,
                rows,
                flat,
                state,
                row_tile=row_tile,
                split=split,
                splits=(first, last),
            )

    pl.when((first <= split) & (split < last))(attend)
