"""The softmax over a split's cache slots, inside of a Triton kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.ops.attention.online_softmax import State, exp2, product
from longspec_jax.ops.attention.row_access import Head
from longspec_jax.ops.attention.tiles import PrefixTile


def slots_of_split(
    split: jax.Array, length: jax.Array, start: jax.Array | None, *, tile: PrefixTile, slots: int
) -> tuple[jax.Array, jax.Array]:
    """The slots of a split that a row sees from ``start`` to its length: ``lower <= s < upper``."""
    lower = split * tile.split
    upper = jnp.minimum(jnp.minimum(length, slots), lower + tile.split)
    return lower if start is None else jnp.maximum(lower, start), upper


def attend_to_slots(
    queries: list[jax.Array],
    k_ref: Any,
    v_ref: Any,
    head: Head,
    states: list[State],
    lower: jax.Array,
    upper: jax.Array,
    *,
    bounded: bool,
    tile: PrefixTile,
    scale: float,
    interpret: bool,
) -> list[State]:
    """The softmax of each part of the rows after the slots ``lower <= s < upper``.

    Args:
      queries: the parts of the rows, ``[R, H]`` each with ``H`` a power of two.
      k_ref: the cache's keys, ``[B, K, S, H]``.
      v_ref: its values.
      head: the batch row and its key/value head.
      states: the softmax so far.
      lower: the first slot.
      upper: the first slot beyond.
      bounded: whether ``lower`` need not begin a block.
      tile: how many slots a step takes.
      scale: factor on the scores, in base 2.
      interpret: whether this is no GPU.
    """
    width, padded = k_ref.shape[3], queries[0].shape[1]
    h = jnp.arange(padded)
    within = (h < width)[None, :]

    def visit(offset: jax.Array, states: list[State], edge: bool) -> list[State]:
        slot = offset + jnp.arange(tile.slots)
        seen = (slot >= lower) & (slot < upper)
        # Slots beyond the length may hold anything, NaN included: they are never read.
        mask = within if not edge else within & seen[:, None]
        plain = not edge and padded == width

        def read(ref: Any) -> jax.Array:
            source = ref.at[*head, slot[:, None], h[None, :]]
            if plain:
                return pltriton.load(source)
            return pltriton.load(source, mask=mask, other=0.0)

        k = read(k_ref)
        scores = [product(q, k, (1, 1)) * scale for q in queries]
        if edge:
            scores = [jnp.where(seen[None, :], s, -jnp.inf) for s in scores]
        return _update(states, scores, read(v_ref), interpret)

    return _visit_blocks(visit, tile, states, lower, upper, bounded)


def _update(
    states: list[State], scores: list[jax.Array], v: jax.Array, interpret: bool
) -> list[State]:
    """The softmax of each part of the rows after one more block, of which it sees a slot."""
    new = []
    for s, (top, total, acc) in zip(scores, states, strict=True):
        # Every visited block holds a slot the row sees, so this maximum is finite.
        new_top = jnp.maximum(top, s.max(axis=1))
        weight = exp2(s - new_top[:, None], interpret)
        keep = exp2(top - new_top, interpret)
        total = total * keep + weight.sum(axis=1)
        acc = acc * keep[:, None] + product(weight.astype(v.dtype), v, (1, 0))
        new.append((new_top, total, acc))
    return new


def _visit_blocks(
    visit: Callable[..., list[State]],
    tile: PrefixTile,
    states: list[State],
    lower: jax.Array,
    upper: jax.Array,
    bounded: bool,
) -> list[State]:
    """The softmax over the slots ``lower <= s < upper``, a block of slots at a time.

    Whole blocks need no mask; at most one partial block at either end does, at the lower one only
    where rows are ``bounded`` below.
    """
    inner = pl.cdiv(lower, tile.slots)
    outer = upper // tile.slots
    if bounded:
        ragged = ((lower % tile.slots) > 0) & (inner <= outer)
        states = jax.lax.fori_loop(
            0,
            ragged.astype(jnp.int32),
            lambda _, s: visit((inner - 1) * tile.slots, s, edge=True),
            states,
        )
    states = jax.lax.fori_loop(
        inner, outer, lambda block, s: visit(block * tile.slots, s, edge=False), states
    )
    ragged = upper > jnp.maximum(outer * tile.slots, lower)
    return jax.lax.fori_loop(
        0,
        ragged.astype(jnp.int32),
        lambda _, s: visit(outer * tile.slots, s, edge=True),
        states,
    )
