"""The small ops of a layer as Pallas kernels for Mosaic GPU, from compute capability 8.0 on.

They compute what those of :mod:`longspec_jax.ops.layer_pallas` do, in the same way: a program for
every row of the norm, for 16 heads of a token, for a row of a cache. A row's sums have one order,
whatever stands next to it.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longspec_jax.axes import Array, CachedRows, CacheSlots, Lengths, Ref
from longspec_jax.ops import ampere
from longspec_jax.ops.attention.packing import PackedShape, unpack
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned

HEADS = 16
"""Heads of one program of :func:`split_heads`."""
_THREADS = 128


@partitioned("b t d, s b t d, d -> b t d")
@launcher("eps")
def residual_norm(
    x: Array, partials: Array | None, scale: Array, *, eps: float
) -> tuple[Array, Array]:
    """See :func:`longspec_jax.ops.layer.residual_norm`; ``x`` is ``[B, T, D]``."""
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    side = math.gcd(8, width)
    padded = -(-width // (side * _THREADS)) * side * _THREADS
    layout = plgpu.Layout.WG_STRIDED((padded,), vec_size=side)

    def kernel(x_ref: Ref, scale_ref: Ref, *refs: Ref) -> None:
        *partials_refs, total_ref, out_ref = refs
        row = jax.lax.axis_index("row")
        column = plgpu.broadcasted_iota(jnp.int32, (padded,), 0, layout=layout)
        there = column < width
        at = jnp.where(there, column, 0)

        def wide(ref: Ref, *place: int | jax.Array) -> Array:
            return ampere.gather(ref, (*place, at), layout).astype(jnp.float32)

        total = wide(x_ref, row)
        for ref in partials_refs:
            delta = wide(ref, 0, row)
            for part in range(1, ref.shape[0]):
                delta += wide(ref, part, row)
            total += delta
        total = total.astype(x.dtype)
        rounded = jnp.where(there, total.astype(jnp.float32), 0.0)
        factor = jax.lax.rsqrt(jnp.sum(rounded * rounded) / width + eps)
        ampere.scatter(total_ref, (row, column), total, there, layout)
        out = rounded * factor * wide(scale_ref)
        ampere.scatter(out_ref, (row, column), out, there, layout)

    shape = jax.ShapeDtypeStruct((rows, width), x.dtype)
    added = [] if partials is None else [partials.reshape(-1, rows, width)]
    launch = plgpu.kernel(
        kernel,
        out_type=(shape, shape),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=ampere.compiler_params(reduced=64),
        kernel_name="residual_norm",
    )
    total, out = launch(x.reshape(rows, width), scale, *added)
    return total.reshape(x.shape), out.reshape(x.shape)


@partitioned("b t k j h, b a c, b a c, h, b u k h -> b t (k g) h, b u k h, b u k h")
@launcher("eps", "first")
def split_heads(
    qkv: Array,
    cos: Array,
    sin: Array,
    scales: tuple[Array, Array] | None = None,
    among: tuple[Array, Array] | None = None,
    *,
    eps: float = 0.0,
    first: int = 0,
) -> tuple[Array, Array, Array]:
    """See :func:`longspec_jax.ops.layer.split_heads`, and ``split_into`` for keys among others."""
    batch, tokens, kv_heads, slots, width = qkv.shape
    rows, half = batch * tokens, width // 2
    queries = PackedShape(tokens=tokens, heads=kv_heads * (slots - 2), kv_heads=kv_heads)
    places = tokens if among is None else among[0].shape[1]
    flat = (batch * places, kv_heads, width)
    shapes = (batch, kv_heads, queries.packed, width), *([] if among else [flat] * 2)
    others = [jax.new_ref(each.reshape(flat)) for each in among or ()]
    launch = plgpu.kernel(
        functools.partial(
            _split_kernel,
            queries=queries,
            eps=eps,
            normed=scales is not None,
            same_angles=cos.shape[1] < tokens,
            places=(places, first),
        ),
        out_type=tuple(jax.ShapeDtypeStruct(shape, qkv.dtype) for shape in shapes),
        grid=(pl.cdiv(queries.heads, HEADS) + 2 * pl.cdiv(kv_heads, HEADS), rows),
        grid_names=("block", "row"),
        compiler_params=ampere.compiler_params(),
        kernel_name="split_heads",
    )
    flat_qkv = qkv.reshape(rows, kv_heads * slots, width)
    angles = cos.reshape(-1, half), sin.reshape(-1, half)
    q, *fresh = launch(flat_qkv, *angles, *(scales or ()), *others)
    k, v = (
        each.reshape(batch, places, kv_heads, width) for each in fresh or map(jax.freeze, others)
    )
    return unpack(q, tokens), k, v


def _split_kernel(
    qkv_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    *refs: Ref,
    queries: PackedShape,
    eps: float,
    normed: bool,
    same_angles: bool,
    places: tuple[int, int],
) -> None:
    """Write 16 heads of one token: of queries, or of keys, or of values."""
    scales, refs = (refs[:2], refs[2:]) if normed else ((None, None), refs)
    # Keys and values that go among others are operands, in front of the result.
    q_ref, k_ref, v_ref = refs if places[0] == queries.tokens else (refs[2], *refs[:2])
    block, row = (jax.lax.axis_index(name) for name in ("block", "row"))
    (count, first), tokens, groups = places, queries.tokens, queries.groups
    batch, token = jax.lax.div(row, tokens), jax.lax.rem(row, tokens)
    of_row = batch * count + first + token
    angle = batch if same_angles else row
    half, size = cos_ref.shape[1], groups + 2
    shape, layout = (HEADS, half), ampere.rows_layout(half)
    h = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

    def read(ref: Ref, *at: Array) -> Array:
        return ampere.gather(ref, at, layout).astype(jnp.float32)

    def write(ref: Ref, heads: int, begin: int, kind: int, scale: Ref | None) -> None:
        head = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + (block - begin) * HEADS
        there = head < heads
        head = jnp.where(there, head, 0)
        # After a key/value head's queries there are its key and its value.
        group = jax.lax.rem(head, groups) if kind == 0 else groups + kind - 1
        kv_head = jax.lax.div(head, groups) if kind == 0 else head
        parts = [read(qkv_ref, row, kv_head * size + group, h + shift) for shift in (0, half)]
        if scale is not None:
            squares = jnp.sum(parts[0] * parts[0], axis=1) + jnp.sum(parts[1] * parts[1], axis=1)
            factor = jax.lax.rsqrt(squares / (2 * half) + eps)
            factor = ampere.along_rows(factor, shape, layout)
            normed = (
                (part * factor * read(scale, h + shift)).astype(ref.dtype)
                for part, shift in zip(parts, (0, half), strict=True)
            )
            parts = [part.astype(jnp.float32) for part in normed]
        if kind < 2:
            low, high = parts
            cos, sin = read(cos_ref, angle, h), read(sin_ref, angle, h)
            parts = [low * cos - high * sin, high * cos + low * sin]
        at = (batch, kv_head, token * groups + group) if kind == 0 else (of_row, head)
        for part, shift in zip(parts, (0, half), strict=True):
            ampere.scatter(ref, (*at, h + shift), part, there, layout)

    begin = 0
    for kind, (ref, scale) in enumerate(((q_ref, scales[0]), (k_ref, scales[1]), (v_ref, None))):
        heads = queries.kv_heads if kind else queries.heads
        blocks = pl.cdiv(heads, HEADS)
        pl.when((block >= begin) & (block < begin + blocks))(
            functools.partial(write, ref, heads, begin, kind, scale)
        )
        begin += blocks


@partitioned("b k s h, b u k h, b p, b, b -> b k s h")
@launcher("ring")
def append_rows(
    caches: Sequence[CacheSlots],
    fresh: Sequence[CachedRows],
    path: Array,
    length: Lengths,
    cache_rows: Lengths | None = None,
    *,
    ring: bool = False,
) -> tuple[CacheSlots, ...]:
    """See :func:`longspec_jax.ops.layer.append_rows`."""
    count, (batch, height) = len(caches), path.shape
    kv_heads, slots, width = caches[0].shape[1:]
    shape, layout = (HEADS, width), ampere.rows_layout(width)

    def kernel(path_ref: Ref, at_ref: Ref, row_ref: Ref, *refs: Ref) -> None:
        block, kv_head, batch, cache = (
            jax.lax.axis_index(name) for name in ("block", "kv_head", "batch", "cache")
        )
        h = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        row = layout.reduce(1)
        step = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=row) + block * HEADS
        chosen = ampere.gather(path_ref, (batch, jnp.minimum(step, height - 1)), row)
        slot = at_ref[batch] + step
        slot = jax.lax.rem(slot, slots) if ring else slot
        there, chosen, slot = (
            ampere.along_rows(each, shape, layout) for each in (step < height, chosen, slot)
        )
        for index in range(count):

            @pl.when(cache == index)
            def _(fresh: Ref = refs[index], target: Ref = refs[count + index]) -> None:
                copied = ampere.gather(fresh, (batch, chosen, kv_head, h), layout)
                at = row_ref[batch], kv_head, slot, h
                ampere.scatter(target, at, copied, there, layout)

    launch = plgpu.kernel(
        kernel,
        grid=(pl.cdiv(height, HEADS), kv_heads, batch, count),
        grid_names=("block", "kv_head", "batch", "cache"),
        compiler_params=ampere.compiler_params(),
        kernel_name="append_rows",
    )
    numbers = path, length, jnp.arange(batch) if cache_rows is None else cache_rows
    written = [jax.new_ref(cache) for cache in caches]
    launch(*(each.astype(jnp.int32) for each in numbers), *fresh, *written)
    return tuple(jax.freeze(cache) for cache in written)
