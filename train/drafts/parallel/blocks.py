"""Blocks of the parallel draft in whole training rows, and their forward.

A block begins at an *anchor*, the token that would be pending there. It sees what a round would
see: the last ``W`` tokens before the anchor and the target's keys and values before it, nothing of
the text from the anchor on but the anchor itself. A row has one block in every ``anchor_every``
tokens, at a random place among them: all places are equally likely, anchors ascend, and a chunk of
blocks reads a stretch of the row whose length is known at trace time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.drafters.parallel.config import ParallelConfig
from longspec_jax.drafters.parallel.model import ParallelLayers
from longspec_jax.ops.matmul.few_rows import matmul_precision
from longspec_jax.ops.partitioned import row_shares, with_sharding
from longspec_jax.ops.slicing import along, cut, whole_chunks

from ...step import cast
from ...target import TargetView, is_costly

SCORES = 1 << 27
"""Attention scores of a device that exist at once, of all heads: half a gigabyte."""


class Draws(NamedTuple):
    """A draft step's randomness."""

    positions: Array
    """``[A, B, T]``."""
    anchors: Array
    """``[A, B, M]``, ascending: where blocks begin."""


def drawn_anchors(
    key: Array, rows: tuple[int, int], length: int, every: int
) -> Int[Array, "A B M"]:
    """One place in every ``every`` tokens; the last stretch may be shorter."""
    starts = np.arange(0, length, every)
    sizes = np.minimum(every, length - starts)
    return jax.random.randint(key, (*rows, len(starts)), 0, sizes) + jnp.asarray(starts)


def places(anchors: Int[Array, "B M"], block: int) -> Int[Array, "B slots"]:
    """The index in its row of every slot's token, blocks one behind the other.

    May be beyond the row.
    """
    index = anchors[:, :, None] + jnp.arange(block)
    return index.reshape(len(anchors), -1)


def run_blocks(
    config: ParallelConfig,
    params: Any,
    frozen: Any,
    tokens: Int[Array, "B T"],
    draws: Draws,
    view: TargetView,
    every: int,
    mlp_chunk: int = 0,
) -> Float[Array, "B slots D"]:
    """What the LM head reads of every slot of every block.

    The MLP goes in chunks of half of ``mlp_chunk``, because the backward pass holds twice as much.
    Where there are several chunks, the backward pass also recomputes everything but matmuls and
    attention.

    Args:
      config: of the draft.
      params: its float32 parameters.
      frozen: the target's.
      tokens: of whole rows.
      draws: of these rows.
      view: of the target's forward over them.
      every: as of :func:`drawn_anchors`.
      mlp_chunk: most tokens of a device whose MLP activations exist at once; 0: all.
    """
    params = cast(
        {name: each for name, each in params.items() if name != "markov"}, config.layer.dtype
    )
    mlp_chunk = -(-mlp_chunk // 2)
    layers = ParallelLayers(config, mlp_chunk=mlp_chunk)
    window, last = config.layer.window, tokens.shape[1] - 1
    with jax.named_scope("draft"):
        embedded = jax.lax.stop_gradient(jnp.take(frozen["embedding"], tokens, axis=0))
        [embedded] = with_sharding("b t d", embedded)
        at = jnp.minimum(places(draws.anchors, config.block), last)

        def run(params: Any, embedded: Array, draws: Draws, keys: Array, values: Array) -> Array:
            bound: Any = layers.bind({"params": params})
            rows = bound.keys_values(embedded, draws.positions)

            def attend_self(layer: int, q: Array, k: Array, v: Array) -> Array:
                # Deeper layers see their block alone.
                past, reach = (rows, window) if layer == 0 else (None, 0)
                return block_attention(q, past, draws.anchors, every, window=reach, own=(k, v))

            def attend_cross(q: Array) -> Array:
                return block_attention(q, (keys, values), draws.anchors, every)

            pending, positions = along(draws.anchors, embedded), along(at, draws.positions)
            return bound(pending, positions, attend_self, attend_cross)

        if mlp_chunk and at.size > mlp_chunk * row_shares(len(at)):
            run = jax.checkpoint(run, policy=is_costly)
        return run(params, embedded, draws, view.keys, view.values)


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
