"""The softmax over fresh tokens under their mask, inside of a Triton kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from longspec_jax.ops.attention.online_softmax import State, product, update
from longspec_jax.ops.attention.packing import PackedShape
from longspec_jax.ops.attention.row_access import Head, Rows


def attend_to_fresh(
    q: jax.Array,
    rows: Rows,
    refs: Any,
    head: Head,
    state: State,
    *,
    steps: jax.Array | int,
    block: int,
    shape: PackedShape,
    scale: float,
    interpret: bool,
) -> State:
    """The softmax of some rows after so many blocks of fresh keys, from the first on.

    Args:
      q: packed queries, ``[R, H]`` with ``H`` a power of two.
      rows: which they are.
      refs: fresh keys and values, ``[B, U, K, H]``, and their mask, ``[B, T, U]``.
      head: the batch row and its key/value head.
      state: the softmax so far.
      steps: how many blocks.
      block: keys of one.
      shape: how the rows are packed.
      scale: factor on the scores, in base 2.
      interpret: whether this is no GPU.
    """

    def step(index: jax.Array, state: State) -> State:
        tree = read_fresh(refs, head, rows, index, block=block, width=q.shape[1], shape=shape)
        return visit_fresh(q, state, *tree, scale=scale, interpret=interpret)

    return jax.lax.fori_loop(0, steps, step, state)


def read_fresh(
    refs: Any,
    head: Head,
    rows: Rows,
    index: jax.Array | int,
    *,
    block: int,
    width: int,
    shape: PackedShape,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block of fresh tokens: which of them each packed row sees, their keys and values."""
    k_ref, v_ref, mask_ref = refs
    (batch, kv_head), (packed, valid) = head, rows
    h = jnp.arange(width)
    within = (h < k_ref.shape[3])[None, :]
    key = index * block + jnp.arange(block)
    exists = key < k_ref.shape[1]
    seen = pltriton.load(
        mask_ref.at[batch, (packed // shape.groups)[:, None], key[None, :]],
        mask=valid[:, None] & exists[None, :],
        other=False,
    )
    place = (batch, key[:, None], kv_head, h[None, :])
    k = pltriton.load(k_ref.at[place], mask=exists[:, None] & within, other=0.0)
    # Values that no query of the tile sees may be NaN, which a weight of 0 would not silence.
    wanted = (seen.astype(jnp.int32).max(axis=0) > 0)[:, None]
    # Read before they are silenced, so that the reads do not wait for the mask's.
    v = pltriton.load(v_ref.at[place], mask=exists[:, None] & within, other=0.0)
    return seen, k, jnp.where(wanted, v, jnp.zeros_like(v))


def visit_fresh(
    q: jax.Array,
    state: State,
    seen: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    interpret: bool,
) -> State:
    """The softmax after one block of fresh tokens."""
    scores = jnp.where(seen, product(q, k, (1, 1)) * scale, -jnp.inf)
    return update(state, scores, v, interpret)
