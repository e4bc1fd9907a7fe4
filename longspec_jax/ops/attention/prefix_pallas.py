"""Prefix attention on NVIDIA GPUs: FlashDecoding as a Pallas kernel for Triton.

The cache is cut into splits of a fixed number of slots. One program attends with a tile of packed
query rows (the queries of every token and every head that read one key/value head) to one split
and leaves a float32 partial result; a second kernel merges the splits, or, for speculative
attention, the tree kernel does so in its epilogue (:mod:`longspec_jax.ops.attention.tree_pallas`).

Inside the kernels scores and maxima are in base 2, in which the hardware exponentiates; whatever is
written to memory is natural.
Programs whose split lies outside ``start <= s < length`` exit at once and write nothing, so time
follows the rows' lengths and not the capacity.
"""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.packing import (
    PackedShape,
    flat_rows,
    reached_splits,
    refuse_unsupported,
)
from longspec_jax.ops.attention.partitioned import PREFIX, partitioned
from longspec_jax.ops.attention.tiles import (
    MosaicTile,
    PrefixTile,
    prefix_tile,
    triton_prefix_tile,
)
from longspec_jax.ops.hardware import AMPERE, require_ampere

LOG2_E = math.log2(math.e)
MERGE_ROWS = 16
MERGE_PARTIALS = 8

State = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [R], sum [R] and unnormalised output [R, H] of an online softmax, in base 2."""


@functools.partial(jax.jit, static_argnames=("scale", "tile", "interpret"))
@partitioned(PREFIX)
def prefix_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    start: Lengths | None = None,
    *,
    scale: float | None = None,
    tile: PrefixTile | MosaicTile | None = None,
    interpret: bool = False,
) -> Partial:
    """Attend to ``start[b] <= s < length[b]``; see :func:`reference.prefix_attention`."""
    tile = choose_tile(q, k.shape[1], k.shape[2], tile, interpret, bounded=start is not None)
    out, lse = split_attention(q, k, v, length, start, scale=scale, tile=tile, interpret=interpret)
    batch, tokens, heads, width = q.shape
    kernel = functools.partial(
        _merge_kernel,
        shape=PackedShape(tokens=tokens, heads=heads, kv_heads=k.shape[1]),
        split=tile.split,
        slots=k.shape[2],
        interpret=interpret,
    )
    merged, merged_lse = pl.pallas_call(
        _with_optional_start(kernel, start),
        grid=(pl.cdiv(tokens * heads, MERGE_ROWS), batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, tokens * heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens * heads), jnp.float32),
        ),
        compiler_params=compiler_params(warps=4, stages=2),
        interpret=interpret,
        name="merge_splits",
    )(*optional(length, start), out, lse)
    return Partial(merged.reshape(q.shape), merged_lse.reshape(q.shape[:3]))


def split_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    start: Lengths | None = None,
    *,
    scale: float | None = None,
    tile: PrefixTile | MosaicTile,
    interpret: bool = False,
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split, unmerged, each with its natural log-sum-exp.

    ``R`` counts the packed rows of :class:`PackedShape`. The entries of splits that a row does not
    reach are never written: read only the splits of :func:`reached_splits`.
    """
    refuse_unsupported(q, k.shape[1])
    if isinstance(tile, MosaicTile):
        if start is not None or interpret:
            raise NotImplementedError(
                "the Mosaic GPU kernel takes no lower bound and does not run in interpret mode"
            )
        from longspec_jax.ops.attention import prefix_mosaic  # Older versions lack its backend.

        return prefix_mosaic.split_attention(q, k, v, length, scale=scale, tile=tile)
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
        _with_optional_start(kernel, start),
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
    )(*optional(length, start), q.reshape(batch, tokens * heads, width), k, v)


def load_merged(
    out_ref: Any,
    lse_ref: Any,
    batch: jax.Array,
    kv_head: jax.Array,
    packed: jax.Array,
    valid: jax.Array,
    reached: tuple[jax.Array, jax.Array],
    chunk: int,
    interpret: bool,
) -> State:
    """Merge the reached splits of some rows, ``chunk`` splits at a time, in ascending order."""
    first, last = reached
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


def empty_state(rows: int, width: int) -> State:
    """The softmax state of rows that have seen no key."""
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Normalised output and natural log-sum-exp; zero and -inf for rows that saw no key."""
    top, total, acc = state
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top / LOG2_E + jnp.log(safe), -jnp.inf)
    return acc / safe[:, None], lse


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """Two to the x by the GPU's own instruction (relative error 2^-22), which flushes denormals."""
    if interpret:
        return jnp.exp2(x)
    (y,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y


def finite(top: jax.Array) -> jax.Array:
    """A maximum to subtract: 0 where nothing was seen, since -inf - (-inf) is NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matrix product with float32 accumulation; float32 operands are multiplied exactly."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def compiler_params(warps: int, stages: int) -> pltriton.CompilerParams:
    """Choose Triton by name, and accept its announced removal without a warning at each call.

    :mod:`longspec_jax.ops.attention.prefix_triton` is the successor for the day it goes.
    """
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )
    return pltriton.CompilerParams(num_warps=warps, num_stages=stages)


def optional(length: Lengths, start: Lengths | None) -> list[Array]:
    """The row bounds a kernel takes as its first operands."""
    bounds = [length.astype(jnp.int32)]
    return bounds if start is None else [*bounds, start.astype(jnp.int32)]


def _with_optional_start(kernel: Any, start: Lengths | None) -> Any:
    """Give a kernel without a lower bound the reference ``None`` in its place."""
    if start is not None:
        return kernel
    return lambda length_ref, *refs: kernel(length_ref, None, *refs)


def choose_tile(
    q: Queries,
    kv_heads: int,
    slots: int,
    tile: PrefixTile | MosaicTile | None,
    interpret: bool,
    bounded: bool = False,
) -> PrefixTile | MosaicTile:
    """The tile asked for, or the heuristic's for this GPU; refuses where there is none.

    The Hopper kernel takes no lower bound, and interpret mode does not run it.
    """
    if tile is not None:
        return tile
    capability = AMPERE if interpret else require_ampere("the Pallas kernels")
    _, tokens, heads, width = q.shape
    sizes = (tokens, heads, kv_heads, width, slots, q.dtype.itemsize, capability)
    return triton_prefix_tile(*sizes) if bounded or interpret else prefix_tile(*sizes)


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
        queries, places = [], []
        first = row_tile * tile.total_rows
        for count in tile.rows:
            packed = first + jnp.arange(count)
            row = flat_rows(packed, kv_head, shape)
            valid = packed < shape.packed
            mask = valid[:, None] & within
            queries.append(
                pltriton.load(q_ref.at[batch, row[:, None], h[None, :]], mask=mask, other=0.0)
            )
            places.append((packed, valid, mask))
            first += count

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
            v = read(v_ref)
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

        # Whole blocks need no mask; at most one partial block at either end does.
        inner = pl.cdiv(lower, tile.slots)
        outer = upper // tile.slots
        states = [empty_state(count, padded) for count in tile.rows]
        if start_ref is not None:
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
        states = jax.lax.fori_loop(
            0,
            ragged.astype(jnp.int32),
            lambda _, s: visit(outer * tile.slots, s, edge=True),
            states,
        )
        for state, (packed, valid, mask) in zip(states, places, strict=True):
            out, lse = finish(state)
            target = out_ref.at[batch, split, kv_head, packed[:, None], h[None, :]]
            pltriton.store(target, out, mask=mask)
            pltriton.store(lse_ref.at[batch, split, kv_head, packed], lse, mask=valid)

    pl.when(lower < upper)(attend)


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
    kv_head = row % shape.heads // shape.groups
    packed = row // shape.heads * shape.groups + row % shape.groups
    start = None if start_ref is None else start_ref[batch]
    reached = reached_splits(length_ref[batch], start, split=split, slots=slots)
    state = load_merged(
        out_ref, lse_ref, batch, kv_head, packed, valid, reached, MERGE_PARTIALS, interpret
    )
    out, lse = finish(state)
    h = jnp.arange(out.shape[1])
    within = valid[:, None] & (h < merged_ref.shape[2])[None, :]
    pltriton.store(merged_ref.at[batch, row[:, None], h[None, :]], out, mask=within)
    pltriton.store(merged_lse_ref.at[batch, row], lse, mask=valid)
