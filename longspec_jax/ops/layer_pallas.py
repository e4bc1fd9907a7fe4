"""The small ops of a layer as Pallas kernels for Triton.

:func:`residual_norm` has a program per row. :func:`split_heads` has one for 16 heads of a token; it
writes queries in the order in which the attention kernels read them, packed, and their usual shape
is a view of it that nobody copies (:mod:`longspec_jax.ops.attention.packing`). Keys and values may
go among those of other tokens, in place.
:func:`append_rows` writes to many caches at once, in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int

from longspec_jax.axes import Array, CachedRows, CacheSlots, Lengths, Ref
from longspec_jax.ops.attention.packing import PackedShape, packed_rows, unpack
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_launch import triton_call

HEADS = 16
"""Heads of one program of :func:`split_heads`."""
CACHES = 64
"""Caches of one launch: every cache is two pointers and a branch of the kernel."""


@partitioned("b t d, s b t d, d -> b t d")
@launcher("eps", "interpret")
def residual_norm(
    x: Array, partials: Array | None, scale: Array, *, eps: float, interpret: bool = False
) -> tuple[Array, Array]:
    """See :func:`longspec_jax.ops.layer.residual_norm`; ``x`` is ``[B, T, D]``."""
    batch, tokens, width = x.shape
    rows = batch * tokens
    padded, splits = pl.next_power_of_2(width), 0 if partials is None else partials.shape[0]

    def kernel(x_ref, scale_ref, *refs) -> None:
        *partials_refs, total_ref, out_ref = refs
        row, column = pl.program_id(0), jnp.arange(padded)
        mask = column < width
        delta = jnp.zeros(padded, jnp.float32)
        for index in range(splits):
            part = pltriton.load(partials_refs[0].at[index, row, column], mask=mask, other=0.0)
            delta += part.astype(jnp.float32)
        total = pltriton.load(x_ref.at[row, column], mask=mask, other=0.0) + delta
        total = total.astype(x.dtype)
        factor = pltriton.load(scale_ref.at[column], mask=mask, other=0.0).astype(jnp.float32)
        wide = total.astype(jnp.float32)
        wide *= jax.lax.rsqrt((wide * wide).sum() / width + eps)
        pltriton.store(total_ref.at[row, column], total, mask=mask)
        out = (wide * factor).astype(out_ref.dtype)
        pltriton.store(out_ref.at[row, column], out, mask=mask)

    shape = jax.ShapeDtypeStruct((rows, width), x.dtype)
    added = [] if partials is None else [partials.reshape(-1, rows, width)]
    total, out = triton_call(
        kernel,
        grid=(rows,),
        out_shape=(shape, shape),
        warps=8,
        stages=1,
        interpret=interpret,
        name="residual_norm",
    )(x.reshape(rows, width), scale, *added)
    return total.reshape(x.shape), out.reshape(x.shape)


@partitioned("b t k j h, b a c, b a c, h, b u k h -> b t (k g) h, b u k h, b u k h")
@launcher("eps", "first", "interpret")
def split_heads(
    qkv: Array,
    cos: Array,
    sin: Array,
    scales: tuple[Array, Array] | None = None,
    among: tuple[Array, Array] | None = None,
    *,
    eps: float = 0.0,
    first: int = 0,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See :func:`longspec_jax.ops.layer.split_heads`, and ``split_into`` for keys among others."""
    batch, tokens, kv_heads, slots, width = qkv.shape
    rows, half = batch * tokens, width // 2
    queries = PackedShape(tokens=tokens, heads=kv_heads * (slots - 2), kv_heads=kv_heads)
    places = tokens if among is None else among[0].shape[1]
    kernel = functools.partial(
        _split_kernel,
        queries=queries,
        half=half,
        eps=eps,
        normed=scales is not None,
        same_angles=cos.shape[1] < tokens,
        places=(places, first),
    )
    flat = (batch * places, kv_heads, width)
    others = [each.reshape(flat) for each in among or ()]
    numbers = [*(scales or ()), *others]
    q, k, v = triton_call(
        kernel,
        grid=(pl.cdiv(queries.heads, HEADS) + 2 * pl.cdiv(kv_heads, HEADS), rows),
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, qkv.dtype)
            for shape in (
                (batch, kv_heads, queries.packed, width),
                flat,
                flat,
            )
        ),
        input_output_aliases={2 + len(numbers): 2, 1 + len(numbers): 1} if among else {},
        warps=4,
        stages=1,
        interpret=interpret,
        name="split_heads",
    )(
        qkv.reshape(rows, kv_heads * slots, width),
        cos.reshape(-1, half),
        sin.reshape(-1, half),
        *numbers,
    )
    shape = (batch, places, kv_heads, width)
    return unpack(q, tokens), k.reshape(shape), v.reshape(shape)


def _split_kernel(
    qkv_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    *refs: Ref,
    queries: PackedShape,
    half: int,
    eps: float,
    normed: bool,
    same_angles: bool,
    places: tuple[int, int],
) -> None:
    """Write 16 heads of one token: of queries, or of keys, or of values."""
    *_, q_ref, k_ref, v_ref = refs
    q_scale, k_scale = refs[:2] if normed else (None, None)
    block, row = pl.program_id(0), pl.program_id(1)
    (count, first), tokens = places, queries.tokens
    of_row = row if count == tokens else row // tokens * count + first + row % tokens
    angle = row // tokens if same_angles else row
    token = _Token(qkv_ref, (cos_ref, sin_ref), row, angle, half, eps)

    def packed(head: jax.Array) -> tuple[Any, ...]:
        flat = row % queries.tokens * queries.heads + head
        kv_head, place = packed_rows(flat, queries)
        return row // queries.tokens, kv_head[:, None], place[:, None]

    def of_token(head: jax.Array) -> tuple[Any, ...]:
        return of_row, head[:, None]

    kv_heads, groups, size = queries.kv_heads, queries.groups, queries.groups + 2
    parts = (
        (q_ref, queries.heads, lambda n: n // groups * size + n % groups, packed, True, q_scale),
        (k_ref, kv_heads, lambda n: n * size + groups, of_token, True, k_scale),
        (v_ref, kv_heads, lambda n: n * size + groups + 1, of_token, False, None),
    )
    first = 0
    for ref, heads, *how in parts:
        blocks = pl.cdiv(heads, HEADS)
        pl.when((block >= first) & (block < first + blocks))(
            functools.partial(token.write, ref, heads, block - first, *how)
        )
        first += blocks


@dataclasses.dataclass(frozen=True)
class _Token:
    """One token's heads, which a program reads in halves that rotate together."""

    qkv: Ref
    angles: tuple[Ref, Ref]
    row: jax.Array
    angle: jax.Array
    """The row of its angles."""
    half: int
    eps: float

    @property
    def within(self) -> tuple[jax.Array, jax.Array]:
        """Numbers of the first half of a head, in whole powers of two, and which exist."""
        h = jnp.arange(pl.next_power_of_2(self.half))
        return h, h < self.half

    def write(
        self,
        ref: Ref,
        heads: int,
        block: jax.Array,
        slots: Callable[[jax.Array], jax.Array],
        place: Callable[[jax.Array], tuple[Any, ...]],
        rotated: bool,
        scale: Ref,
    ) -> None:
        """Write a block of 16 of some heads.

        Args:
          ref: where they go.
          heads: how many there are.
          block: which of them.
          slots: where a head is in the projection.
          place: where it goes.
          rotated: whether it is rotated by the token's angles.
          scale: of the norm before the rotation, or none.
        """
        h, within = self.within
        head = block * HEADS + jnp.arange(HEADS)
        mask = (head < heads)[:, None] & within[None, :]
        source, target = (self.row, slots(head)[:, None]), place(head)
        low, high = (
            pltriton.load(self.qkv.at[*source, some[None, :]], mask=mask, other=0.0)
            for some in (h, h + self.half)
        )
        if rotated:
            cos, sin = (
                pltriton.load(part.at[self.angle, h], mask=within, other=0.0)[None, :]
                for part in self.angles
            )
            low, high = low.astype(jnp.float32), high.astype(jnp.float32)
            if scale is not None:
                low, high = self.normalised(low, high, scale)
            low, high = low * cos - high * sin, high * cos + low * sin
        pltriton.store(ref.at[*target, h[None, :]], low.astype(ref.dtype), mask=mask)
        pltriton.store(ref.at[*target, h[None, :] + self.half], high.astype(ref.dtype), mask=mask)

    def normalised(
        self, low: jax.Array, high: jax.Array, scale_ref: Ref
    ) -> tuple[jax.Array, jax.Array]:
        """Both halves of every head over the head's root mean square, rounded."""
        h, within = self.within
        squares = (low * low).sum(axis=1) + (high * high).sum(axis=1)
        factor = jax.lax.rsqrt(squares / (2 * self.half) + self.eps)[:, None]
        scales = (
            pltriton.load(scale_ref.at[some], mask=within, other=0.0) for some in (h, h + self.half)
        )
        low, high = (
            (part * factor * scale.astype(jnp.float32)[None, :]).astype(self.qkv.dtype)
            for part, scale in zip((low, high), scales, strict=True)
        )
        return low.astype(jnp.float32), high.astype(jnp.float32)


def append_rows(
    caches: Sequence[CacheSlots],
    fresh: Sequence[CachedRows],
    path: Int[Array, "B h"],
    length: Lengths,
    cache_rows: Lengths | None = None,
    *,
    ring: bool = False,
    interpret: bool = False,
) -> tuple[CacheSlots, ...]:
    """See :func:`longspec_jax.ops.layer.append_rows`."""
    written: list[CacheSlots] = []
    for first in range(0, len(caches), CACHES):
        some = slice(first, first + CACHES)
        operands = caches[some], fresh[some], path, length, cache_rows
        written += _append(*operands, ring=ring, interpret=interpret)
    return tuple(written)


@partitioned("b k s h, b u k h, b p, b, b -> b k s h")
@launcher("ring", "interpret")
def _append(
    caches: Sequence[CacheSlots],
    fresh: Sequence[CachedRows],
    path: Array,
    length: Array,
    cache_rows: Array | None,
    *,
    ring: bool,
    interpret: bool,
) -> Sequence[CacheSlots]:
    """One launch: a program for each row of the batch, key/value head and cache."""
    count, batch, kv_heads = len(caches), path.shape[0], caches[0].shape[1]
    numbers = [path, length] if cache_rows is None else [path, length, cache_rows]
    return triton_call(
        functools.partial(_append_kernel, count=count, ring=ring),
        grid=(kv_heads, batch, count),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={len(numbers) + count + index: index for index in range(count)},
        warps=1,
        stages=1,
        interpret=interpret,
        name="append_rows",
    )(*(each.astype(jnp.int32) for each in numbers), *fresh, *caches)


def _append_kernel(path_ref: Ref, length_ref: Ref, *refs: Ref, count: int, ring: bool) -> None:
    """Copy the path's rows of one head to one cache; other slots are the aliased input's."""
    *row_refs, refs = (*refs[: -3 * count], refs[-3 * count :])
    fresh_refs, cache_refs = refs[:count], refs[2 * count :]
    kv_head, batch, cache = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    height, width = path_ref.shape[1], fresh_refs[0].shape[3]
    step = jnp.arange(pl.next_power_of_2(height))
    h = jnp.arange(pl.next_power_of_2(width))[None, :]
    exists = step < height
    mask = exists[:, None] & (h < width)
    row = pltriton.load(path_ref.at[batch, step], mask=exists, other=0)[:, None]
    slot = (length_ref[batch] + step)[:, None]
    slot = slot % cache_refs[0].shape[2] if ring else slot
    cache_row = row_refs[0][batch] if row_refs else batch

    def copy(fresh_ref: Ref, cache_ref: Ref) -> None:
        rows = pltriton.load(fresh_ref.at[batch, row, kv_head, h], mask=mask, other=0)
        pltriton.store(cache_ref.at[cache_row, kv_head, slot, h], rows, mask=mask)

    for index in range(count):
        pl.when(cache == index)(functools.partial(copy, fresh_refs[index], cache_refs[index]))
