"""What kernels for Triton that part heads have in common: rotating a token's and writing them.

A program writes 16 heads of one token, of its queries, its keys or its values.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from longspec_jax.ops.attention.packing import PackedShape

HEADS = 16
Places: TypeAlias = Callable[[jax.Array], tuple[Any, ...]]
"""From heads to their places in an array, but for the last axis."""


def write_heads(
    refs: tuple[Any, Any, Any],
    places: tuple[Places, Places],
    angle_refs: tuple[Any, Any],
    angle: tuple[Any, ...],
    read: Callable[[jax.Array, jax.Array, jax.Array], Callable[[jax.Array], jax.Array]],
    *,
    queries: PackedShape,
    half: int,
) -> None:
    """The work of a program on one token: some of its queries, or keys, or values.

    Args:
      refs: of queries, keys and values.
      places: where a head lies in them, but for its width: of queries, and of keys and values.
      angle_refs: cosines and sines.
      angle: where the token's are.
      read: given slots of the fused product ``[heads]``, whether these exist, and the mask of their
        elements, what reads some elements of them.
      queries: how queries are packed.
      half: of a head's width.
    """
    block = pl.program_id(0)
    h = jnp.arange(pl.next_power_of_2(half))
    within = h < half

    def write(
        ref: Any, heads: int, block: jax.Array, slots: Any, place: Places, rotated: bool
    ) -> None:
        head = block * HEADS + jnp.arange(HEADS)
        exists = head < heads
        mask = exists[:, None] & within[None, :]
        element, target = read(slots(head), exists, mask), place(head)
        low, high = element(h), element(h + half)
        if rotated:
            cos, sin = (
                pltriton.load(part.at[*angle, h], mask=within, other=0.0)[None, :]
                for part in angle_refs
            )
            low, high = low.astype(jnp.float32), high.astype(jnp.float32)
            low, high = low * cos - high * sin, high * cos + low * sin
        pltriton.store(ref.at[*target, h[None, :]], low.astype(ref.dtype), mask=mask)
        pltriton.store(ref.at[*target, h[None, :] + half], high.astype(ref.dtype), mask=mask)

    kv_heads, groups, size = queries.kv_heads, queries.groups, queries.groups + 2
    (q_ref, k_ref, v_ref), (packed, of_token) = refs, places
    parts = (
        (q_ref, queries.heads, lambda n: n // groups * size + n % groups, packed, True),
        (k_ref, kv_heads, lambda n: n * size + groups, of_token, True),
        (v_ref, kv_heads, lambda n: n * size + groups + 1, of_token, False),
    )
    first = 0
    for ref, heads, slots, place, rotated in parts:
        blocks = pl.cdiv(heads, HEADS)
        pl.when((block >= first) & (block < first + blocks))(
            functools.partial(write, ref, heads, block - first, slots, place, rotated)
        )
        first += blocks
