"""Attention by the Pallas kernels: a prefix's splits, then their merge or the tree's kernel.

The tile chooses the kernel that computes the splits: Triton's from Ampere on, or the one that is
written for Hopper. What it leaves goes to a small kernel that merges it or, in speculative
attention, to the kernel of trees or that of chunks, which starts its softmax from it: two kernels
in all. Few rows, as in a plain step, take one kernel.

Jitted, so that the equal layers of a model are traced and lowered once.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float

from longspec_jax.axes import Array, Queries, Sinks
from longspec_jax.ops import hardware
from longspec_jax.ops.attention import fresh_pallas, prefix_pallas, tiles
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.operands import (
    PREFIX_AXES,
    SPECULATIVE_AXES,
    Fresh,
    Partial,
    Prefix,
    with_sinks,
)
from longspec_jax.ops.attention.packing import Problem, refuse_unsupported
from longspec_jax.ops.attention.splits import merge_splits
from longspec_jax.ops.attention.tiles import MosaicTile, PrefixTile, TreeTile
from longspec_jax.ops.launchers import launcher
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_launch import is_reached


@partitioned(PREFIX_AXES)
@launcher("scale", "cap", "dtype", "tile", "hopper", "interpret")
def prefix_attention(
    q: Queries,
    prefix: Prefix,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dtype: DTypeLike = jnp.float32,
    tile: PrefixTile | MosaicTile | None = None,
    hopper: bool = False,
    interpret: bool = False,
) -> Partial:
    """See :func:`dispatch.prefix_attention`; one kernel, or two, the second of which merges.

    ``tile`` is how the prefix kernel works; the shape chooses it if absent. ``hopper`` takes the
    Hopper kernel whatever the shape. ``interpret`` runs the kernels step by step on any platform.
    """
    tile = tile or _choose_tile(q, prefix, cap, hopper=hopper, interpret=interpret)
    problem = _problem(q, prefix, (scale, cap), tile, interpret)
    if isinstance(tile, PrefixTile) and prefix_pallas.joins(tile):
        out, lse = prefix_pallas.joined_attention(q, prefix, None, tile, problem, dtype)
        return Partial(out.reshape(q.shape), lse.reshape(q.shape[:3]))
    return merge_splits(_partials(q, prefix, tile, problem), prefix, problem, dtype)


@partitioned(SPECULATIVE_AXES)
@launcher("scale", "cap", "prefix_tile", "tree_tile", "hopper", "interpret")
def speculative_attention(
    q: Queries,
    prefix: Prefix,
    fresh: Fresh,
    sinks: Sinks | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    prefix_tile: PrefixTile | MosaicTile | None = None,
    tree_tile: TreeTile | None = None,
    hopper: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """One softmax over the prefix and the fresh tokens; one kernel or two, and sinks after them.

    Options as in :func:`prefix_attention`, with a tile for each kernel; a tile for the second one
    makes it two.
    """
    if prefix.start is not None:
        raise NotImplementedError(
            "the fused kernels see every slot from the first on; choose 'xla' for a prefix with a "
            "start"
        )
    tile = prefix_tile or _choose_tile(q, prefix, cap, hopper=hopper, interpret=interpret)
    bounded = cap is not None or prefix.oldest is not None  # Of which Triton's kernel has chunks.
    if fresh.mask is None and prefix_tile is None and (bounded or isinstance(tile, MosaicTile)):
        # One split: a chunk has rows enough, and its result must not depend on the capacity.
        slots = prefix.keys.shape[2]
        tile = dataclasses.replace(tile, split=-(-slots // tile.slots) * tile.slots)
    problem = _problem(q, prefix, (scale, cap), tile, interpret)
    # What sinks are still to be merged with wants float32.
    dtype = q.dtype if sinks is None else jnp.float32
    one = tree_tile is None and fresh.mask is not None
    if one and isinstance(tile, PrefixTile) and prefix_pallas.joins(tile):
        found = prefix_pallas.joined_attention(q, prefix, fresh, tile, problem, dtype)
    else:
        past = prefix.length.astype(jnp.int32), *_partials(q, prefix, tile, problem)
        found = fresh_pallas.attend_after(q, prefix, fresh, past, tree_tile, problem, dtype)
    seen = Partial(found[0].reshape(q.shape), found[1].reshape(q.shape[:3]))
    return with_sinks(seen, sinks).out.astype(q.dtype)


def _choose_tile(
    q: Queries, prefix: Prefix, cap: float | None, *, hopper: bool, interpret: bool
) -> PrefixTile | MosaicTile:
    """The heuristic's tile for this GPU; refuses where there is none.

    The Hopper kernel takes no lower bound, no window and no cap, interpret mode does not run it and
    older versions of jax cannot express it. It is chosen for any shape of a cache in 8 bits that
    Triton's offsets do not reach: the copy engine counts each axis by itself.
    """
    _, tokens, heads, width = q.shape
    kv_heads, slots = prefix.keys.shape[1:3]
    if hopper:
        hardware.require_hopper("the Mosaic GPU kernel")
        return tiles.mosaic_prefix_tile(tokens, heads, kv_heads, width, slots)
    capability = hardware.AMPERE if interpret else hardware.require_ampere("the Pallas kernels")
    sizes = (tokens, heads, kv_heads, width, slots, q.dtype.itemsize, capability)
    plain = prefix.start is None and prefix.oldest is None and cap is None
    if not plain or interpret or not hardware.mosaic_is_supported():
        return tiles.triton_prefix_tile(*sizes)
    if capability[0] == hardware.HOPPER[0] and not is_reached(prefix.keys):
        return tiles.mosaic_prefix_tile(tokens, heads, kv_heads, width, slots)
    return tiles.prefix_tile(*sizes, narrow=prefix.keys.dtype == CODES)


def _problem(
    q: Queries,
    prefix: Prefix,
    scores: tuple[float | None, float | None],
    tile: PrefixTile | MosaicTile,
    interpret: bool,
) -> Problem:
    (kv_heads, slots), (scale, cap) = prefix.keys.shape[1:3], scores
    return Problem.of(
        q,
        kv_heads,
        scale,
        slots=slots,
        splits=-(-slots // tile.split),
        step=tile.slots,
        cap=cap,
        interpret=interpret,
    )


def _partials(
    q: Queries, prefix: Prefix, tile: PrefixTile | MosaicTile, problem: Problem
) -> tuple[Float[Array, "B P K R H"], Float[Array, "B P K R"]]:
    """Partial results of every split by the kernel that the tile is for."""
    refuse_unsupported(q, problem.kv_heads)
    if isinstance(tile, PrefixTile):
        return prefix_pallas.split_attention(q, prefix, tile, problem)
    bounded = prefix.start is not None or prefix.oldest is not None
    if bounded or problem.cap is not None or problem.interpret:
        raise NotImplementedError(
            "the Mosaic GPU kernel takes no lower bound, no window and no soft cap, and does not "
            "run in interpret mode"
        )
    from longspec_jax.ops.attention import prefix_mosaic  # Older versions lack its backend.

    return prefix_mosaic.split_attention(q, prefix, tile, problem)
