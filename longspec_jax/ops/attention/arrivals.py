"""Programs of one launch that each leave a partial result, and the last of them that merges them.

Programs start in any order and none can wait for another. Each counts itself as arrived when it has
written; who finds all others counted is the last, and may read what all of them wrote.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.ops.attention.online_softmax import State, finish
from longspec_jax.ops.attention.row_access import Head, Rows, store_rows
from longspec_jax.ops.attention.splits import MERGE_PARTIALS, load_merged


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
    refs: Any,
    results: tuple[Any, Any],
    head: Head,
    row_tile: jax.Array,
    split: jax.Array,
    first: jax.Array | int,
    last: jax.Array | int,
    rows: Rows,
    flat: Rows,
    state: State,
    *,
    interpret: bool,
) -> None:
    """Write what a split's program found and, as the last one of its rows, all of them merged.

    Args:
      refs: of :func:`partial_results`.
      results: the merged outputs and log-sum-exps, ``[B, R, H]`` and ``[B, R]``.
      head: the batch row and its key/value head.
      row_tile: which of its row tiles.
      split: which split this is.
      first: the first split of these rows.
      last: the first split beyond.
      rows: the packed rows.
      flat: where they are in the results.
      state: what the program found.
      interpret: whether this is no GPU.
    """
    partial_ref, partial_lse_ref, arrived_ref = refs
    batch, kv_head = head
    place = batch, split, kv_head
    store_rows(partial_ref, partial_lse_ref, place, rows, finish(state))

    @pl.when(_last_to_arrive(arrived_ref, (*head, row_tile), last - first, interpret))
    def _() -> None:
        merged = load_merged(
            *(partial_ref, partial_lse_ref, first, last, batch, kv_head, rows),
            chunk=MERGE_PARTIALS,
            interpret=interpret,
        )
        store_rows(*results, (batch,), flat, finish(merged))


def _last_to_arrive(
    arrived_ref: Any, place: tuple[jax.Array, ...], count: jax.Array | int, interpret: bool
) -> jax.Array:
    """Count this program as arrived, and say whether all ``count`` are now."""
    if not interpret:
        pltriton.debug_barrier()  # One thread speaks for all: they must have written by then.
    # At the scope of the GPU, releasing what was written before and acquiring what others released.
    return pltriton.atomic_add(arrived_ref, place, jnp.int32(1)) == count - 1
