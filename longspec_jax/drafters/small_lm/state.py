"""The small model's own keys and values of committed tokens, one array a layer.

Which slots hold committed tokens follows from the committed length alone, as in the target's cache;
memory beyond it may hold anything.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths
from longspec_jax.config import TargetConfig
from longspec_jax.drafters.kept import Kept
from longspec_jax.ops.layer.append_rows import append_rows

SPARE = 64
"""Slots behind those that committed tokens can take: where short blocks that are not to be kept
are written. More than the longest accepted path; a multiple of 8, as kernels want it."""


@struct.dataclass
class SmallLMState:
    """Keys and values of every layer. DONATED by what returns a new one."""

    keys: tuple[Leaf[CacheSlots], ...]
    """Of every layer, rotary applied."""
    values: tuple[Leaf[CacheSlots], ...]
    """Of every layer."""
    choice: Kept | None = None
    """Which of them are read, if not all are."""


def allocate(config: TargetConfig, batch: int, capacity: int, block: int = 1) -> SmallLMState:
    """Zeros for rows of so many tokens; uninitialised memory could hold NaNs.

    Args:
      config: the small model's.
      batch: rows.
      capacity: tokens of a row.
      block: the slots are a multiple of this.
    """
    slots = -(-(capacity + SPARE) // block) * block
    shape = (batch, config.num_kv_heads, slots, config.head_width)
    dtype = jnp.dtype(config.dtype)
    keys = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    values = tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return SmallLMState(keys, values)


def append(
    state: SmallLMState,
    keys: Sequence[Array],
    values: Sequence[Array],
    start: Lengths,
    count: Lengths,
) -> SmallLMState:
    """Write ``count[b]`` of the rows ``L x [B, n, K, H]`` from slot ``start[b]`` on.

    A row without a count keeps all its slots whatever its start, and no token that a row has no
    slot for is written over another one.
    """
    layers, given = len(keys), keys[0].shape[1]
    caches, fresh = (*state.keys, *state.values), (*keys, *values)
    write = _append_block if given <= SPARE else _append_chunk
    # No layer's slots may be written before they were read, or the compiler copies whole caches.
    # The last layer's keys are the result of all that was read.
    known = jnp.isfinite(keys[-1][:, 0, 0, 0])
    written = write(caches, fresh, start, jnp.where(known, count, 0))
    return replace(state, keys=written[:layers], values=written[layers:])


def _append_block(
    caches: Sequence[Array], fresh: Sequence[Array], start: Lengths, count: Lengths
) -> tuple[Array, ...]:
    """All of a short block as one op; beyond the count it is garbage behind the new length."""
    given, slots = fresh[0].shape[1], caches[0].shape[2]
    at = jnp.minimum(jnp.where(count > 0, start, slots), slots - given)
    path = jnp.broadcast_to(jnp.arange(given), (start.shape[0], given))
    return append_rows(caches, fresh, path, at)


def _append_chunk(
    caches: Sequence[Array], fresh: Sequence[Array], start: Lengths, count: Lengths
) -> tuple[Array, ...]:
    """A chunk of a prompt, of any size: exactly the tokens that joined."""
    offsets, slots = jnp.arange(fresh[0].shape[1]), caches[0].shape[2]
    # Slots that do not exist are dropped; they differ, so that all of them do.
    dropped = slots + offsets
    at = jnp.where(offsets < count[:, None], start[:, None] + offsets, dropped)

    def write_row(cache: Array, rows: Array, at: Array) -> Array:
        rows = rows.swapaxes(0, 1)
        return cache.at[:, at].set(rows, mode="drop", unique_indices=True)

    return tuple(
        jax.vmap(write_row)(cache, rows, at) for cache, rows in zip(caches, fresh, strict=True)
    )
