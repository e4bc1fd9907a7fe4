"""Tree attention on NVIDIA GPUs: masked speculative attention as a Pallas kernel for Triton.

A few hundred fresh keys under an arbitrary boolean mask (LongSpec section 3.3). Each row's online
softmax may start from a prefix's split partials, so that prefix, tree and merge together are two
kernels per layer. Without a prefix, keys that one step does not hold are split over programs, as a
prefix's are.

Jitted, so that the equal layers of a model are traced and lowered once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from longspec_jax.axes import Array, Queries
from longspec_jax.ops.attention.merge import Partial
from longspec_jax.ops.attention.online_softmax import (
    LOG2_E,
    State,
    empty_state,
    finish,
    product,
    update,
)
from longspec_jax.ops.attention.operands import TREE, Fresh
from longspec_jax.ops.attention.packing import PackedShape, flat_rows, pack, refuse_unsupported
from longspec_jax.ops.attention.splits import load_merged, merge_splits
from longspec_jax.ops.attention.tiles import TreeTile, tree_tile
from longspec_jax.ops.hardware import require_ampere
from longspec_jax.ops.partitioned import partitioned
from longspec_jax.ops.triton_compiler import compiler_params


@functools.partial(jax.jit, static_argnames=("scale", "dtype", "tile", "interpret"))
@partitioned(TREE)
def tree_attention(
    q: Queries,
    fresh: Fresh,
    *,
    scale: float | None = None,
    dtype: DTypeLike = jnp.float32,
    tile: TreeTile | None = None,
    interpret: bool = False,
) -> Partial:
    """Attend where the mask is true; see :func:`reference.tree_attention`."""
    kv_heads, keys = fresh.keys.shape[2], fresh.keys.shape[1]
    refuse_unsupported(q, kv_heads)
    batch, tokens, heads, width = q.shape
    if not interpret and tile is None:
        require_ampere("the Pallas-Triton tree kernel")
    tile = tile or tree_tile(tokens, heads, kv_heads, width, keys, q.dtype.itemsize)
    out, lse = attend(
        *(q, fresh, ()),
        tile=tile,
        scale=width**-0.5 if scale is None else scale,
        split=0,
        slots=0,
        dtype=dtype,
        interpret=interpret,
    )
    if keys <= tile.keys:
        return Partial(out.reshape(q.shape), lse.reshape(batch, tokens, heads))
    return merge_splits(
        *((out, lse), jnp.full((batch,), keys, jnp.int32), None),
        shape=PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads),
        split=tile.keys,
        slots=keys,
        dtype=dtype,
        interpret=interpret,
    )


def attend(
    q: Queries,
    fresh: Fresh,
    prefix: tuple[Array, ...],
    *,
    tile: TreeTile,
    scale: float,
    split: int,
    slots: int,
    dtype: DTypeLike,
    interpret: bool,
) -> tuple[Array, Array]:
    """Launch the kernel; its output is of type ``dtype``, unless it is yet to be merged.

    ``prefix`` is nothing, or the row lengths and the partial results of the prefix's splits, each
    ``split`` of ``slots`` cache slots. With nothing, keys that one step does not hold leave partial
    results of theirs, ``[B, P, K, R, H]`` and ``[B, P, K, R]``, to be merged.
    """
    batch, tokens, heads, width = q.shape
    kv_heads, keys = fresh.keys.shape[2], fresh.keys.shape[1]
    shape = PackedShape(tokens=tokens, heads=heads, kv_heads=kv_heads)
    blocks = 1 if prefix else pl.cdiv(keys, tile.keys)
    rows: tuple[int, ...] = (batch, tokens * heads)
    if blocks > 1:
        rows = (batch, blocks, kv_heads, shape.packed)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            tile=tile,
            scale=scale * LOG2_E,
            split=split,
            slots=slots,
            blocks=blocks,
            interpret=interpret,
        ),
        grid=(pl.cdiv(shape.packed, tile.rows) * blocks, kv_heads, batch),
        out_shape=(
            jax.ShapeDtypeStruct((*rows, width), dtype if blocks == 1 else jnp.float32),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ),
        compiler_params=compiler_params(tile.warps, tile.stages),
        interpret=interpret,
        name="speculative_attention" if prefix else "tree_attention",
    )(pack(q, kv_heads), fresh.keys, fresh.values, fresh.mask, *prefix)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    mask_ref: Any,
    *refs: Any,
    shape: PackedShape,
    tile: TreeTile,
    scale: float,
    split: int,
    slots: int,
    blocks: int,
    interpret: bool,
) -> None:
    """Attend with a tile of packed query rows of one key/value head to every tree key.

    Or, where the keys are split over programs, to those of one of several ``blocks``.
    """
    *prefix_refs, out_ref, lse_ref = refs
    kv_head, batch = pl.program_id(1), pl.program_id(2)
    mine = pl.program_id(0) % blocks
    packed = pl.program_id(0) // blocks * tile.rows + jnp.arange(tile.rows)
    row, valid = flat_rows(packed, kv_head, shape), packed < shape.packed
    token = packed // shape.groups
    width, keys = q_ref.shape[3], k_ref.shape[1]
    padded = pl.next_power_of_2(width)
    h = jnp.arange(padded)
    within = (h < width)[None, :]
    q = pltriton.load(
        q_ref.at[batch, kv_head, packed[:, None], h[None, :]],
        mask=valid[:, None] & within,
        other=0.0,
    )

    whole = blocks > 1 or keys <= tile.keys

    def read(block: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        key = block * tile.keys + jnp.arange(tile.keys)
        exists = key < keys
        seen = pltriton.load(
            mask_ref.at[batch, token[:, None], key[None, :]],
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

    def visit(state: State, seen: jax.Array, k: jax.Array, v: jax.Array) -> State:
        scores = jnp.where(seen, product(q, k, (1, 1)) * scale, -jnp.inf)
        return update(state, scores, v, interpret)

    tree = read(mine) if whole else None
    if prefix_refs:
        length_ref, partial_ref, partial_lse_ref = prefix_refs
        state = load_merged(
            (partial_ref, partial_lse_ref, length_ref, None),
            *(batch, kv_head, packed, valid),
            split=split,
            slots=slots,
            chunk=tile.partials,
            interpret=interpret,
        )
    else:
        state = empty_state(tile.rows, padded)
    if tree is not None:
        state = visit(state, *tree)
    else:
        steps = pl.cdiv(keys, tile.keys)
        state = jax.lax.fori_loop(0, steps, lambda i, s: visit(s, *read(i)), state)
    out, lse = finish(state)
    out = out.astype(out_ref.dtype)
    mask = valid[:, None] & within
    to, at = ((batch, mine, kv_head), packed) if blocks > 1 else ((batch,), row)
    pltriton.store(out_ref.at[*to, at[:, None], h[None, :]], out, mask=mask)
    pltriton.store(lse_ref.at[*to, at], lse, mask=valid)
