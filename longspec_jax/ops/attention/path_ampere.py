"""Path attention on GPUs without Hopper's instructions: two kernels of ``mma.sync``.

What is added up in which order is that of :mod:`longspec_jax.ops.attention.path_kernels`: a query
at position ``p`` sees slots up to ``p - RECENT`` through the prefix kernel, in splits that only
``p`` determines, and the recent tokens by themselves. Here every node's recent keys and values are
gathered, cached ones and the tree's alike, in the order of their positions. So its matmuls are the
same wherever they come from, and nothing of the tree around it takes part.

Splits are merged after the recent tokens, in ascending order. One that a row does not see leaves
it as it was. Where a product is added to something it is rounded first
(:func:`longspec_jax.ops.mosaic.product`): the assembler's choice may differ between shapes.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, Ref, Sinks
from longspec_jax.ops import ampere
from longspec_jax.ops.attention.operands import PATH_AXES, Fresh, Prefix
from longspec_jax.ops.attention.packing import LOG2_E, MAX_GROUP, pack, shortest_split
from longspec_jax.ops.attention.path import RECENT, reach, span, window_splits
from longspec_jax.ops.hardware import MULTIPROCESSORS, WARPGROUP_ROWS
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.mosaic import capped, load, product
from longspec_jax.ops.partitioned import partitioned

SLOTS = 64
"""Cache slots of a step of the softmax, by which a split grows."""
_GATHERED = 32
"""Places of a node's recent tokens, of which ``RECENT`` and its own are filled."""
_COLUMNS = 64
"""Columns of a head that are multiplied at a time: 128 bytes, the rows of shared memory."""
_MOST_SPLITS, _AT_ONCE = 32, 4
"""Splits of a row, and those that are read together as they are merged."""


class Scores(NamedTuple):
    """What becomes of products of queries and keys: scores in base 2.

    ``scale`` is the factor on them, in base 2. If there is a ``cap``, natural, it bounds them.
    """

    scale: float
    cap: float | None = None

    def __call__(self, products: Array, layout: ampere.Layout) -> Array:
        """The scores, rounded before anything else is done to them."""
        if self.cap is not None:
            return capped(products, self.scale, self.cap, layout)
        scale = plgpu.layout_cast(jnp.full(products.shape, self.scale), layout)
        return product(products, scale, layout)


class Splits(NamedTuple):
    """Sum of values, greatest score and sum of weights of each split and packed row."""

    out: Float[Array, "B P K R H"]
    top: Float[Array, "B P K R"]
    total: Float[Array, "B P K R"]


def splits_of(kv_heads: int) -> int:
    """Most splits of a row: as many as give every multiprocessor a program in plain decoding."""
    return max(1, min(_MOST_SPLITS, MULTIPROCESSORS // kv_heads))


def split_of(position: Lengths, kv_heads: int) -> Lengths:
    """Slots of a split for a query at this position: whole steps, enough for all positions."""
    return shortest_split(reach(position), splits_of(kv_heads), SLOTS)


@partitioned(PATH_AXES)
@launcher("scale", "cap", "window")
def path_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    depth: Int[Array, "B T"],
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to the prefix and along each node's path; see :func:`dispatch.path_attention`."""
    batch, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    groups = heads // kv_heads
    factor = (width**-0.5 if scale is None else scale) * LOG2_E
    length, depth = prefix.length.astype(jnp.int32), depth.astype(jnp.int32)
    if window is None:
        length = jnp.minimum(length, slots)
    limit = length[:, None] + depth - RECENT
    limit = jnp.clip(limit, 0, slots) if window is None else jnp.maximum(limit, 0)
    row = jnp.arange(batch) if prefix.cache_rows is None else prefix.cache_rows
    count = splits_of(kv_heads)
    if window is None:
        shown, split = None, split_of(length, kv_heads)
        bounds = [row.astype(jnp.int32), limit.max(axis=1), split]
    else:
        size, count = window_splits(window, SLOTS, count)
        shown = span(window)
        oldest = jnp.maximum(limit.min(axis=1) - shown, 0)
        bounds = [row.astype(jnp.int32), limit.max(axis=1), jnp.full_like(length, size), oldest]
    bounds = jnp.stack(bounds, axis=1)
    seen, keys, values = _recent(prefix, fresh, length, depth, row, window)
    packed = pack(q, kv_heads)
    missing = -packed.shape[2] % WARPGROUP_ROWS
    rows = jnp.pad(packed, ((0, 0), (0, 0), (0, missing), (0, 0)))
    limit = jnp.pad(jnp.repeat(limit, groups, axis=1), ((0, 0), (0, missing)))
    cached, scores = (prefix.keys, prefix.values), Scores(factor, cap)
    splits = attend_in_splits(bounds, rows, *cached, limit, scores=scores, count=count, span=shown)
    each = q.reshape(batch, tokens, kv_heads, groups, width)
    # A copy takes four groups of eight rows and 64 columns, and more.
    missing = MAX_GROUP * (2 if width == 64 else 1) - groups
    each = jnp.pad(each, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
    bias = jnp.where(seen, 0.0, -jnp.inf)
    own = None
    if sinks is not None:
        own = sinks.astype(jnp.float32).reshape(kv_heads, groups) * LOG2_E
        own = jnp.pad(own, ((0, 0), (0, MAX_GROUP - groups)))
    recent = each, keys, values
    out = _recent_and_merge(bounds, bias, *recent, splits, own, scores=scores, groups=groups)
    return out[:, :, :, :groups].reshape(q.shape)


def _recent(
    prefix: Prefix,
    fresh: Fresh,
    length: Lengths,
    depth: Int[Array, "B T"],
    row: Lengths,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """Every node's recent tokens in the order of their positions, its own after ``RECENT``.

    Returns:
      Which of the places are filled, ``[B, T, places]``; keys and values ``[B, T, K, places, H]``,
      which are 0 elsewhere.
    """
    place = jnp.arange(_GATHERED)
    wanted = depth[:, :, None] - RECENT + place
    position = length[:, None, None] + wanted
    seen = (position >= 0) & (place <= RECENT)
    on_path = fresh.seen(prefix)[:, :, None] & (depth[:, None, None] == wanted[:, :, :, None])
    node = jnp.argmax(on_path, axis=3)
    head = jnp.arange(prefix.keys.shape[1])[:, None]
    slots = prefix.keys.shape[2]
    slot = jnp.clip(position, 0, slots - 1) if window is None else position % slots
    slot = slot[:, :, None]
    batch = jnp.arange(len(depth))[:, None, None, None]

    def gathered(cached: Array, in_tree: Array) -> Array:
        old = cached[row[:, None, None, None], head, slot]
        new = in_tree[batch, node[:, :, None], head]
        found = jnp.where((wanted < 0)[:, :, None, :, None], old, new)
        return jnp.where(seen[:, :, None, :, None], found, 0)

    keys, values = gathered(prefix.keys, fresh.keys), gathered(prefix.values, fresh.values)
    return seen, keys, values


def attend_in_splits(
    bounds: Int[Array, "B fields"],
    q: Float[Array, "B K R H"],
    k: CacheSlots,
    v: CacheSlots,
    limit: Int[Array, "B R"] | None = None,
    bias: Float[Array, "B R S"] | None = None,
    *,
    scores: Scores,
    count: int,
    causal: int = 0,
    span: int | None = None,
) -> Splits:
    """Attend to the slots below every packed row's limit.

    Args:
      bounds: of every batch row, its row of the cache, its greatest limit, the slots of a split; in
        a layer with a window the first position that a row sees, too.
      q: packed queries, whole warpgroups of rows.
      k: cached keys, whole steps of slots.
      v: cached values.
      limit: how many slots each packed row sees; the greatest limit if absent.
      bias: is added to the scores, in base 2, if there is one.
      scores: what becomes of products.
      count: the most splits of a row.
      causal: query heads of a key/value head, if row ``r`` sees only the slots up to
        ``r // causal``; otherwise 0.
      span: slots below its limit that a row sees in a layer with a window, whose slots are a ring:
        position ``p`` lies in slot ``p % S``. All of them if absent.

    Returns:
      The splits; after the last row there is memory for another node's.
    """
    batch, kv_heads, rows, width = q.shape
    shape = batch, count, kv_heads, rows + MAX_GROUP
    held = 2 * WARPGROUP_ROWS * width
    stages = min(4, (ampere.SHARED_BYTES - held - 1024) // (4 * SLOTS * width))
    kernel = plgpu.kernel(
        functools.partial(
            _split_kernel,
            scores_of=scores,
            stages=stages,
            causal=causal,
            span=span,
            limited=limit is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((*shape, width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        scratch_types=dict(
            q_smem=ampere.shared(WARPGROUP_ROWS, width, dtype=q.dtype),
            k_smem=ampere.shared(stages, SLOTS, width, dtype=q.dtype),
            v_smem=ampere.shared(stages, SLOTS, width, dtype=q.dtype),
        ),
        # Row tiles of one split run at the same time: the first reads the keys from memory.
        grid=(rows // WARPGROUP_ROWS, count, kv_heads, batch),
        grid_names=("row_tile", "split", "kv_head", "batch"),
        compiler_params=ampere.compiler_params(),
        kernel_name="prefix_splits",
    )
    more = [each for each in (limit, bias) if each is not None]
    out, top, total = kernel(bounds, q, k, v, *more)
    return Splits(out, top, total)


def _split_kernel(
    bounds: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    *refs: Ref,
    q_smem: Ref,
    k_smem: Ref,
    v_smem: Ref,
    scores_of: Scores,
    stages: int,
    causal: int,
    span: int | None,
    limited: bool,
) -> None:
    """64 packed rows of a key/value head over one split."""
    *bias, out, top, total = refs[limited:]
    batch, kv_head = jax.lax.axis_index("batch"), jax.lax.axis_index("kv_head")
    split, row_tile = jax.lax.axis_index("split"), jax.lax.axis_index("row_tile")
    cache_row, most, size = (bounds[batch, at] for at in range(3))
    if causal:
        last = (row_tile + 1) * WARPGROUP_ROWS - 1
        most = jnp.minimum(most, jax.lax.div(last, jnp.int32(causal)) + 1)
    lower, oldest = split * size, None
    end = lower + size
    if span is not None:
        # The first split is that of the first position that a row sees, whose step is its first.
        oldest = bounds[batch, 3]
        first_step = oldest - jax.lax.rem(oldest, jnp.int32(SLOTS))
        end += jax.lax.div(first_step, size) * size
        lower = jnp.maximum(end - size, first_step)
    blocks = jax.lax.div(jnp.minimum(most, end) - lower + SLOTS - 1, jnp.int32(SLOTS))
    width, dtype = q.shape[-1], q.dtype
    rows = pl.ds(row_tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
    layout = ampere.accumulator(dtype, WARPGROUP_ROWS)
    seen = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=layout.reduce(1))
    if limited:
        seen = load(refs[0].at[batch, rows], layout.reduce(1))
    elif causal:
        seen = jax.lax.div(seen + row_tile * WARPGROUP_ROWS, jnp.int32(causal)) + 1
        seen = jnp.minimum(seen, most)
    else:
        seen = seen * 0 + most

    def fetch(step: jax.Array) -> None:
        """Bring a block's keys and values."""
        place = jax.lax.rem(step, jnp.int32(stages))
        slot = lower + step * SLOTS
        if span is not None:
            slot = jax.lax.rem(slot, jnp.int32(k.shape[2]))  # Whole steps: none crosses the seam.
        at = cache_row, kv_head, pl.ds(slot, SLOTS), pl.ds(0, width)
        ampere.copy_if(step < blocks, (k, at, k_smem.at[place]), (v, at, v_smem.at[place]))

    def attend(step: jax.Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        ampere.wait(2 * (stages - 2))
        # All have read the place of the step before.
        fetch(step + stages - 1)
        place, first = jax.lax.rem(step, jnp.int32(stages)), lower + step * SLOTS
        if oldest is None:
            pl.when(first + SLOTS > most)(lambda: _silence(v_smem.at[place], most - first))
        else:
            ragged = jnp.logical_or(first + SLOTS > most, first < oldest)
            seen_by_some = most - first, oldest - first
            pl.when(ragged)(lambda: _silence(v_smem.at[place], *seen_by_some))
        scores = ampere.zeros(WARPGROUP_ROWS, SLOTS, dtype)
        for half in _halves(width):
            query = ampere.left(q_smem.at[:, half], WARPGROUP_ROWS)
            key = ampere.right(k_smem.at[place, :, half].transpose((1, 0)), WARPGROUP_ROWS)
            scores = ampere.mma(scores, query, key)
        slot = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
        below = ampere.along_rows(seen - first, scores.shape, layout)
        there = slot < below
        if span is not None:
            there = jnp.logical_and(there, slot >= below - span)
        scores = jnp.where(there, scores_of(scores, layout), -jnp.inf)
        for ref in bias:
            scores += load(ref.at[batch, rows, pl.ds(first, SLOTS)], layout)
        top, total, *acc = state
        weights, keep, top, added = _softmax(top, scores, layout)
        weights = ampere.as_left(weights.astype(dtype))
        for at, half in enumerate(_halves(width)):
            scaled = acc[at] * ampere.along_rows(keep, acc[at].shape, layout)
            value = ampere.right(v_smem.at[place, :, half], WARPGROUP_ROWS)
            acc[at] = ampere.mma(scaled, weights, value)
        return top, product(total, keep, layout.reduce(1)) + added, *acc

    @pl.when(blocks > 0)
    def _() -> None:
        ampere.copy(q, (batch, kv_head, rows, pl.ds(0, width)), q_smem)
        for step in range(stages - 1):
            fetch(jnp.int32(step))
        acc = [ampere.zeros(WARPGROUP_ROWS, _COLUMNS, dtype) for half in _halves(width)]
        begin = _numbers(-math.inf, layout), _numbers(0.0, layout), *acc
        found = jax.lax.fori_loop(0, blocks, attend, begin)
        at = batch, split, kv_head, rows
        ampere.store(top.at[at], found[0])
        ampere.store(total.at[at], found[1])
        for half, acc in zip(_halves(width), found[2:], strict=True):
            ampere.store(out.at[(*at, half)], acc)


def _silence(values: Ref, most: jax.Array, oldest: jax.Array | None = None) -> None:
    """Zero values that no row sees: they may be NaN, which a weight of 0 would not silence.

    Args:
      values: of a step.
      most: the first slot of the step that is beyond all limits.
      oldest: the first one that a window shows, in a layer with one.
    """
    for half in _halves(values.shape[-1]):
        piece = values.at[:, half]
        copied = plgpu.Layout.SMEM_GMEM_COPY(piece.shape, piece.dtype, 128)
        slot = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=copied)
        value = load(piece, copied)
        there = slot < most
        if oldest is not None:
            there = jnp.logical_and(there, slot >= oldest)
        piece[...] = jnp.where(there, value, jnp.zeros_like(value))
    ampere.barrier()


def _recent_and_merge(
    bounds: Int[Array, "B fields"],
    bias: Float[Array, "B T places"],
    q: Float[Array, "B T K rows H"],
    k: Float[Array, "B T K places H"],
    v: Float[Array, "B T K places H"],
    splits: Splits,
    sinks: Float[Array, "K padded"] | None,
    *,
    scores: Scores,
    groups: int,
) -> Float[Array, "B T K G H"]:
    """Attend to every node's recent tokens, and merge with the splits, in ascending order.

    Args:
      bounds: as in :func:`attend_in_splits`.
      bias: 0 for the places that are filled, minus infinity for the others.
      q: every node's queries, among ``MAX_GROUP`` rows a key/value head or more.
      k: every node's recent keys.
      v: likewise.
      splits: what the prefix kernel found.
      sinks: one more score of every query head, in base 2, of a key whose value is 0.
      scores: what becomes of products.
      groups: query heads of a key/value head.
    """
    batch, tokens, kv_heads, _, width = q.shape
    places = functools.partial(ampere.shared, _GATHERED, width, dtype=q.dtype)
    kernel = plgpu.kernel(
        functools.partial(_recent_kernel, scores_of=scores, groups=groups),
        out_type=jax.ShapeDtypeStruct((batch, tokens, kv_heads, MAX_GROUP, width), q.dtype),
        scratch_types=dict(
            q_smem=ampere.shared(q.shape[3], width, dtype=q.dtype),
            k_smem=places(),
            v_smem=places(),
            # Rows are apart by a fourth of the banks, so that four of them are written at once.
            scores_smem=plgpu.SMEM((MAX_GROUP, _GATHERED + 8), jnp.float32),
            rows_smem=plgpu.SMEM((2, MAX_GROUP), jnp.float32),
        ),
        grid=(tokens, kv_heads, batch),
        grid_names=("token", "kv_head", "batch"),
        compiler_params=ampere.compiler_params(),
        kernel_name="recent_tokens",
    )
    last = () if sinks is None else (sinks,)
    return kernel(bounds, bias, q, k, v, *splits, *last)


def _recent_kernel(
    bounds: Ref,
    bias: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    out: Ref,
    top: Ref,
    total: Ref,
    *refs: Ref,
    q_smem: Ref,
    k_smem: Ref,
    v_smem: Ref,
    scores_smem: Ref,
    rows_smem: Ref,
    scores_of: Scores,
    groups: int,
) -> None:
    """A node's queries of one key/value head."""
    *sinks, merged = refs
    batch, kv_head = jax.lax.axis_index("batch"), jax.lax.axis_index("kv_head")
    token = jax.lax.axis_index("token")
    most, size = bounds[batch, 1], bounds[batch, 2]
    width, dtype = q.shape[-1], q.dtype
    node = batch, token, kv_head
    for source, target in ((q, q_smem), (k, k_smem), (v, v_smem)):
        ampere.copy(source, (*node, pl.ds(0, target.shape[0]), pl.ds(0, width)), target)
    ampere.wait(0)
    scores = ampere.zeros(MAX_GROUP, _GATHERED, dtype)
    for half in _halves(width):
        key = ampere.right(k_smem.at[:, half].transpose((1, 0)), MAX_GROUP)
        scores = ampere.mma(
            scores, ampere.left(q_smem.at[pl.ds(0, MAX_GROUP), half], MAX_GROUP), key
        )
    layout = ampere.accumulator(dtype, MAX_GROUP)
    filled = load(bias.at[batch, token], layout.reduce(0))
    filled = ampere.along_columns(filled, scores.shape, layout)
    scores_smem = scores_smem.at[:, pl.ds(0, _GATHERED)]
    scores_smem[...] = scores_of(scores, layout) + filled
    ampere.barrier()
    # Every warp has some of the places. Now each holds all of them, as the left of a matmul.
    whole = ampere.left_layout(dtype, MAX_GROUP)
    scores = load(scores_smem, whole)
    weights, _, highest, added = _softmax(_numbers(-math.inf, whole, MAX_GROUP), scores, whole)
    rows_smem[0], rows_smem[1] = highest, added
    weights = weights.astype(dtype)
    acc = [
        ampere.mma(
            ampere.zeros(MAX_GROUP, _COLUMNS, dtype),
            weights,
            ampere.right(v_smem.at[:, half], MAX_GROUP),
        )
        for half in _halves(width)
    ]
    ampere.barrier()
    begin = *(load(rows_smem.at[at], layout.reduce(1)) for at in range(2)), *acc
    row, rows = layout.reduce(1), pl.ds(token * groups, MAX_GROUP)
    for each in sinks:
        top_before, weight, *acc = begin
        sink = load(each.at[kv_head], row)
        highest = jnp.maximum(top_before, sink)
        keep = jnp.exp2(top_before - highest)
        weight = product(weight, keep, row) + jnp.exp2(sink - highest)
        acc = [value * ampere.along_rows(keep, value.shape, layout) for value in acc]
        begin = highest, weight, *acc
    reached = jax.lax.div(most + size - 1, size)
    if bounds.shape[1] > 3:
        oldest = bounds[batch, 3]
        reached -= jax.lax.div(oldest, size)

    def merge(split: jax.Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        at = batch, jnp.minimum(split, out.shape[1] - 1), kv_head, rows
        there = split < reached
        before, sum_before, *acc = state
        highest = jnp.where(there, load(top.at[at], row), -jnp.inf)
        added = jnp.where(there, load(total.at[at], row), 0.0)
        new = jnp.maximum(before, highest)
        keep, share = jnp.exp2(before - new), jnp.exp2(highest - new)
        for place, half in enumerate(_halves(width)):
            found = jnp.where(there, load(out.at[(*at, half)], layout), 0.0)
            factors = (ampere.along_rows(each, found.shape, layout) for each in (keep, share))
            each = zip((acc[place], found), factors, strict=True)
            old, more = (product(value, factor, layout) for value, factor in each)
            acc[place] = old + more
        return new, product(sum_before, keep, row) + product(added, share, row), *acc

    def merge_some(step: jax.Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        for ahead in range(_AT_ONCE):
            state = merge(step * _AT_ONCE + ahead, state)
        return state

    steps = jax.lax.div(reached + _AT_ONCE - 1, jnp.int32(_AT_ONCE))
    _, weight, *acc = jax.lax.fori_loop(0, steps, merge_some, begin)
    for half, value in zip(_halves(width), acc, strict=True):
        value = value * ampere.along_rows(1.0 / weight, value.shape, layout)
        ampere.store(merged.at[(*node, slice(None), half)], value.astype(dtype))


def _halves(width: int) -> list[ampere.Block]:
    """The columns of a head, as many at a time as lie side by side in shared memory."""
    return [pl.ds(first, _COLUMNS) for first in range(0, width, _COLUMNS)]


def _numbers(value: float, layout: ampere.Layout, rows: int = WARPGROUP_ROWS) -> Array:
    """The same number for every row."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), layout.reduce(1))


def _softmax(top: Array, scores: Array, layout: ampere.Layout) -> tuple[Array, Array, Array, Array]:
    """Weights of more scores, the factor on those before, the greatest score, the weights' sum."""
    new = jnp.maximum(top, jnp.max(scores, axis=1))
    # Of a row that has seen nothing yet: -inf - (-inf) is NaN.
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    weights = jnp.exp2(scores - ampere.along_rows(shift, scores.shape, layout))
    return weights, jnp.exp2(top - shift), new, jnp.sum(weights, axis=1)
