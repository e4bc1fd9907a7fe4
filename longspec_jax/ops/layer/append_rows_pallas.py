"""Appending rows to many caches as one Pallas kernel for Triton, in place."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int

from longspec_jax.axes import Array, CacheSlots, Lengths, TreeRows
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_compiler import compiler_params

CACHES = 64
"""Caches of one launch: every cache is two pointers and a branch of the kernel."""


def append_rows(
    caches: Sequence[CacheSlots],
    fresh: Sequence[TreeRows],
    path: Int[Array, "B h"],
    length: Lengths,
    interpret: bool = False,
) -> tuple[CacheSlots, ...]:
    """See :func:`longspec_jax.ops.layer.append_rows.append_rows`."""
    written: list[CacheSlots] = []
    for first in range(0, len(caches), CACHES):
        some = slice(first, first + CACHES)
        written += _call(caches[some], fresh[some], path, length, interpret=interpret)
    return tuple(written)


@partitioned("b k s h, b u k h, b p, b -> b k s h")
def _call(
    caches: Sequence[CacheSlots],
    fresh: Sequence[TreeRows],
    path: Array,
    length: Array,
    *,
    interpret: bool,
) -> Sequence[CacheSlots]:
    """One launch: a program for each row of the batch, key/value head and cache."""
    count = len(caches)
    batch, kv_heads = caches[0].shape[:2]
    return pl.pallas_call(
        functools.partial(_kernel, count=count),
        grid=(kv_heads, batch, count),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={2 + count + index: index for index in range(count)},
        compiler_params=compiler_params(warps=1, stages=1),
        interpret=interpret,
        name="append_rows",
    )(path.astype(jnp.int32), length.astype(jnp.int32), *fresh, *caches)


def _kernel(path_ref: Any, length_ref: Any, *refs: Any, count: int) -> None:
    """Copy the path's rows of one head to one cache; other slots are the aliased input's."""
    fresh_refs, cache_refs = refs[:count], refs[2 * count :]
    kv_head, batch, cache = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    height, width = path_ref.shape[1], fresh_refs[0].shape[3]
    step = jnp.arange(pl.next_power_of_2(height))
    h = jnp.arange(pl.next_power_of_2(width))[None, :]
    exists = step < height
    mask = exists[:, None] & (h < width)
    row = pltriton.load(path_ref.at[batch, step], mask=exists, other=0)[:, None]
    slot = (length_ref[batch] + step)[:, None]

    def copy(fresh_ref: Any, cache_ref: Any) -> None:
        rows = pltriton.load(fresh_ref.at[batch, row, kv_head, h], mask=mask, other=0.0)
        pltriton.store(cache_ref.at[batch, kv_head, slot, h], rows, mask=mask)

    for index in range(count):
        pl.when(cache == index)(functools.partial(copy, fresh_refs[index], cache_refs[index]))
