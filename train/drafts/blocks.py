"""Blocks in whole training rows, of drafts that propose a block in one forward.

A block begins at an *anchor*, the token that would be pending there. It sees what a round would
see: what its kind reads of the text before the anchor, nothing of the text from the anchor on but
the anchor itself. A row has one block in every ``anchor_every`` tokens, at a random place among
them: all places are equally likely, anchors ascend, and a chunk of blocks reads a stretch of the
row whose length is known at trace time.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.ops.matmul.few_rows import matmul_precision
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.slicing import cut, whole_chunks

from ..acceptance import count_hits, counted_tokens

SCORES = 1 << 27
"""Attention scores of a device that exist at once, of all heads: half a gigabyte."""


def drawn_anchors(
    key: Array, rows: tuple[int, int], length: int, every: int
) -> Int[Array, "A B M"]:
    """One place in every ``every`` tokens; the last stretch may be shorter."""
    starts = np.arange(0, length, every)
    sizes = np.minimum(every, length - starts)
    return jax.random.randint(key, (*rows, len(starts)), 0, sizes) + jnp.asarray(starts)


def even_anchors(rows: int, length: int, every: int) -> Int[Array, "B M"]:
    """The first of every ``every`` tokens, for measures that draw nothing."""
    return jnp.broadcast_to(jnp.arange(0, length, every), (rows, -(-length // every)))


def places(anchors: Int[Array, "B M"], block: int) -> Int[Array, "B slots"]:
    """The index in its row of every slot's token, blocks one behind the other.

    May be beyond the row.
    """
    index = anchors[:, :, None] + jnp.arange(block)
    return index.reshape(len(anchors), -1)


def slot_weights(slots: int, every: int, decay: float) -> Float[Array, " slots"]:
    """How much every slot of a block counts: ``exp(-j / decay)``, the first one most.

    A block's sum is ``every``, so that a row's sum is that of its tokens.
    """
    decays = np.exp(-np.arange(slots) / decay)
    return jnp.asarray(every * decays / decays.sum(), jnp.float32)


def slot_hits(
    hidden: Float[Array, "B M slots D"],
    head: Float[Array, "V D"],
    wanted: Float[Array, "B M slots W"],
    target_head: Float[Array, "V W"],
    weights: Float[Array, "B M slots"],
    *,
    chunk: int,
) -> tuple[Array, Array, Array]:
    """What :func:`train.acceptance.agreement_report` reads; slot ``j`` is shift ``j + 1``.

    Blocks count that are learned whole.

    Args:
      hidden: what the draft's LM head reads.
      head: the draft's.
      wanted: the target's final hidden state that predicts the same token.
      target_head: the target's.
      weights: of the slots, 0 where nothing is learned.
      chunk: most blocks whose logits exist at once.
    """
    counted = counted_tokens((weights > 0).all(axis=2).astype(jnp.float32))

    def of_slot(slot: tuple[Array, Array]) -> tuple[Array, Array]:
        found, sought = slot
        return count_hits(found, head, sought, target_head, counted, chunk=chunk)

    by_slot = (jnp.moveaxis(each, 2, 0) for each in (hidden, wanted))
    return *jax.lax.map(of_slot, tuple(by_slot)), jnp.sum(counted, (1, 2))


def block_attention(
    q: Float[Array, "B slots N H"],
    past: tuple[Array, Array] | None,
    anchors: Int[Array, "B M"],
    every: int,
    *,
    window: int | None = None,
    own: tuple[Array, Array] | None = None,
) -> Float[Array, "B slots N H"]:
    """Attention of blocks to the text before their anchors, and to themselves.

    Args:
      q: queries of the blocks' slots, one block behind the other.
      past: keys and values of all tokens of the rows ``[B, T, K, H]``; None: nothing of the text.
      anchors: a block sees tokens before its own.
      every: as of :func:`drawn_anchors`.
      window: how many of the tokens before an anchor are seen, the last ones; all if absent.
      own: keys and values of the slots ``[B, slots, K, H]``, which see all of their block; None:
        they do not.

    Returns:
      Zeros where a block sees nothing.
    """
    rows, blocks = anchors.shape
    heads, width = q.shape[2:]
    shape = rows, blocks, q.shape[1] // blocks
    length = past[0].shape[1] if past else 0
    reads = length if window is None else min(length, 2 * window + every)
    per_block = rows // row_shares(rows) * shape[2] * heads * (reads + shape[2])
    size = max(1, min(blocks, SCORES // per_block))
    if past and window is not None:
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
            first = jnp.clip(start * every - (window or length), 0, length - reads)
            keys, values = (cut(each, first, reads) for each in past)
            index, end = first + jnp.arange(reads), cut(ends, start, size)[:, :, None]
            seen = index < end
            if window is not None:
                seen &= index >= end - window
            parts.append((keys, values, seen))
        if fresh:
            keys, values = (cut(each, start, size) for each in fresh)
            parts.append((keys, values, jnp.ones((1, 1, shape[2]), bool)))
        return _attention(mine, parts)

    out = jax.lax.map(some, jnp.arange(0, blocks, size))  # [n, B, C, slots, N, H]
    out = jnp.moveaxis(out, 0, 1).reshape(rows, -1, *shape[2:], heads, width)[:, :blocks]
    [out] = with_sharding("b t n h", out.reshape(q.shape))
    return out


def _attention(q: Float[Array, "B M S N H"], parts: list[tuple[Array, Array, Array]]) -> Array:
    """One softmax over several parts of what blocks see.

    Args:
      q: queries.
      parts: keys and values ``[B, T, K, H]``, or of each block its own ``[B, M, T, K, H]``; and
        which of them a block sees ``[B, M, T]``.
    """
    kv_heads, precision = parts[0][0].shape[-2], matmul_precision(q.dtype)
    grouped = q.reshape(*q.shape[:3], kv_heads, -1, q.shape[4])
    scores = []
    for keys, _, seen in parts:
        found = jnp.einsum(
            f"BMSKGH,{_axes(keys)}->BMKGST",
            *(grouped, keys),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scaled = found * q.shape[-1] ** -0.5
        scores.append(jnp.where(seen[:, :, None, None, None], scaled, -jnp.inf))
    top = jnp.max(jnp.concatenate([each.max(-1, keepdims=True) for each in scores], -1), -1)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))[..., None]
    shares = [jnp.exp(each - top) for each in scores]
    mass = sum(each.sum(-1) for each in shares)
    out = 0
    for (_, values, _), share in zip(parts, shares, strict=True):
        out += jnp.einsum(
            f"BMKGST,{_axes(values)}->BMSKGH",
            *(share.astype(q.dtype), values),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    mass = jnp.moveaxis(jnp.where(mass > 0, mass, 1.0), 4, 2)
    return (out / mass[..., None]).astype(q.dtype).reshape(q.shape)


def _axes(keys: Array) -> str:
    return "BTKH" if keys.ndim == 4 else "BMTKH"
