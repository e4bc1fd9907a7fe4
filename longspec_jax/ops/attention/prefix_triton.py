"""Prefix attention on NVIDIA GPUs through jax-triton: the twin of the Pallas kernel for Triton.

Pallas' Triton backend is deprecated. This implementation needs the packages ``jax-triton`` and
``triton`` instead; importing this file needs the latter. Its calls cannot be part of a CUDA graph
with jax-triton 0.3.1, which is why it is not the automatic choice. The kernels compute what those
of ``prefix_pallas`` do, in the same order of summation.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp

# The package comes with the extra triton only.
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax.typing import DTypeLike

from longspec_jax.axes import Queries
from longspec_jax.ops.attention.operands import PREFIX_AXES, Partial, Prefix
from longspec_jax.ops.attention.packing import refuse_unsupported
from longspec_jax.ops.attention.tiles import PrefixTile, triton_prefix_tile
from longspec_jax.ops.hardware import require_ampere
from longspec_jax.ops.partitioned import partitioned

MERGE_ROWS = 16


@partitioned(PREFIX_AXES)
def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    tile: PrefixTile | None = None,
) -> Partial:
    """Attend to ``start[b] <= s < length[b]``; as ``reference.prefix_attention`` defines."""
    capability = require_ampere("the jax-triton prefix kernel")
    k, v, length, start = prefix.keys, prefix.values, prefix.length, prefix.start
    refuse_unsupported(q, k.shape[1])
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    if tile is None:
        tile = triton_prefix_tile(
            tokens, heads, kv_heads, width, slots, q.dtype.itemsize, capability
        )
    jax_triton = _import()
    packed = tokens * heads // kv_heads
    splits = math.ceil(slots / tile.split)
    # A tile with several row parts is taken as the next larger power of two.
    rows = 1 << (tile.total_rows - 1).bit_length()
    length = length.astype(jnp.int32)
    start = jnp.zeros_like(length) if start is None else start.astype(jnp.int32)
    cache_rows = jnp.arange(batch) if prefix.cache_rows is None else prefix.cache_rows
    sizes = dict(
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        padded=1 << (width - 1).bit_length(),
        slots=slots,
        splits=splits,
        block=tile.slots,
    )
    out, lse = jax_triton.triton_call(
        length,
        start,
        cache_rows.astype(jnp.int32),
        q,
        k,
        v,
        kernel=_split_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, splits, kv_heads, packed, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, kv_heads, packed), jnp.float32),
        ],
        grid=(math.ceil(packed / rows), splits, kv_heads * batch),
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=10 * capability[0] + capability[1],
        scale=(width**-0.5 if scale is None else scale) * math.log2(math.e),
        rows=rows,
        precision="ieee" if q.dtype == jnp.float32 else "tf32",
        **sizes,
    )
    out, lse = jax_triton.triton_call(
        length,
        start,
        out,
        lse,
        kernel=_merge_kernel,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        grid=(math.ceil(tokens * heads / MERGE_ROWS), batch),
        num_warps=4,
        num_stages=2,
        compute_capability=10 * capability[0] + capability[1],
        rows=MERGE_ROWS,
        **sizes,
    )
    return Partial(out, lse).in_dtype(dtype)


def _import() -> Any:
    """Import jax-triton, which empties a variable that torch's use of Triton needs.

    Raises:
      NotImplementedError: for a release that this jax cannot trace.
    """
    cache = os.environ.get("TRITON_CACHE_DIR")
    # The package comes with the extra triton only.
    import jax_triton  # pyright: ignore[reportMissingImports]

    if cache is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = cache
    if jax.__version_info__ >= (0, 12) and jax_triton.__version__.startswith(("0.3.", "0.4.")):
        raise NotImplementedError(
            f"jax-triton {jax_triton.__version__} fails in jit with jax {jax.__version__}; install "
            "the extra triton, which brings jax 0.11, or choose another attention="
        )
    return jax_triton


@triton.jit
def _split_kernel(
    length_ptr,
    start_ptr,
    row_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    slots: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    scale: tl.constexpr,
    rows: tl.constexpr,
    precision: tl.constexpr,
):
    """One row tile of one key/value head against one split; ``scale`` includes log2(e)."""
    groups: tl.constexpr = heads // kv_heads
    packed_rows: tl.constexpr = tokens * groups
    split = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(2) % kv_heads
    length = tl.minimum(tl.load(length_ptr + batch), slots)
    split_size = tl.maximum(tl.cdiv(length, splits * block), 1) * block
    lower = tl.maximum(split * split_size, tl.load(start_ptr + batch))
    upper = tl.minimum(length, split * split_size + split_size)
    if lower >= upper:
        return
    h = tl.arange(0, padded)
    within = (h < width)[None, :]
    packed = tl.program_id(0) * rows + tl.arange(0, rows)
    valid = packed < packed_rows
    place = packed // groups * heads + kv_head * groups + packed % groups
    q = tl.load(
        q_ptr + (batch * tokens * heads + place[:, None]) * width + h[None, :],
        mask=valid[:, None] & within,
        other=0.0,
    )
    cache = (tl.load(row_ptr + batch).to(tl.int64) * kv_heads + kv_head) * slots * width
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, padded], tl.float32)
    for index in range(lower // block, tl.cdiv(upper, block)):
        slot = index * block + tl.arange(0, block)
        seen = (slot >= lower) & (slot < upper)
        offset = cache + slot[:, None].to(tl.int64) * width + h[None, :]
        k = tl.load(k_ptr + offset, mask=seen[:, None] & within, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weight, 1)
        v = tl.load(v_ptr + offset, mask=seen[:, None] & within, other=0.0)
        acc = acc * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=precision)
        top = new_top
    target = ((batch * splits + split) * kv_heads + kv_head) * packed_rows + packed
    tl.store(
        out_ptr + target[:, None] * width + h[None, :],
        acc / total[:, None],
        mask=valid[:, None] & within,
    )
    tl.store(lse_ptr + target, (top + tl.log2(total)) * 0.6931471805599453, mask=valid)


@triton.jit
def _merge_kernel(
    length_ptr,
    start_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    tokens: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    slots: tl.constexpr,
    splits: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
):
    """Merge the reached splits of some rows of the flattened [T N] axis, in ascending order."""
    groups: tl.constexpr = heads // kv_heads
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    valid = row < tokens * heads
    kv_head = row % heads // groups
    packed = row // heads * groups + row % groups
    start = tl.load(start_ptr + batch)
    length = tl.minimum(tl.load(length_ptr + batch), slots)
    split_size = tl.maximum(tl.cdiv(length, splits * block), 1) * block
    h = tl.arange(0, padded)
    mask = valid[:, None] & (h < width)[None, :]
    top = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, padded], tl.float32)
    last = tl.where(start < length, tl.cdiv(length, split_size), 0)
    for split in range(tl.maximum(start, 0) // split_size, last):
        source = ((batch * splits + split) * kv_heads + kv_head) * (tokens * groups) + packed
        lse = tl.load(partial_lse_ptr + source, mask=valid, other=0.0) * 1.4426950408889634
        part = tl.load(partial_ptr + source[:, None] * width + h[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        keep = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * keep + weight
        acc = acc * keep[:, None] + part * weight[:, None]
        top = new_top
    empty = total == 0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(safe)) * 0.6931471805599453)
    target = batch * tokens * heads + row
    tl.store(out_ptr + target[:, None] * width + h[None, :], acc / safe[:, None], mask=mask)
    tl.store(lse_ptr + target, lse, mask=valid)
