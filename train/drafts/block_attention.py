"""Attention of training blocks (:mod:`.blocks`) to the text before their anchors and to themselves.

All of a text is read by the fused causal kernel, a window of it in chunks of blocks.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.matmul.few_rows import matmul_precision
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.slicing import cut, whole_chunks

from .own_keys import causal_beside

SCORES = 1 << 27
"""Attention scores of a device that exist at once, of all heads: half a gigabyte."""
_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def block_attention(
    q: Float[Array, "B slots N H"],
    past: tuple[Array, Array] | None,
    anchors: Int[Array, "B M"],
    every: int,
    *,
    window: int | None = None,
    own: tuple[Array, Array] | None = None,
    causal: bool = False,
) -> Float[Array, "B slots N H"]:
    """Attention of blocks to the text before their anchors, and to themselves.

    Args:
      q: queries of the blocks' slots, one block after the other.
      past: keys and values of all tokens of the rows ``[B, T, K, H]``; None: nothing of the text.
      anchors: a block sees tokens before its own.
      every: as in :func:`train.drafts.blocks.drawn_anchors`.
      window: how many of the tokens before an anchor are seen, the last ones; all if absent.
      own: keys and values of the slots ``[B, slots, K, H]``, which see all of their block; None:
        they do not.
      causal: slots see none of the later ones.

    Returns:
      Zeros where a block sees nothing.
    """
    if past is None or window is not None:
        out = _in_chunks(q, past, anchors, every, window or 0, own, causal)
    else:
        out = _to_all(q, past, anchors, every, own, causal)
    [out] = with_sharding("b t n h", out)
    return out


class _Near(NamedTuple):
    """What queries see besides the keys that plain causal attention shows them."""

    out: Float[Array, "B M E N H"]
    """Attention to nothing else; 0 where nothing is near."""
    score: Float[Array, "B M E N 1"]
    """The log of the sum of the exponentials of all scores."""


def _to_all(
    q: Float[Array, "B slots N H"],
    past: tuple[Array, Array],
    anchors: Int[Array, "B M"],
    every: int,
    own: tuple[Array, Array] | None,
    causal: bool,
) -> Float[Array, "B slots N H"]:
    """Blocks that see all of the text before them, by the fused causal kernel.

    Every stretch of ``every`` tokens has one block, whose slots stand in the places of the stretch
    before. From there a slot sees nothing after its anchor: the first slot what lies before that
    stretch, each other one a token more. What is left is near, one or two stretches, and joins the
    block's own keys. Blocks of more slots than places share these among their heads.
    """
    rows, blocks = anchors.shape
    heads, width, kv_heads = *q.shape[2:], past[0].shape[2]
    slots, length = q.shape[1] // blocks, blocks * every
    parts = -(-slots // every)
    room = ((0, 0), (0, 0), (0, parts * every - slots), (0, 0), (0, 0))
    places = jnp.pad(q.reshape(rows, blocks, slots, heads, width), room)
    places = places.reshape(rows, blocks, parts, every, kv_heads, -1, width)
    # Heads that read the same keys stay together.
    places = places.transpose(0, 1, 3, 4, 2, 5, 6).reshape(rows, blocks, every, -1, width)
    keys, values = (_padded(each, length) for each in past)
    near = _near(places, keys, values, anchors, own, causal)

    def a_stretch_before(each: Array) -> Array:
        moved = each[:, 1:].reshape(rows, length - every, *each.shape[3:])
        return _padded(moved, length)

    operands = a_stretch_before(places), keys, values, a_stretch_before(near.score)
    out, share = causal_beside(*operands, scale=width**-0.5)
    out += share * a_stretch_before(near.out)
    out = out[:, : length - every].reshape(near.out[:, 1:].shape)
    out = jnp.concatenate([near.out[:, :1], out], axis=1)  # Before the first block nothing is far.
    out = out.reshape(rows, blocks, every, kv_heads, parts, -1, width)
    out = out.transpose(0, 1, 4, 2, 3, 5, 6).reshape(rows, blocks, parts * every, heads, width)
    return out[:, :, :slots].reshape(q.shape)


def _near(
    places: Float[Array, "B M E N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    anchors: Int[Array, "B M"],
    own: tuple[Array, Array] | None,
    causal: bool,
) -> _Near:
    """Attention to a block's own keys, and to those after a place's but before the anchor."""
    rows, blocks, every, _, width = places.shape
    kv_heads, precision = keys.shape[2], matmul_precision(places.dtype)
    grouped = places.reshape(rows, blocks, every, kv_heads, -1, width)

    def two_stretches(each: Array) -> Array:
        each = each.reshape(rows, blocks, every, kv_heads, width)
        before = jnp.pad(each, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1]
        return jnp.concatenate([before, each], axis=2)

    keys, values = two_stretches(keys), two_stretches(values)
    place = jnp.arange(2 * every)
    index = every * (jnp.arange(blocks)[:, None] - 1) + place
    before_anchor = (index >= 0) & (index < anchors[:, :, None])
    seen = before_anchor[:, :, None] & (place >= jnp.arange(every)[:, None])
    if own is not None:
        slots = own[0].shape[1] // blocks
        fresh = [each.reshape(rows, blocks, slots, kv_heads, width) for each in own]
        keys = jnp.concatenate([keys, fresh[0]], axis=2)
        values = jnp.concatenate([values, fresh[1]], axis=2)
        seen = jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, slots)), constant_values=True)
    scores = width**-0.5 * _product("BMEKGH,BMRKH->BMEKGR", grouped, keys, precision=precision)
    seen = seen[:, :, :, None, None]
    if own is not None and causal:
        # A place has slots ``every`` apart, one for each part of its heads.
        own_slot = jnp.arange(keys.shape[2]) - 2 * every
        parts = -(-(len(own_slot) - 2 * every) // every)
        slot = jnp.arange(every)[:, None] + every * jnp.arange(parts)
        slot = jnp.repeat(slot, grouped.shape[4] // parts, axis=1)
        seen &= own_slot <= slot[:, None, :, None]
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    shares = jnp.exp(jnp.where(seen, scores - top, -jnp.inf))
    mass = shares.sum(-1, keepdims=True)
    mass = jnp.where(mass > 0, mass, 1.0)
    shares = (shares / mass).astype(values.dtype)
    out = jnp.einsum("BMEKGR,BMRKH->BMEKGH", shares, values, precision=precision)
    score = jnp.log(mass) + top
    return _Near(out.reshape(places.shape), score.reshape(*places.shape[:-1], 1))


def _padded(each: Float[Array, "B t ..."], length: int) -> Float[Array, "B T ..."]:
    """With zeros after the last token."""
    room = ((0, 0), (0, length - each.shape[1]), *((0, 0),) * (each.ndim - 2))
    return jnp.pad(each, room)


def _in_chunks(
    q: Float[Array, "B slots N H"],
    past: tuple[Array, Array] | None,
    anchors: Int[Array, "B M"],
    every: int,
    window: int,
    own: tuple[Array, Array] | None,
    causal: bool,
) -> Float[Array, "B slots N H"]:
    """Blocks that see a window of the text or nothing of it, some at a time."""
    rows, blocks = anchors.shape
    heads, width = q.shape[2:]
    shape = rows, blocks, q.shape[1] // blocks
    length = past[0].shape[1] if past else 0
    reads = min(length, 2 * window + every)
    per_block = rows // row_shares(rows) * shape[2] * heads * (reads + shape[2])
    size = max(1, min(blocks, SCORES // per_block))
    if past:
        size = min(size, max(1, window // every))
        reads = min(length, window + size * every)

    def of_blocks(each: Array) -> Array:
        return whole_chunks(each.reshape(*shape, *each.shape[2:]), size)

    queries, ends = of_blocks(q), whole_chunks(anchors, size)
    fresh = () if own is None else tuple(of_blocks(each) for each in own)

    @jax.checkpoint
    def some(start: Array) -> Array:
        mine = cut(queries, start, size)
        parts = []
        if past:
            first = jnp.clip(start * every - window, 0, length - reads)
            keys, values = (cut(each, first, reads) for each in past)
            index, end = first + jnp.arange(reads), cut(ends, start, size)[:, :, None]
            parts.append((keys, values, (index < end) & (index >= end - window)))
        if fresh:
            keys, values = (cut(each, start, size) for each in fresh)
            inside = jnp.ones((1, 1, shape[2]), bool)
            if causal:
                inside = jnp.tri(shape[2], dtype=bool)[None, None]
            parts.append((keys, values, inside))
        return _attention(mine, parts)

    out = jax.lax.map(some, jnp.arange(0, blocks, size))  # [n, B, C, slots, N, H]
    out = jnp.moveaxis(out, 0, 1).reshape(rows, -1, *shape[2:], heads, width)[:, :blocks]
    return out.reshape(q.shape)


def _attention(q: Float[Array, "B M S N H"], parts: list[tuple[Array, Array, Array]]) -> Array:
    """One softmax over several parts of what blocks see.

    Args:
      q: queries.
      parts: keys and values ``[B, T, K, H]``, or of each block its own ``[B, M, T, K, H]``; and
        which of them a block sees ``[B, M, T]``, or each of its slots ``[B, M, S, T]``.
    """
    kv_heads, precision = parts[0][0].shape[-2], matmul_precision(q.dtype)
    grouped = q.reshape(*q.shape[:3], kv_heads, -1, q.shape[4])
    scores = []
    for keys, _, seen in parts:
        found = _product(f"BMSKGH,{_axes(keys)}->BMKGST", grouped, keys, precision=precision)
        scaled = found * q.shape[-1] ** -0.5
        seen = seen[:, :, None, None, None] if seen.ndim == 3 else seen[:, :, None, None]
        scores.append(jnp.where(seen, scaled, -jnp.inf))
    top = jnp.max(jnp.concatenate([each.max(-1, keepdims=True) for each in scores], -1), -1)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))[..., None]
    shares = [jnp.exp(each - top) for each in scores]
    mass = sum(each.sum(-1) for each in shares)
    out = 0
    for (_, values, _), share in zip(parts, shares, strict=True):
        axes = f"BMKGST,{_axes(values)}->BMSKGH"
        out += _product(axes, share.astype(q.dtype), values, precision=precision)
    mass = jnp.moveaxis(jnp.where(mass > 0, mass, 1.0), 4, 2)
    return (out / mass[..., None]).astype(q.dtype).reshape(q.shape)


def _axes(keys: Array) -> str:
    return "BTKH" if keys.ndim == 4 else "BMTKH"
