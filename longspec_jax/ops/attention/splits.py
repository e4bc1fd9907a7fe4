"""Partial results of a prefix's splits, or of blocks of fresh keys, and their merge.

A kernel of its own merges them (:func:`merge_splits`), or the beginning of another
(:func:`load_merged`), or the last program of the launch that made them (:func:`leave_and_merge`).
Only splits that hold a slot the row sees, ``start <= s < length``, were ever written; only they are
read, in ascending order. Most calls have no lower bound, and read every row of a cache; their
kernels get no operands for these.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Ref
from longspec_jax.ops.attention.online_softmax import (
    Rows,
    State,
    empty_state,
    exp2,
    finish,
    finite,
    store_rows,
)
from longspec_jax.ops.attention.operands import Partial, Prefix
from longspec_jax.ops.attention.packing import LOG2_E, Problem, packed_rows
from longspec_jax.ops.triton_launch import triton_call

MERGE_ROWS = 16
MERGE_PARTIALS = 8


def row_operands(prefix: Prefix) -> list[Array]:
    """The numbers of every row that a kernel takes as its first operands."""
    return [each.astype(jnp.int32) for each in _numbers(prefix) if each is not None]


def with_row_operands(kernel: Any, prefix: Prefix) -> Any:
    """Give a kernel the reference ``None`` for each of four numbers that a prefix lacks.

    They are its length, its lower bound, the row of the cache that is read, and the first position
    that each query sees.
    """
    there = [each is not None for each in _numbers(prefix)]

    def call(*refs: Ref) -> None:
        given = iter(refs)
        kernel(*[next(given) if each else None for each in there], *given)

    return call


def _numbers(prefix: Prefix) -> tuple[Array | None, ...]:
    return prefix.length, prefix.start, prefix.cache_rows, prefix.oldest


def reached_splits(
    length: jax.Array, start: jax.Array | None, problem: Problem
) -> tuple[jax.Array, jax.Array]:
    """First and one-past-last split that holds a slot a row sees; empty if it sees none."""
    split = problem.split_of(length)
    last = jax.lax.div(jnp.minimum(length, problem.slots) + split - 1, split)
    if start is None:
        return jnp.zeros_like(last), last
    first = jax.lax.div(jnp.maximum(start, 0), split)
    return jnp.where(start < length, first, last), last


def merge_splits(
    partials: tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]],
    prefix: Prefix,
    problem: Problem,
    dtype: DTypeLike,
) -> Partial:
    """The whole prefix's result from its splits', the output of type ``dtype``."""
    out, lse = partials
    batch, width = out.shape[0], out.shape[4]
    flat = problem.tokens * problem.heads
    merged, merged_lse = triton_call(
        with_row_operands(functools.partial(_merge_kernel, problem=problem), prefix),
        grid=(pl.cdiv(flat, MERGE_ROWS), batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, flat, width), dtype),
            jax.ShapeDtypeStruct((batch, flat), jnp.float32),
        ),
        warps=4,
        stages=2,
        interpret=problem.interpret,
        name="merge_splits",
    )(*row_operands(prefix), out, lse)
    rows = (batch, problem.tokens, problem.heads)
    return Partial(merged.reshape(*rows, width), merged_lse.reshape(rows))


def load_merged(
    refs: Sequence[Ref], splits: tuple[jax.Array | int, jax.Array | int], rows: Rows, chunk: int
) -> State:
    """Merge some rows' splits, ``first <= p < last``, in ascending order.

    Splits have outputs ``[B, P, K, R, H]`` and log-sum-exps ``[B, P, K, R]``; ``chunk`` of them are
    read at once.
    """
    (out_ref, lse_ref), (first, last) = refs, splits
    batch, kv_head, packed, valid = rows.batch, rows.kv_head, rows.packed, rows.valid
    interpret, width = rows.problem.interpret, out_ref.shape[4]
    chunk = min(chunk, out_ref.shape[1])
    h = jnp.arange(pl.next_power_of_2(width))
    mask = valid[:, None] & (h < width)[None, :]
    kv_rows = kv_head[:, None] if kv_head.ndim else kv_head

    def visit(index: jax.Array, state: State) -> State:
        # Unrolled, so that every read of a chunk is in flight before the first is used.
        splits = [first + index * chunk + i for i in range(chunk)]
        sums = [
            pltriton.load(
                lse_ref.at[batch, split, kv_head, packed],
                mask=valid & (split < last),
                other=-jnp.inf,
            )
            * LOG2_E
            for split in splits
        ]
        outs = [
            pltriton.load(
                out_ref.at[batch, split, kv_rows, packed[:, None], h[None, :]],
                mask=mask & (split < last),
                other=0.0,
            )
            for split in splits
        ]
        top, total, acc = state
        new_top = functools.reduce(jnp.maximum, sums, top)
        shift = finite(new_top)
        keep = exp2(top - shift, interpret)
        total, acc = total * keep, acc * keep[:, None]
        for lse, out in zip(sums, outs, strict=True):
            weight = exp2(lse - shift, interpret)
            total, acc = total + weight, acc + out * weight[:, None]
        return new_top, total, acc

    state = empty_state(packed.shape[0], h.shape[0])
    return jax.lax.fori_loop(0, pl.cdiv(last - first, chunk), visit, state)


def _merge_kernel(
    length_ref: Ref,
    start_ref: Ref,
    _: Any,
    __: Any,
    out_ref: Ref,
    lse_ref: Ref,
    merged_ref: Ref,
    merged_lse_ref: Ref,
    *,
    problem: Problem,
) -> None:
    """Merge the splits of a few rows of the flattened [T N] axis."""
    batch = pl.program_id(1)
    row = pl.program_id(0) * MERGE_ROWS + jnp.arange(MERGE_ROWS)
    valid = row < problem.tokens * problem.heads
    kv_head, packed = packed_rows(row, problem)
    start = None if start_ref is None else start_ref[batch]
    splits = reached_splits(length_ref[batch], start, problem)
    rows = Rows(problem, batch, kv_head, packed, valid)
    state = load_merged((out_ref, lse_ref), splits, rows, MERGE_PARTIALS)
    store_rows((merged_ref, merged_lse_ref), (batch,), (row, valid), finish(state))


def counters(batch: int, kv_heads: int, row_tiles: int) -> jax.Array:
    """The last operand of such a launch, which is its last result, too."""
    return jnp.zeros((batch, kv_heads, row_tiles), jnp.int32)


def partial_results(
    batch: int, splits: int, kv_heads: int, rows: int, width: int, counters: jax.Array
) -> list[jax.ShapeDtypeStruct]:
    """The last results of such a launch: of every split, and the counters."""
    return [
        jax.ShapeDtypeStruct((batch, splits, kv_heads, rows, width), jnp.float32),
        jax.ShapeDtypeStruct((batch, splits, kv_heads, rows), jnp.float32),
        jax.ShapeDtypeStruct(counters.shape, counters.dtype),
    ]


def leave_and_merge(
    refs: Sequence[Ref],
    results: Sequence[Ref],
    rows: Rows,
    flat: tuple[jax.Array, jax.Array],
    state: State,
    *,
    row_tile: jax.Array,
    split: jax.Array,
    splits: tuple[jax.Array | int, jax.Array | int],
) -> None:
    """Write what a split's program found and, as the last one of its rows, all of them merged.

    Programs start in any order and none can wait for another. Each counts itself as arrived when it
    has written. The one that finds all others counted is the last, and may read what all wrote.

    Args:
      refs: of :func:`partial_results`.
      results: the merged outputs and log-sum-exps, ``[B, R, H]`` and ``[B, R]``.
      rows: the packed rows.
      flat: where they are in the results.
      state: what the program found.
      row_tile: which of the head's row tiles this is.
      split: which split.
      splits: the first one of these rows, and the first one beyond.
    """
    *partial_refs, arrived_ref = refs
    rows.store(partial_refs, split, state)
    (first, last), place = splits, (rows.batch, rows.kv_head, row_tile)

    @pl.when(_last_to_arrive(arrived_ref, place, last - first, rows.problem.interpret))
    def _() -> None:
        merged = load_merged(partial_refs, splits, rows, MERGE_PARTIALS)
        store_rows(results, (rows.batch,), flat, finish(merged))


def _last_to_arrive(
    arrived_ref: Ref, place: tuple[jax.Array, ...], count: jax.Array | int, interpret: bool
) -> jax.Array:
    """Count this program as arrived, and say whether all ``count`` are now."""
    if not interpret:
        pltriton.debug_barrier()  # One thread speaks for all: they must have written by then.
    # At the scope of the GPU, releasing what was written before and acquiring what others released.
    return pltriton.atomic_add(arrived_ref, place, jnp.int32(1)) == count - 1
