"""Attention to a prefix, to fresh tokens under a mask, and their merge in one launch.

For few query rows, as of a plain step, of which a second launch takes a tenth of the time at 4k.
The programs are those of :mod:`longspec_jax.ops.attention.prefix_pallas`, one for each split of the
cache. That of a row's last split, which is seldom a whole one, begins with the fresh tokens. Each
leaves its partial result, and the last of a row tile to arrive merges them in ascending order: the
order in which programs arrive changes nothing but who merges.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Queries
from longspec_jax.ops.attention import arrivals, bounds
from longspec_jax.ops.attention.bounds import reached_splits
from longspec_jax.ops.attention.fresh import attend_to_fresh
from longspec_jax.ops.attention.online_softmax import LOG2_E, empty_state, finish
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.attention.packing import PackedShape, flat_rows, pack, refuse_unsupported
from longspec_jax.ops.attention.row_access import load_queries, store_rows
from longspec_jax.ops.attention.slots import attend_to_slots, slots_of_split
from longspec_jax.ops.attention.splits import MERGE_ROWS
from longspec_jax.ops.attention.tiles import PrefixTile
from longspec_jax.ops.triton_compiler import compiler_params


def takes(tile: PrefixTile) -> bool:
    """Whether one program merges a row tile as fast as several would in a launch of their own.

    64 rows of 4 splits take equally long either way, of 16 splits 5 us longer in one.
    """
    return tile.rows == (MERGE_ROWS,)


def attend(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh | None,
    *,
    scale: float,
    tile: PrefixTile,
    dtype: DTypeLike,
    interpret: bool,
) -> tuple[Float[Array, "B R H"], Float[Array, "B R"]]:
    """Attend to the slots ``start <= s < length`` and to the fresh tokens, where there are any.

    Returns:
      Outputs of type ``dtype`` and natural log-sum-exps of the flattened [T N] axis; 0 and -inf for
      rows that see nothing.
    """
    batch, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    refuse_unsupported(q, kv_heads)
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads)
    splits, row_tiles = pl.cdiv(slots, tile.split), pl.cdiv(shape.packed, tile.total_rows)
    operands = [
        *bounds.operands(prefix.length, prefix.start),
        *(pack(q, kv_heads), prefix.keys, prefix.values),
    ]
    if fresh is not None:
        operands += [fresh.keys, fresh.values, fresh.mask]
    counters = arrivals.counters(batch, kv_heads, row_tiles)
    kernel = functools.partial(
        _kernel, shape=shape, tile=tile, scale=scale * LOG2_E, interpret=interpret
    )
    out, lse, *_ = pl.pallas_call(
        bounds.with_optional_start(kernel, prefix.start),
        # Programs that share a split are neighbours, as in the prefix kernel.
        grid=(row_tiles, splits, kv_heads * batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, tokens * heads, width), dtype),
            jax.ShapeDtypeStruct((batch, tokens * heads), jnp.float32),
            *arrivals.partial_results(batch, splits, kv_heads, shape.packed, width, counters),
        ),
        input_output_aliases={len(operands): 4},
        compiler_params=compiler_params(tile.warps, tile.stages),
        interpret=interpret,
        name="joined_attention",
    )(*operands, counters)
    return out, lse


def _kernel(
    length_ref: Any,
    start_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
    shape: PackedShape,
    tile: PrefixTile,
    scale: float,
    interpret: bool,
) -> None:
    """Attend with one row tile of one key/value head to one split, and merge if it is the last."""
    *fresh_refs, _, out_ref, lse_ref = refs[:-3]
    row_tile, split = pl.program_id(0), pl.program_id(1)
    batch, kv_head = head = pl.program_id(2) // shape.kv_heads, pl.program_id(2) % shape.kv_heads
    length, start = length_ref[batch], None if start_ref is None else start_ref[batch]
    slots = k_ref.shape[2]
    lower, upper = slots_of_split(split, length, start, tile=tile, slots=slots)
    first, last = reached_splits(length, start, split=tile.split, slots=slots)
    # A row that sees no slot is the first program's.
    first, last = jnp.where(first < last, first, 0), jnp.where(first < last, last, 1)

    def attend() -> None:
        (q,), (rows,) = load_queries(q_ref, head, row_tile * tile.total_rows, (MERGE_ROWS,), shape)
        state = empty_state(*q.shape)
        if fresh_refs:
            keys = fresh_refs[0].shape[1]
            block = min(tile.slots, max(16, pl.next_power_of_2(keys)))
            state = attend_to_fresh(
                *(q, rows, fresh_refs, head, state),
                steps=(split == last - 1).astype(jnp.int32) * pl.cdiv(keys, block),
                block=block,
                shape=shape,
                scale=scale,
                interpret=interpret,
            )
        (state,) = attend_to_slots(
            *([q], k_ref, v_ref, head, [state], lower, upper),
            bounded=start is not None,
            tile=tile,
            scale=scale,
            interpret=interpret,
        )
        packed, valid = rows
        flat = flat_rows(packed, kv_head, shape), valid

        @pl.when(last - first == 1)
        def _() -> None:
            store_rows(out_ref, lse_ref, (batch,), flat, finish(state))

        @pl.when(last - first > 1)
        def _() -> None:
            arrivals.leave_and_merge(
                *(refs[-3:], (out_ref, lse_ref), head, row_tile),
                *(split, first, last, rows, flat, state),
                interpret=interpret,
            )

    pl.when((first <= split) & (split < last))(attend)
