"""Prefix attention on NVIDIA GPUs through jax-triton: the twin of the Pallas-Triton kernel.

Pallas' Triton backend is deprecated; this implementation needs the packages ``jax-triton`` and
``triton`` instead, which are imported when it is first called. Its calls cannot be part of a CUDA
graph with jax-triton 0.3.1, which is why it is not the automatic choice.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from longspec_jax.axes import CacheSlots, Lengths, Queries
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.operands import PREFIX, Prefix
from longspec_jax.ops.attention.packing import refuse_unsupported
from longspec_jax.ops.attention.tiles import PrefixTile, triton_prefix_tile
from longspec_jax.ops.hardware import require_ampere
from longspec_jax.ops.partitioned import partitioned

MERGE_ROWS = 16


@partitioned(PREFIX)
def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    tile: PrefixTile | None = None,
) -> Partial:
    """Attend to ``start[b] <= s < length[b]``; see :func:`reference.prefix_attention`."""
    capability = require_ampere("the jax-triton prefix kernel")
    k, v, length, start = prefix.keys, prefix.values, prefix.length, prefix.start
    refuse_unsupported(q, k.shape[1])
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    if tile is None:
        tile = triton_prefix_tile(
            tokens, heads, kv_heads, width, slots, q.dtype.itemsize, capability
        )
    found = _launch(q, k, v, length, start, scale, tile, 10 * capability[0] + capability[1])
    return found.in_dtype(dtype)


def _launch(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    start: Lengths | None,
    scale: float | None,
    tile: PrefixTile,
    compute_capability: int,
) -> Partial:
    """Launch the two kernels; separate so that lowering can be checked without a GPU."""
    jax_triton, kernels = _import()
    batch, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    packed = tokens * heads // kv_heads
    splits = math.ceil(slots / tile.split)
    # A tile with several row parts is taken as the next larger power of two.
    rows = 1 << (tile.total_rows - 1).bit_length()
    length = length.astype(jnp.int32)
    start = jnp.zeros_like(length) if start is None else start.astype(jnp.int32)
    sizes = dict(
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        padded=1 << (width - 1).bit_length(),
        slots=slots,
        splits=splits,
        split_size=tile.split,
    )
    out, lse = jax_triton.triton_call(
        length,
        start,
        q,
        k,
        v,
        kernel=kernels.split_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((batch, splits, kv_heads, packed, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, kv_heads, packed), jnp.float32),
        ],
        grid=(math.ceil(packed / rows), splits, kv_heads * batch),
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=compute_capability,
        scale=(width**-0.5 if scale is None else scale) * math.log2(math.e),
        rows=rows,
        block=tile.slots,
        precision="ieee" if q.dtype == jnp.float32 else "tf32",
        **sizes,
    )
    out, lse = jax_triton.triton_call(
        length,
        start,
        out,
        lse,
        kernel=kernels.merge_kernel,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32),
        ],
        grid=(math.ceil(tokens * heads / MERGE_ROWS), batch),
        num_warps=4,
        num_stages=2,
        compute_capability=compute_capability,
        rows=MERGE_ROWS,
        **sizes,
    )
    return Partial(out, lse)


def _import() -> tuple[Any, Any]:
    """Import the optional packages, or refuse with the way to install them."""
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        # The package comes with the extras cuda12 and cuda13 only.
        import jax_triton  # pyright: ignore[reportMissingImports]

        from longspec_jax.ops.attention import prefix_triton_kernel
    except ImportError as error:
        raise NotImplementedError(
            f"the jax-triton prefix kernel cannot be imported ({error}); install jax-triton 0.3.1 "
            "and triton 3.6 beside jax with GPU support, or choose another implementation"
        ) from error
    # Importing jax-triton 0.3.1 empties this variable, which breaks torch's use of Triton.
    if cache is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = cache
    return jax_triton, prefix_triton_kernel
