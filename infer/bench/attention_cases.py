"""Attention problems of a decode step: their sizes, their random operands, their rows.

A case is one layer of a decode step: ``tokens`` queries attend to ``context`` cached slots and,
under a random tree mask, to each other. Operands are drawn on the device.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .timing import Roof

HEAD_MAJOR, TOKEN_MAJOR = "head-major", "token-major"
"""The two layouts of a cache: ``[B, K, S, H]``, the engine's, and ``[B, S, K, H]``."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem of the decode step."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    dtype: str = "bfloat16"

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in the prefix."""
        slots = self.batch * self.kv_heads * self.context
        return 2 * slots * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """The fewest bytes any implementation moves: each operand once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        rows = self.batch * self.tokens * self.head_dim * itemsize
        return self.cache_bytes + rows * 2 * (self.heads + self.kv_heads)

    @property
    def operations(self) -> int:
        """Operations of the two products over the prefix and the whole tree square."""
        keys = self.context + self.tokens
        return 4 * self.batch * self.tokens * self.heads * keys * self.head_dim

    @property
    def copies(self) -> int:
        """Distinct caches in rotation: more than any second-level cache, or as memory allows."""
        return max(2, min(32, math.ceil(2**30 / self.cache_bytes)))

    @property
    def turns(self) -> int:
        """Times a program goes round the caches; enough calls to hide its launch."""
        return math.ceil(8 / self.copies)

    @property
    def calls(self) -> int:
        """Calls in one program."""
        return self.copies * self.turns

    def cache_shape(self, layout: str) -> tuple[int, ...]:
        """Of the keys, or the values, of one cache."""
        sizes = (self.kv_heads, self.context)
        return (self.batch, *(sizes if layout == HEAD_MAJOR else sizes[::-1]), self.head_dim)

    def row(self, implementation: str, roof: Roof, seconds: float | None, **more: Any) -> dict:
        """The result of one implementation; ``seconds`` is none where it did not run."""
        row = {"implementation": implementation, **dataclasses.asdict(self)}
        row |= {"microseconds": None, **more}
        if seconds is not None:
            row |= {
                "microseconds": round(seconds * 1e6, 2),
                "tb_per_s": round(self.bytes / seconds / 1e12, 3),
                "tflop_per_s": round(self.operations / seconds / 1e12, 1),
                "percent_of_roof": round(
                    100 * roof.seconds(self.bytes, self.operations) / seconds, 1
                ),
            }
        return row


def abstract_operands(case: Case, layout: str) -> tuple[Any, ...]:
    """The shapes of :meth:`Operands.of`: compiling from them allocates nothing."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(case.dtype))
    cache = shape(case.cache_shape(layout))
    rows = (case.batch, case.tokens)
    tree = shape((*rows, case.kv_heads, case.head_dim))
    mask = jax.ShapeDtypeStruct((*rows, case.tokens), jnp.bool_)
    q = shape((*rows, case.heads, case.head_dim))
    return q, [(cache, cache)] * case.copies, tree, tree, mask


class Operands:
    """Random operands, whose caches stay in memory until a case of another shape comes."""

    def __init__(self) -> None:
        """Begin without caches."""
        self._kind: Any = None
        self._caches: list[tuple[jax.Array, jax.Array]] = []

    def of(self, case: Case, layout: str) -> tuple[Any, ...]:
        """``(q, caches, tree_k, tree_v, mask)``: queries, distinct caches, tree rows, tree mask."""
        keys = jax.random.split(jax.random.key(3), 3)
        rows = (case.batch, case.tokens)
        dtype = jnp.dtype(case.dtype)
        q = jax.random.normal(keys[0], (*rows, case.heads, case.head_dim), dtype)
        tree_k = jax.random.normal(keys[1], (*rows, case.kv_heads, case.head_dim), dtype)
        tree_v = jax.random.normal(keys[2], (*rows, case.kv_heads, case.head_dim), dtype)
        mask = jnp.asarray(np.broadcast_to(tree_mask(case.tokens), (*rows, case.tokens)))
        return q, self._caches_of(case, layout), tree_k, tree_v, mask

    def _caches_of(self, case: Case, layout: str) -> list[tuple[jax.Array, jax.Array]]:
        shape, dtype = case.cache_shape(layout), jnp.dtype(case.dtype)
        kind = (shape, dtype, case.copies)
        if kind != self._kind:
            self._kind, self._caches = kind, []  # Freed before others are drawn.
            fill = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
            keys = jax.random.split(jax.random.key(2), 2 * case.copies)
            self._caches = [(fill(keys[2 * i]), fill(keys[2 * i + 1])) for i in range(case.copies)]
        return self._caches


def tree_mask(tokens: int) -> np.ndarray:
    """``[T, T]`` ancestors of a random tree's nodes, each node included."""
    rng = np.random.default_rng(0)
    mask = np.eye(tokens, dtype=bool)
    for node in range(1, tokens):
        mask[node] |= mask[rng.integers(max(0, node - 16), node)]
    return mask
