"""How query rows are packed, and which the GPU kernels take.

The query heads that read one key/value head are rows of one matmul, so that each key and value is
read once for all of them. The Pallas kernels take their queries packed. That costs nothing where
they were unpacked just before, as by the kernel that splits and rotates heads
(:mod:`longspec_jax.ops.layer_pallas`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array, Queries

MAX_WIDTH = 256
MAX_GROUP = 16
LOG2_E = math.log2(math.e)
"""Inside of the kernels scores are in base 2, in which the hardware exponentiates."""


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """How query rows are packed: the heads that read one key/value head are rows of one matmul."""

    tokens: int
    heads: int
    kv_heads: int

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def packed(self) -> int:
        """Query rows that read one key/value head: token-major, its heads innermost."""
        return self.tokens * self.groups


@dataclasses.dataclass(frozen=True)
class Problem(PackedShape):
    """What every program of an attention kernel knows, besides its tile.

    Attributes:
      scale: factor on the scores, in base 2.
      slots: of the cache, if there is one.
      splits: the most splits of a row.
      step: slots by which a split grows.
      interpret: whether the kernel runs step by step, on any platform.
      cap: bounds the scores softly, if there is one; natural.
    """

    scale: float
    slots: int
    splits: int
    step: int
    interpret: bool
    cap: float | None = None

    def split_of(self, length: jax.Array) -> jax.Array:
        """Slots of a split of a row of this length, in whole steps.

        As few as let all splits share the row, whatever the capacity and the other rows.
        """
        seen = jnp.minimum(length, self.slots)
        return jnp.maximum(shortest_split(seen, self.splits, self.step), self.step)

    def scores(self, products: jax.Array) -> jax.Array:
        """Scores in base 2 of products of queries and keys."""
        if self.cap is None:
            return products * self.scale
        bound = self.cap * LOG2_E
        return bound * jnp.tanh(products * (self.scale / bound))

    @classmethod
    def of(
        cls,
        q: Queries,
        kv_heads: int,
        scale: float | None,
        *,
        slots: int,
        splits: int,
        step: int,
        interpret: bool,
        cap: float | None = None,
    ) -> "Problem":
        """The problem of these queries; ``scale`` is natural, ``H ** -0.5`` if absent."""
        _, tokens, heads, width = q.shape
        factor = (width**-0.5 if scale is None else scale) * LOG2_E
        return cls(tokens, heads, kv_heads, factor, slots, splits, step, interpret, cap)


def shortest_split(length: jax.Array, splits: int, step: int) -> jax.Array:
    """Slots of a split, in whole steps, if so many share a row of this length; 0 for none."""
    shared = splits * step
    return jax.lax.div(length + (shared - 1), shared) * step


def pack(q: Queries, kv_heads: int) -> Float[Array, "B K R H"]:
    """Queries in the order of :class:`PackedShape`'s rows, those of a key/value head together."""
    batch, tokens, heads, width = q.shape
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, width)


def unpack(packed: Float[Array, "B K R H"], tokens: int) -> Queries:
    """Queries in their usual shape: inverts :func:`pack`."""
    batch, kv_heads, rows, width = packed.shape
    grouped = packed.reshape(batch, kv_heads, tokens, rows // tokens, width)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, -1, width)


def flat_rows(packed: jax.Array, kv_head: jax.Array, shape: PackedShape) -> jax.Array:
    """Indices of packed rows on the flattened [T N] axis."""
    token, group = packed // shape.groups, packed % shape.groups
    return token * shape.heads + kv_head * shape.groups + group


def packed_rows(flat: jax.Array, shape: PackedShape) -> tuple[jax.Array, jax.Array]:
    """Key/value heads and packed rows of the flattened [T N] axis: inverts :func:`flat_rows`."""
    kv_head = flat % shape.heads // shape.groups
    return kv_head, flat // shape.heads * shape.groups + flat % shape.groups


def refuse_unsupported(q: Queries, kv_heads: int) -> None:
    """Raise for what the GPU kernels cannot do; the sentence names the value and the rule."""
    if q.shape[3] % 8 or not 16 <= q.shape[3] <= MAX_WIDTH:
        raise NotImplementedError(
            f"head width {q.shape[3]} is not a multiple of 8 between 16 and {MAX_WIDTH}"
        )
    if q.shape[2] // kv_heads > MAX_GROUP:
        raise NotImplementedError(
            f"{q.shape[2] // kv_heads} query heads per key/value head exceed {MAX_GROUP}"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"{q.dtype} is neither bfloat16, float16 nor float32")
