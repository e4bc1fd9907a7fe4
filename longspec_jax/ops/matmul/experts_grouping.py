"""The MLPs of chosen experts by the Hopper kernel: rows are put alongside others of their expert.

Every expert has as many row tiles as its rows need, those of the first expert first
(:mod:`longspec_jax.ops.matmul.experts_tiles`). Small ops of XLA compute where each pair of a row
and an expert is, from comparisons of all pairs: sorting them would take longer. Up to 8 rows are
one tile, which every chosen expert reads as it is.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.ops import hardware
from longspec_jax.ops.matmul.experts_tiles import GROUP, expert_work, most_tiles, tile_height
from longspec_jax.ops.matmul.packed import PackedMatrix
from longspec_jax.ops.matmul.quantised_weights import QuantisedWeights

MOST_ROWS = 1024
"""Of the kernel with weights in 16 bits, where XLA may multiply as well: of more rows the tensor
cores are the limit."""


@dataclass(frozen=True)
class ExpertTiles:
    """Where the rows of every expert are, in tiles of one height."""

    expert: Int[Array, " tiles"]
    """Of every tile; beyond the last one any."""
    count: Int[Array, " 1"]
    """Tiles that there are."""
    slot: Int[Array, "R k"]
    """The place of every pair among the rows of all tiles; beyond them for absent experts."""
    source: Int[Array, " slots"] | None
    """The row of every place; None where every tile has all rows."""


def expert_tiles(experts: Int[Array, "R k"], held: int, height: int) -> ExpertTiles:
    """Group the pairs of rows and experts into tiles.

    Args:
      experts: the experts of every row, no two alike; ``held`` stands for one that is not here.
      held: experts that are here.
      height: rows of a tile.
    """
    rows, chosen = experts.shape
    tiles = most_tiles(experts.size, held, height)
    if rows == 1:
        # The experts' own order will do. A tile whose expert is absent is computed for nothing.
        count, first = jnp.full(1, chosen, jnp.int32), height * jnp.arange(chosen)
        return ExpertTiles(jnp.minimum(experts[0], held - 1), count, first[None], None)
    flat, each = experts.reshape(-1), jnp.arange(held)
    loads = (flat == each[:, None]).sum(axis=1, dtype=jnp.int32)
    needed = -(-loads // height)
    last = jnp.where(each <= each[:, None], needed, 0).sum(axis=1, dtype=jnp.int32)
    owner = (last <= jnp.arange(tiles)[:, None]).sum(axis=1, dtype=jnp.int32)
    pair = jnp.arange(len(flat))
    if rows <= GROUP:
        within = pair // chosen
    else:
        before = (flat == flat[:, None]) & (pair < pair[:, None])
        within = before.sum(axis=1, dtype=jnp.int32)
    first = (last - needed).at[flat].get(mode="clip") * height
    slot = jnp.where(flat < held, first + within, tiles * height)
    source = None
    if rows > GROUP:
        source = jnp.zeros(tiles * height, jnp.int32)
        source = source.at[slot].set((pair // chosen).astype(jnp.int32), mode="drop")
    expert, count = jnp.minimum(owner, held - 1), last[-1:]
    return ExpertTiles(expert, count, slot.reshape(experts.shape), source)


def expert_mlps_mosaic(
    x: Float[Array, "R D"],
    experts: Int[Array, "R k"],
    weights: PyTree,
    limit: float | None,
    *,
    ordered: bool = False,
    interpret: Any = None,
) -> Float[Array, "R k D"]:
    """What each of its experts makes of every row, by the kernel.

    Args:
      x: rows.
      experts: as for :func:`expert_tiles`. What absent ones yield is 0, or of any expert.
      weights: of all experts that are here, :class:`longspec_jax.ops.matmul.experts.ExpertWeights`.
      limit: of the gate.
      ordered: whether a row must have the same bits alongside any number of others.
      interpret: how Pallas interprets the kernel without a GPU; None compiles it.

    Raises:
      NotImplementedError: where the kernel cannot run, or XLA multiplies as fast.
    """
    hardware.require_hopper("the kernel for experts")
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the kernel for experts takes 16 bits, not {x.dtype}")
    if weights.gelu:
        raise NotImplementedError("the kernel for experts has no GELU")
    packed = isinstance(weights.gate_up, PackedMatrix)
    if isinstance(weights.gate_up, QuantisedWeights) and not packed:
        raise NotImplementedError("the kernel for experts reads quantised ones packed")
    most = hardware.DECODE_ROWS if ordered or packed else MOST_ROWS
    rows, chosen = experts.shape
    if not 0 < rows <= most:
        raise NotImplementedError(f"the kernel for experts takes 1 to {most} rows, not {rows}")
    held, width, inner = weights.sizes
    height = tile_height(rows, chosen, held)
    for sizes in ((width, inner), (inner, width)):
        expert_work(height, 1, *sizes, packed=packed)
    from longspec_jax.ops.matmul import experts_mosaic  # Older versions of jax lack its needs.

    tiles = expert_tiles(experts.astype(jnp.int32), held, height)
    if tiles.source is not None:
        x = jnp.take(x, tiles.source, axis=0)
    operands = tiles.expert, tiles.count
    tile_matmul: Any = partial(experts_mosaic.tile_matmul, height=height, interpret=interpret)
    gate_up = weights.gate_up, weights.gate_up_bias
    between = tile_matmul(x, *operands, *gate_up, gated=True, limit=limit)
    out = tile_matmul(between, *operands, weights.down, weights.down_bias)
    return out.at[tiles.slot].get(mode="fill", fill_value=0)
