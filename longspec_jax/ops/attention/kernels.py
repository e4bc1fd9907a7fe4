"""Attention by the Pallas kernels: a prefix's splits, then their merge or the tree's kernel.

Which kernel computes the splits is said by the tile: Triton's from Ampere on, or the one that is
written for Hopper. What the prefix kernel leaves goes to a small kernel that merges it or, in
speculative attention, to the tree kernel, which starts its softmax from it: two kernels in all. The
chunk kernel does so for prefill. Of few rows, as in a plain step, all is one kernel.

Jitted, so that the equal layers of a model are traced and lowered once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Queries, TreeRows
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import (
    chunk_pallas,
    joined_pallas,
    prefix_pallas,
    tiles,
    tree_pallas,
)
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.operands import CHUNK, PREFIX, SPECULATIVE, Fresh, Prefix
from longspec_jax.ops.attention.packing import PackedShape, refuse_unsupported
from longspec_jax.ops.attention.splits import merge_splits
from longspec_jax.ops.attention.tiles import (
    MosaicTile,
    PrefixTile,
    TreeTile,
)
from longspec_jax.ops.partitioned import partitioned


@functools.partial(jax.jit, static_argnames=("scale", "dtype", "tile", "hopper", "interpret"))
@partitioned(PREFIX)
def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    tile: PrefixTile | MosaicTile | None = None,
    hopper: bool = False,
    interpret: bool = False,
) -> Partial:
    """Attend to ``start[b] <= s < length[b]``; see :func:`reference.prefix_attention`.

    One kernel or two, of which the second merges.

    Args:
      q: query tokens.
      prefix: the cached tokens.
      scale: factor on the scores.
      dtype: of the output.
      tile: how the prefix kernel works; chosen by the shape if absent.
      hopper: take the Hopper kernel whatever the shape.
      interpret: run the kernels step by step on any platform.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    tile = tile or _choose_tile(q, prefix, hopper=hopper, interpret=interpret)
    if isinstance(tile, PrefixTile) and joined_pallas.takes(tile):
        out, lse = joined_pallas.attend(
            *(q, prefix, None),
            scale=width**-0.5 if scale is None else scale,
            tile=tile,
            dtype=dtype,
            interpret=interpret,
        )
        return Partial(out.reshape(q.shape), lse.reshape(q.shape[:3]))
    partials = _split_attention(q, prefix, scale, tile, interpret=interpret)
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads)
    return merge_splits(
        *(partials, prefix.length, prefix.start),
        shape=shape,
        split=tile.split,
        slots=slots,
        dtype=dtype,
        interpret=interpret,
    )


@functools.partial(
    jax.jit, static_argnames=("scale", "prefix_tile", "tree_tile", "hopper", "interpret")
)
@partitioned(SPECULATIVE)
def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    *,
    scale: float | None = None,
    prefix_tile: PrefixTile | MosaicTile | None = None,
    tree_tile: TreeTile | None = None,
    hopper: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """One softmax over the prefix and, masked, the tree; one kernel or two.

    Options as in :func:`prefix_attention`, with a tile for each kernel; who gives a tile for the
    second one gets two.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    factor = width**-0.5 if scale is None else scale
    _refuse_start(prefix)
    tile = prefix_tile or _choose_tile(q, prefix, hopper=hopper, interpret=interpret)
    if tree_tile is None and isinstance(tile, PrefixTile) and joined_pallas.takes(tile):
        out, _ = joined_pallas.attend(
            q, prefix, fresh, scale=factor, tile=tile, dtype=q.dtype, interpret=interpret
        )
        return out.reshape(q.shape)
    partials = _split_attention(q, prefix, scale, tile, interpret=interpret)
    if tree_tile is None:
        sizes = (tokens, heads, kv_heads, width, fresh.keys.shape[1], q.dtype.itemsize)
        tree_tile = tiles.tree_tile(*sizes)
    out, _ = tree_pallas.attend(
        *(q, fresh, (prefix.length.astype(jnp.int32), *partials)),
        tile=tree_tile,
        scale=factor,
        split=tile.split,
        slots=slots,
        dtype=q.dtype,
        interpret=interpret,
    )
    return out.reshape(q.shape)


@functools.partial(
    jax.jit, static_argnames=("scale", "prefix_tile", "chunk_tile", "hopper", "interpret")
)
@partitioned(CHUNK)
def chunk_attention(
    q: Queries,
    prefix: Prefix,
    keys: TreeRows,
    values: TreeRows,
    *,
    scale: float | None = None,
    prefix_tile: PrefixTile | MosaicTile | None = None,
    chunk_tile: TreeTile | None = None,
    hopper: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """One softmax over the prefix and, causally, the chunk; two kernels in all.

    Options as in :func:`prefix_attention`, with a tile for each kernel.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    _refuse_start(prefix)
    tile = prefix_tile or _choose_tile(q, prefix, hopper=hopper, interpret=interpret)
    partials = _split_attention(q, prefix, scale, tile, interpret=interpret)
    if chunk_tile is None:
        chunk_tile = tiles.chunk_tile(tokens, heads, kv_heads, width, q.dtype.itemsize)
    return chunk_pallas.attend(
        *(q, keys, values, (prefix.length.astype(jnp.int32), *partials)),
        tile=chunk_tile,
        scale=width**-0.5 if scale is None else scale,
        split=tile.split,
        slots=slots,
        interpret=interpret,
    )


def _refuse_start(prefix: Prefix) -> None:
    """Raise for a prefix whose first slots are not seen."""
    if prefix.start is not None:
        raise NotImplementedError(
            "the fused kernels see every slot from the first on; choose implementation='xla' for a "
            "prefix with a start"
        )


def _choose_tile(
    q: Queries, prefix: Prefix, *, hopper: bool, interpret: bool
) -> PrefixTile | MosaicTile:
    """The heuristic's tile for this GPU; refuses where there is none.

    The Hopper kernel takes no lower bound, interpret mode does not run it and older versions of jax
    cannot express it.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    if hopper:
        hardware.require_hopper("the Mosaic GPU kernel")
        return tiles.mosaic_prefix_tile(tokens, heads, kv_heads, slots)
    capability = hardware.AMPERE if interpret else hardware.require_ampere("the Pallas kernels")
    sizes = (tokens, heads, kv_heads, width, slots, q.dtype.itemsize, capability)
    if prefix.start is not None or interpret or not hardware.mosaic_is_supported():
        return tiles.triton_prefix_tile(*sizes)
    return tiles.prefix_tile(*sizes)


def _split_attention(
    q: Queries,
    prefix: Prefix,
    scale: float | None,
    tile: PrefixTile | MosaicTile,
    *,
    interpret: bool,
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split by the kernel that the tile is for."""
    k, v, length, start = prefix.keys, prefix.values, prefix.length, prefix.start
    refuse_unsupported(q, k.shape[1])
    if isinstance(tile, PrefixTile):
        return prefix_pallas.split_attention(
            *(q, k, v, length, start), scale=scale, tile=tile, interpret=interpret
        )
    if start is not None or interpret:
        raise NotImplementedError(
            "the Mosaic GPU kernel takes no lower bound and does not run in interpret mode"
        )
    from longspec_jax.ops.attention import prefix_mosaic  # Older versions lack its backend.

    return prefix_mosaic.split_attention(q, k, v, length, scale=scale, tile=tile)
