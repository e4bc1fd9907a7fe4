"""How query rows are packed, and which the GPU kernels take.

The query heads that read one key/value head are rows of one matrix product, so that each key and
value is read once for all of them. The Pallas kernels take their queries packed, which costs
nothing where they were unpacked before, as they are by the kernel that parts and rotates heads
(:mod:`longspec_jax.ops.layer.split_heads_pallas`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float

from longspec_jax.axes import Array, Queries

MAX_WIDTH = 256
MAX_GROUP = 16


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """How query rows are packed: the heads that read one key/value head are rows of one product."""

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


def pack(q: Queries, kv_heads: int) -> Float[Array, "B K R H"]:
    """Queries in the order of :class:`PackedShape`'s rows, those of a key/value head together."""
    batch, tokens, heads, width = q.shape
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, width)


def unpack(packed: Float[Array, "B K R H"], tokens: int) -> Queries:
    """What :func:`pack` packed."""
    batch, kv_heads, rows, width = packed.shape
    grouped = packed.reshape(batch, kv_heads, tokens, rows // tokens, width)
    return grouped.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, -1, width)


def flat_rows(packed: jax.Array, kv_head: jax.Array, shape: PackedShape) -> jax.Array:
    """Places of packed rows on the flattened [T N] axis."""
    token, group = packed // shape.groups, packed % shape.groups
    return token * shape.heads + kv_head * shape.groups + group


def packed_rows(flat: jax.Array, shape: PackedShape) -> tuple[jax.Array, jax.Array]:
    """Key/value heads and packed rows of places on the flattened [T N] axis.

    What :func:`flat_rows` was given.
    """
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
