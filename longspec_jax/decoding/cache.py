"""The target's key/value cache: committed tokens only, one array per layer.

A tree's K/V come back from verification with the logits; after acceptance the accepted rows are
appended. Nothing is moved, and a rejected branch never touches the cache. How many slots hold
committed tokens is the row's ``length``, kept by the decode state; memory beyond it may hold
anything, because every op masks by length.

A recurrent layer has a state instead, after all committed tokens. Verification leaves it as it is
and yields what every node would write to it; a commit writes what the accepted path does.

A layer with a window of ``W`` tokens has a ring of that many slots, and of what a round writes at
once: what an append overwrites is then older than the window of every later query.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Int

from longspec_jax.axes import Array, CachedRows, CacheSlots, LayerRows, Lengths, TreeRows
from longspec_jax.config.layers import LayerConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS
from longspec_jax.drafters.base import Uncommitted
from longspec_jax.ops.attention import float8
from longspec_jax.ops.attention.float8 import CODES
from longspec_jax.ops.attention.operands import Reading
from longspec_jax.ops.caches import Caches, put_tokens
from longspec_jax.ops.layer import append_rows
from longspec_jax.ops.recurrence.operands import (
    RecurrentRows,
    RecurrentState,
    empty_rows,
    empty_state,
    state_bytes,
)
from longspec_jax.ops.recurrence.recurrence import commit_paths
from longspec_jax.ops.slicing import along


class CacheBytes(NamedTuple):
    """Bytes of a cache, by where they are."""

    device: int
    """Of all devices together, what a pass brings there for a time included."""
    host: int


@struct.dataclass
class KVCache(Caches):
    """The target's keys, values and states. DONATED by every function that returns a new one."""

    def reading(self, length: Lengths) -> Reading:
        """What attention reads in a pass that asks for every layer once, in their order."""
        return lambda index, queries: (queries, self.layer(index, length))

    def shardings(self, sharding: Sharding) -> Any:
        """The sharding of every array, where the part on the device has this one."""
        return jax.tree.map(lambda _: sharding, self)

    def append(
        self,
        keys: tuple[LayerRows | None, ...],
        values: tuple[LayerRows | None, ...],
        at: Lengths,
        count: Lengths | None = None,
        states: Mapping[int, RecurrentState] = {},
    ) -> "KVCache":
        """The cache with the K/V of consecutive tokens at the positions from ``at[b]`` on.

        And with the states after these tokens. The first ``count[b]`` of them are the row's own,
        or all if absent. The caller guarantees room for all in layers without a window; what is no
        row's own lands after its length there.
        """
        if count is None:
            count = jnp.full_like(at, jax.tree.leaves(keys)[0].shape[1])
        write = partial(self._appended, at=at, count=count)
        keys, values = write(self.keys, keys), write(self.values, values)
        return replace(self, keys=keys, values=values, states=states)

    def _appended(
        self,
        layers: tuple[Array | None, ...],
        fresh: tuple[LayerRows | None, ...],
        at: Lengths,
        count: Lengths,
    ) -> tuple[Array | None, ...]:
        def write(index: int, layer: Array | None, new: TreeRows | None) -> Array | None:
            if layer is None or new is None:
                return None
            new = as_cached(layer, new)
            if index in self.rings:
                return append_to_ring(layer, new, at, count)
            return append_chunk(layer, new, at)

        return tuple(map(write, range(len(layers)), layers, fresh))

    def commit(
        self,
        keys: tuple[LayerRows | None, ...],
        values: tuple[LayerRows | None, ...],
        path: Int[Array, "B h"],
        at: Lengths,
        count: Lengths | None = None,
        rows: Mapping[int, RecurrentRows] = {},
    ) -> "KVCache":
        """The cache with the K/V of the tree nodes ``path[b]`` at the slots from ``at[b]`` on.

        States take in the first ``count[b]`` nodes of the path, by what ``rows`` say they write.

        ``path`` has a static height; what stands after the accepted nodes lands after the new
        length, where the next commit overwrites it. The caller guarantees ``at + h <= S`` in layers
        without a window.
        """
        caches, fresh, layers = [*self.keys, *self.values], (*keys, *values), len(keys)
        pairs = {
            i: (cache, as_cached(cache, new))
            for i, (cache, new) in enumerate(zip(caches, fresh, strict=True))
            if cache is not None and new is not None
        }
        for shape in dict.fromkeys(cache.shape for cache, _ in pairs.values()):
            # One launch a shape.
            some = [i for i, (cache, _) in pairs.items() if cache.shape == shape]
            chosen = [pairs[i][0] for i in some], [pairs[i][1] for i in some]
            ring = some[0] % layers in self.rings
            written = append_rows(*chosen, path, at, self.cache_rows, ring=ring)
            for index, cache in zip(some, written, strict=True):
                caches[index] = cache
        states = self.states
        if rows:
            assert count is not None, "a state takes in as many nodes as are committed"
            written = [rows[layer] for layer in states]
            committed = commit_paths([*states.values()], written, path, count, self.cache_rows)
            states = dict(zip(states, committed, strict=True))
        keys, values = tuple(caches[:layers]), tuple(caches[layers:])
        return replace(self, keys=keys, values=values, states=states)

    def uncommitted(self, batch: int, tokens: int, dtype: DTypeLike) -> Uncommitted:
        """Zeros for what ``tokens`` outside the cache add to it in each batch row.

        Keys and values have the dtype of activations, whatever that of the cache.
        """

        def empty(slots: Array) -> Array:
            _, heads, _, width = slots.shape
            return jnp.zeros((batch, tokens, heads, width), dtype)

        keys, values = jax.tree.map(empty, (self.keys, self.values))
        rows = {i: empty_rows(state, batch, tokens) for i, state in self.states.items()}
        return Uncommitted(keys, values, rows)


def as_cached(cache: Array, fresh: TreeRows) -> CachedRows:
    """Fresh rows in the dtype of their cache; exact, as the target rounded them."""
    return float8.codes(fresh) if cache.dtype == CODES else fresh.astype(cache.dtype)


def append_chunk(slots: CacheSlots, fresh: CachedRows, at: Lengths) -> CacheSlots:
    """One layer's keys or values with consecutive tokens' at the slots from ``at[b]`` on."""
    fresh = fresh.swapaxes(1, 2)
    if slots.shape[0] == 1:  # A plain slice update; vmap would turn it into a scatter.
        return jax.lax.dynamic_update_slice_in_dim(slots, fresh, at[0], axis=2)
    update = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(update)(slots, fresh, at)


def append_to_ring(slots: CacheSlots, fresh: CachedRows, at: Lengths, count: Lengths) -> CacheSlots:
    """One ring with the last of ``count[b]`` consecutive tokens, as many as it holds."""
    size, given = slots.shape[2], fresh.shape[1]
    offsets = jnp.maximum(count - size, 0)[:, None] + jnp.arange(min(size, given))
    if given > size:
        fresh = along(offsets, fresh)
    # What is not the row's own goes to a slot that does not exist, and is dropped.
    places = jnp.where(offsets < count[:, None], (at[:, None] + offsets) % size, size)
    return put_tokens(slots, None, places, fresh)


RING_STEP = 8
"""Slots by which rings grow."""


def layer_slots(config: TargetConfig, capacity: int, ring_step: int = RING_STEP) -> tuple[int, ...]:
    """Slots of a row in every layer of a cache of this capacity; none in one without own keys."""

    def slots(index: int) -> int:
        window = config.layer(index).window
        if index in config.recurrent_layers or config.source(index) != index:
            return 0
        return capacity if window is None else min(capacity, ring_slots(window, ring_step))

    return tuple(map(slots, range(config.num_layers)))


def ring_slots(window: int, step: int = RING_STEP) -> int:
    """Slots of a ring for this window, whole steps: the window, and what a round writes at once."""
    return -(-(window + MAX_TREE_LEVELS) // step) * step


def rings_of(config: TargetConfig) -> tuple[int, ...]:
    """The layers with a window and keys of their own."""
    kinds = enumerate(config.layers)
    return tuple(i for i, kind in kinds if kind.window is not None and kind.keys_of is None)


def states_bytes(config: TargetConfig) -> int:
    """Bytes of a row's states in all recurrent layers."""
    return sum(state_bytes(each, config.dtype) for each in config.recurrent_layers.values())


def allocate(
    config: TargetConfig, batch: int, capacity: int, ring_step: int = RING_STEP
) -> KVCache:
    """A zero-filled cache; uninitialised memory could hold NaNs that survive a masked product."""

    def zeros(slots: int, kind: LayerConfig) -> Array | None:
        if not slots:
            return None
        heads = config.heads(kind)
        shape = (batch, heads.num_kv_heads, slots, heads.head_width)
        return jnp.zeros(shape, cache_dtype(config))

    sizes = layer_slots(config, capacity, ring_step)
    return KVCache(
        tuple(map(zeros, sizes, config.layers)),
        tuple(map(zeros, sizes, config.layers)),
        states={
            index: empty_state(each, batch, config.dtype)
            for index, each in config.recurrent_layers.items()
        },
        read_layer=config.read_layer,
        read_scales=config.scales(config.read_layer),
        rings=rings_of(config),
    )


def cache_dtype(config: TargetConfig) -> Any:
    """The dtype of cached keys and values."""
    return jnp.dtype(config.dtype if config.kv_dtype is None else CODES)


def slot_bytes(config: TargetConfig, kind: LayerConfig | None = None) -> int:
    """Bytes of a token's keys and values in a layer of this kind; in a full one if absent."""
    heads = config.heads(kind or LayerConfig())
    return 2 * heads.num_kv_heads * heads.head_width * cache_dtype(config).itemsize


def cache_bytes(config: TargetConfig, batch: int, capacity: int, ring_step: int = RING_STEP) -> int:
    """Bytes of :func:`allocate`'s result, known before allocation."""
    layers = zip(layer_slots(config, capacity, ring_step), config.layers, strict=True)
    row = sum(slots * slot_bytes(config, kind) for slots, kind in layers)
    return batch * (row + states_bytes(config))
