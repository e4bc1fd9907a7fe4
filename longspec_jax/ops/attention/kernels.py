"""Attention by the Pallas kernels: a prefix's splits, then their merge or the tree's kernel.

Which kernel computes the splits is said by the tile: Triton's from Ampere on, or the one that is
written for Hopper. What the prefix kernel leaves goes to a small kernel that merges it or, in
speculative attention, to the tree kernel, which starts its softmax from it: two kernels in all.

Jitted, so that the equal layers of a model are traced and lowered once.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array, CacheSlots, Lengths, Queries, TreeMask, TreeRows
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import prefix_pallas, tree_pallas
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.packing import PackedShape, refuse_unsupported
from longspec_jax.ops.attention.partitioned import PREFIX, SPECULATIVE, partitioned
from longspec_jax.ops.attention.splits import merge_splits
from longspec_jax.ops.attention.tiles import (
    MosaicTile,
    PrefixTile,
    TreeTile,
    mosaic_prefix_tile,
    prefix_tile,
    tree_tile,
    triton_prefix_tile,
)


@functools.partial(jax.jit, static_argnames=("scale", "tile", "hopper", "interpret"))
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
    hopper: bool = False,
    interpret: bool = False,
) -> Partial:
    """Attend to ``start[b] <= s < length[b]``; see :func:`reference.prefix_attention`.

    Args:
      q: query tokens.
      k: cached keys.
      v: cached values.
      length: slots of each row that hold committed tokens.
      start: first slot each row sees; 0 if absent.
      scale: factor on the scores.
      tile: how the prefix kernel works; chosen by the shape if absent.
      hopper: take the Hopper kernel whatever the shape.
      interpret: run the kernels step by step on any platform.
    """
    _, tokens, heads, _ = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    if tile is None:
        tile = _choose_tile(q, k, bounded=start is not None, hopper=hopper, interpret=interpret)
    partials = _split_attention(q, k, v, length, start, scale, tile, interpret)
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads)
    return merge_splits(
        *(partials, length, start),
        shape=shape,
        split=tile.split,
        slots=slots,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("scale", "prefix", "tree", "hopper", "interpret"))
@partitioned(SPECULATIVE)
def speculative_attention(
    q: Queries,
    prefix_k: CacheSlots,
    prefix_v: CacheSlots,
    length: Lengths,
    tree_k: TreeRows,
    tree_v: TreeRows,
    mask: TreeMask,
    *,
    scale: float | None = None,
    prefix: PrefixTile | MosaicTile | None = None,
    tree: TreeTile | None = None,
    hopper: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """One softmax over the prefix and, masked, the tree; two kernels in all.

    ``prefix`` and ``tree`` are the kernels' tiles; the other options as in
    :func:`prefix_attention`.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = prefix_k.shape[1], prefix_k.shape[2]
    if prefix is None:
        prefix = _choose_tile(q, prefix_k, bounded=False, hopper=hopper, interpret=interpret)
    partials = _split_attention(q, prefix_k, prefix_v, length, None, scale, prefix, interpret)
    out, _ = tree_pallas.attend(
        q,
        tree_k,
        tree_v,
        mask,
        (length.astype(jnp.int32), *partials),
        tile=tree or tree_tile(tokens, heads, kv_heads, width, tree_k.shape[1], q.dtype.itemsize),
        scale=width**-0.5 if scale is None else scale,
        split=prefix.split,
        slots=slots,
        interpret=interpret,
    )
    return out.reshape(q.shape)


def _choose_tile(
    q: Queries, k: CacheSlots, *, bounded: bool, hopper: bool, interpret: bool
) -> PrefixTile | MosaicTile:
    """The heuristic's tile for this GPU; refuses where there is none.

    The Hopper kernel takes no lower bound, interpret mode does not run it and older versions of jax
    cannot express it.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    if hopper:
        hardware.require_hopper("the Mosaic GPU kernel")
        return mosaic_prefix_tile(tokens, heads, kv_heads, slots)
    capability = hardware.AMPERE if interpret else hardware.require_ampere("the Pallas kernels")
    sizes = (tokens, heads, kv_heads, width, slots, q.dtype.itemsize, capability)
    if bounded or interpret or not hardware.mosaic_is_supported():
        return triton_prefix_tile(*sizes)
    return prefix_tile(*sizes)


def _split_attention(
    q: Queries,
    k: CacheSlots,
    v: CacheSlots,
    length: Lengths,
    start: Lengths | None,
    scale: float | None,
    tile: PrefixTile | MosaicTile,
    interpret: bool,
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split by the kernel that the tile is for."""
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
