"""The float64 meaning of attention in numpy, and random inputs with poisoned memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from longspec_jax.ops.attention.operands import Fresh, Prefix

TOKENS = (1, 5, 16, 48, 64, 69, 128, 256)
"""Numbers of query tokens for which tiles are tried."""
HEADS = ((32, 32), (32, 8), (40, 8), (28, 4))
"""Query heads and key/value heads of the models."""
LSE_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
"""Largest absolute error of a log-sum-exp against float64."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem; ``keys`` are tree rows and ``slots`` the cache's capacity."""

    batch: int = 2
    tokens: int = 5
    heads: int = 6
    kv_heads: int = 2
    width: int = 64
    slots: int = 131
    keys: int = 7


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Fresh random operands of every op; memory that no query may see is NaN."""

    q: Any
    k: Any
    v: Any
    length: Any
    start: Any
    tree_k: Any
    tree_v: Any
    mask: Any
    oldest: Any = None

    @property
    def prefix(self) -> tuple[Any, ...]:
        return self.q, Prefix(self.k, self.v, self.length, self.start, oldest=self.oldest)

    @property
    def tree(self) -> tuple[Any, ...]:
        return self.q, Fresh(self.tree_k, self.tree_v, self.mask)

    @property
    def speculative(self) -> tuple[Any, ...]:
        return *self.prefix, *self.tree[1:]


def inputs(
    shape: Shape,
    dtype: str,
    length: list[int],
    start: list[int] | None = None,
    mask: np.ndarray | None = None,
    seed: int | None = None,
) -> Inputs:
    """Draw a problem; every call without a seed draws another one."""
    rng = np.random.default_rng(seed)

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(np.float32)

    if mask is None:
        mask = rng.random((shape.batch, shape.tokens, shape.keys)) < 0.5
    q = normal(shape.batch, shape.tokens, shape.heads, shape.width)
    cache = normal(2, shape.batch, shape.kv_heads, shape.slots, shape.width)
    slot = np.arange(shape.slots)
    for row in range(shape.batch):
        low = 0 if start is None else start[row]
        cache[:, row, :, (slot < low) | (slot >= length[row])] = np.nan
    tree = normal(2, shape.batch, shape.keys, shape.kv_heads, shape.width)
    tree[:, ~mask.any(axis=1)] = np.nan
    return Inputs(
        q=jnp.asarray(q, dtype),
        k=jnp.asarray(cache[0], dtype),
        v=jnp.asarray(cache[1], dtype),
        length=jnp.asarray(length, jnp.int32),
        start=None if start is None else jnp.asarray(start, jnp.int32),
        tree_k=jnp.asarray(tree[0], dtype),
        tree_v=jnp.asarray(tree[1], dtype),
        mask=jnp.asarray(mask),
    )


def windowed(x: Inputs, window: int, depths: list[int]) -> Inputs:
    """The same as rings through a window: queries stand ``depths`` after the committed tokens.

    The mask keeps the fresh keys that are as deep or less, and in the window.
    """
    oldest = x.length[:, None] + jnp.asarray(depths) - (window - 1)
    distance = np.subtract.outer(depths, depths[: x.tree_k.shape[1]])
    mask = x.mask & (distance >= 0) & (distance < window) | np.eye(*distance.shape, dtype=bool)
    keys, values = jnp.nan_to_num(x.tree_k), jnp.nan_to_num(x.tree_v)
    return dataclasses.replace(x, oldest=oldest, mask=mask, tree_k=keys, tree_v=values)


def prefix(
    x: Inputs, scale: float | None = None, cap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the prefix part in float64."""
    return _dense(x.q, np.swapaxes(x.k, 1, 2), np.swapaxes(x.v, 1, 2), _seen(x), scale, cap)


def tree(
    x: Inputs, scale: float | None = None, cap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of the tree part in float64."""
    return _dense(x.q, x.tree_k, x.tree_v, np.asarray(x.mask), scale, cap)


def speculative(
    x: Inputs,
    scale: float | None = None,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One softmax over prefix, tree and sinks in float64."""
    k = np.concatenate([np.swapaxes(x.k, 1, 2), np.asarray(x.tree_k)], axis=1)
    v = np.concatenate([np.swapaxes(x.v, 1, 2), np.asarray(x.tree_v)], axis=1)
    mask = np.concatenate([_seen(x), np.asarray(x.mask)], axis=2)
    return _dense(x.q, k, v, mask, scale, cap, sinks)[0]


def _seen(x: Inputs) -> np.ndarray:
    """The slots that every query of a row sees."""
    slot = np.arange(x.k.shape[2])
    if x.oldest is not None:
        seen = np.zeros((*x.q.shape[:2], slot.size), bool)
        for row, length in enumerate(np.asarray(x.length)):
            for position in range(max(0, length - slot.size), length):
                seen[row, :, position % slot.size] = position >= x.oldest[row]
        return seen
    seen = slot < np.asarray(x.length)[:, None]
    if x.start is not None:
        seen &= slot >= np.asarray(x.start)[:, None]
    return np.broadcast_to(seen[:, None], (x.q.shape[0], x.q.shape[1], slot.size))


def _dense(
    q: Any,
    k: Any,
    v: Any,
    mask: np.ndarray,
    scale: float | None,
    cap: float | None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """A loop over heads, so that grouping cannot be wrong in the same way as in the kernels."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[2] // k.shape[2]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen = mask[b, t]
        if seen.any():
            scores = k[b, seen, n // groups] @ q[b, t, n] * scale
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            sink = -np.inf if sinks is None else sinks[n]
            top = max(scores.max(), sink)
            weights, total = np.exp(scores - top), np.exp(sink - top)
            total += weights.sum()
            out[b, t, n] = weights @ v[b, seen, n // groups] / total
            lse[b, t, n] = top + np.log(total)
    return out, lse
