"""Merging the partial results of a prefix's splits.

As a kernel of its own (:func:`merge_splits`), or as the beginning of another (:func:`load_merged`).
Only splits that hold a slot the row sees were ever written; only they are read, in ascending order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Lengths
from longspec_jax.ops.attention import bounds
from longspec_jax.ops.attention.bounds import reached_splits
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.online_softmax import (
    LOG2_E,
    State,
    empty_state,
    exp2,
    finish,
    finite,
)
from longspec_jax.ops.attention.packing import PackedShape, packed_rows
from longspec_jax.ops.attention.row_access import Rows, store_rows
from longspec_jax.ops.triton_compiler import compiler_params

MERGE_ROWS = 16
MERGE_PARTIALS = 8


def merge_splits(
    partials: tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]],
    length: Lengths,
    start: Lengths | None,
    *,
    shape: PackedShape,
    split: int,
    slots: int,
    dtype: DTypeLike,
    interpret: bool,
) -> Partial:
    """The whole prefix's result from its splits', ``split`` of ``slots`` cache slots each.

    The output is of type ``dtype``.
    """
    out, lse = partials
    batch, width = out.shape[0], out.shape[4]
    kernel = functools.partial(
        _merge_kernel, shape=shape, split=split, slots=slots, interpret=interpret
    )
    merged, merged_lse = pl.pallas_call(
        bounds.with_optional_start(kernel, start),
        grid=(pl.cdiv(shape.tokens * shape.heads, MERGE_ROWS), batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, shape.tokens * shape.heads, width), dtype),
            jax.ShapeDtypeStruct((batch, shape.tokens * shape.heads), jnp.float32),
        ),
        compiler_params=compiler_params(warps=4, stages=2),
        interpret=interpret,
        name="merge_splits",
    )(*bounds.operands(length, start), out, lse)
    rows = (batch, shape.tokens, shape.heads)
    return Partial(merged.reshape(*rows, width), merged_lse.reshape(rows))


def load_merged(
    out_ref: Any,
    lse_ref: Any,
    first: jax.Array | int,
    last: jax.Array | int,
    batch: jax.Array,
    kv_head: jax.Array,
    rows: Rows,
    *,
    chunk: int,
    interpret: bool,
) -> State:
    """Merge the splits ``first <= p < last`` of some rows, ``chunk`` at a time, in ascending order.

    Args:
      out_ref: the splits' outputs, ``[B, P, K, R, H]``.
      lse_ref: their log-sum-exps, ``[B, P, K, R]``.
      first: the first split.
      last: the first split beyond.
      batch: the batch row.
      kv_head: the key/value head, or one for each row.
      rows: the packed rows.
      chunk: how many splits are on their way at once.
      interpret: whether this is no GPU.
    """
    packed, valid = rows
    width = out_ref.shape[4]
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
    length_ref: Any,
    start_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    merged_ref: Any,
    merged_lse_ref: Any,
    *,
    shape: PackedShape,
    split: int,
    slots: int,
    interpret: bool,
) -> None:
    """Merge the splits of a few rows of the flattened [T N] axis."""
    batch = pl.program_id(1)
    row = pl.program_id(0) * MERGE_ROWS + jnp.arange(MERGE_ROWS)
    valid = row < shape.tokens * shape.heads
    kv_head, packed = packed_rows(row, shape)
    start = None if start_ref is None else start_ref[batch]
    splits = reached_splits(length_ref[batch], start, split=split, slots=slots)
    state = load_merged(
        *(out_ref, lse_ref, *splits, batch, kv_head, (packed, valid)),
        chunk=MERGE_PARTIALS,
        interpret=interpret,
    )
    store_rows(merged_ref, merged_lse_ref, (batch,), (row, valid), finish(state))
