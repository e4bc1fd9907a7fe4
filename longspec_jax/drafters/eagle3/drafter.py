"""The EAGLE-3 drafter: beam search with one layer over the target's features.

Entry ``i`` of the draft's cache is made of the target's feature of token ``i`` and of token
``i + 1``. A row that holds ``n`` committed tokens has ``n - 1`` entries, and the feature of its
last token, whose entry is completed by the pending token: the root of the tree. Below the root a
node takes its parent's output for the feature. None of this is kept: the accepted path enters the
cache with the features that its verification computed.

Without a window the cache grows with the context. With one it is a ring of the last entries, and
the first few entries (sinks) beside it, whose keys are turned each round to stand right before the
ring: no distance is ever longer than ring and sinks, so that a draft that was trained on short
texts goes on at any length, in constant memory.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, CacheSlots, Leaf, Lengths, TreeRows
from longspec_jax.config import TreeConfig
from longspec_jax.drafters.base import (
    Committed,
    Drafter,
    Needs,
    Params,
    SamplingNoise,
    View,
)
from longspec_jax.drafters.eagle3.config import Eagle3Config
from longspec_jax.drafters.eagle3.model import Eagle3Params
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.caches import Caches
from longspec_jax.ops.layer import rotate
from longspec_jax.ops.slicing import along, last_along

SLOTS = 8
"""The cache has a multiple of this many slots, as kernels need it."""


@struct.dataclass
class Eagle3State:
    """Entries of committed tokens; which are present follows from the committed length alone."""

    cache: Caches
    """Of one layer, rotary applied at the entry's own position."""
    sink_keys: Leaf[TreeRows]
    """Of the first entries, which are not in the ring; rotary applied at their own positions."""
    sink_values: Leaf[TreeRows]
    feature: Leaf[Float[Array, "B D"]]
    """Fused, of the last committed token."""


@dataclass(frozen=True)
class Eagle3Drafter(Drafter):
    """Proposes trees by beam search over the draft's cumulative log-probability."""

    config: Eagle3Config
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Implementation of attention, and of the choice among a level's continuations; chosen
    automatically if absent."""
    window: int | None = None
    """Entries of committed tokens that it sees beside the sinks, the last ones; all if absent."""
    sinks: int = 0
    """First entries that it sees as well, where there is a window."""
    name: str = field(default="eagle3", init=False)

    def __post_init__(self) -> None:
        if self.window is None and self.sinks:
            raise ValueError(f"sinks={self.sinks} need a window; without one all entries are seen")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 entry")

    @property
    def needs(self) -> Needs:
        """The hidden states that it fuses; of the last tokens alone where it has no sinks."""
        recent = None
        if self.window is not None and not self.sinks:
            recent = self.window + 1  # The oldest entry has the feature of the token before it.
        return Needs(hidden=tuple(sorted({*self.config.features})), recent=recent)

    def begin(self, params: Params, batch: int, capacity: int) -> Eagle3State:
        """No entry yet: a ring whatever the capacity, or a cache of it."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        slots = -(-(self.window or capacity) // SLOTS) * SLOTS
        entries = (batch, c.num_kv_heads, slots, c.head_width)
        first = (batch, self.sinks, c.num_kv_heads, c.head_width)
        keys, values = (jnp.zeros(entries, dtype) for _ in range(2))
        first_keys, first_values = (jnp.zeros(first, dtype) for _ in range(2))
        feature = jnp.zeros((batch, c.model_width), dtype)
        return Eagle3State(Caches((keys,), (values,)), first_keys, first_values, feature)

    def extend(self, params: Params, state: Eagle3State, committed: Committed) -> Eagle3State:
        """Complete the entries before the tokens, and keep the feature of the last one."""
        tokens, start, count, features = committed
        draft: Eagle3Params = params.draft
        fused = draft.fused(self.config, [features.hidden[layer] for layer in self.config.features])
        before = jnp.concatenate([state.feature[:, None], fused[:, :-1]], axis=1)
        offsets = jnp.arange(tokens.shape[1])
        entries = start[:, None] - 1 + offsets
        fresh = draft.keys_values(self.config, tokens, before, entries)
        # The first token of a text follows none: it has no entry.
        known = (offsets < count[:, None]) & (entries >= 0)
        ring, slots = known & (entries >= self.sinks), entries - self.sinks
        if self.window is not None:
            ring &= offsets >= (count - self.window)[:, None]
            slots %= self.window
        # What is not kept goes to a slot that does not exist, and is dropped.
        cache = state.cache
        at = jnp.where(ring, slots, cache.keys[0].shape[2])
        keys, values = (
            _written(layer, cache.cache_rows, at, new)
            for layer, new in zip((*cache.keys, *cache.values), fresh, strict=True)
        )
        sinks = state.sink_keys, state.sink_values
        if self.sinks:
            at = jnp.where(known & (entries < self.sinks), entries, self.sinks)
            write = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
            sinks = write(sinks[0], at, fresh[0]), write(sinks[1], at, fresh[1])
        last = jnp.where((count > 0)[:, None], last_along(fused, count), state.feature)
        kept = Caches((keys,), (values,), cache.cache_rows)
        return Eagle3State(kept, *sinks, last)

    def propose(self, params: Params, state: Eagle3State, view: View, noise: SamplingNoise) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        c, kept = self.config, nodes_run(self.tree)
        draft: Eagle3Params = params.draft
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)
        entries = jnp.maximum(view.position - 1, 0)
        prefix = self._past(state, jnp.where(view.done, 0, entries))
        # Sinks and tree share a buffer: a level's K/V are written as it is run.
        sinks, seen = self._sinks(state, entries)
        slack = ((0, 0), (0, kept), (0, 0), (0, 0))
        rows = jnp.pad(sinks[0], slack), jnp.pad(sinks[1], slack)
        outputs = jnp.zeros((len(entries), kept, c.model_width), jnp.dtype(c.dtype))

        def score(
            memory: tuple[Array, Array, Array], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[Array, Array, Array], Array]:
            keys, values, outputs = memory
            tokens, path = tree.tokens[:, nodes], tree.mask[:, nodes, :kept]
            positions = jnp.broadcast_to(entries[:, None] + depth, tokens.shape)
            feature = state.feature[:, None]
            if depth:
                feature = along(jnp.maximum(tree.parents[:, nodes], 0), outputs)
            first = jnp.broadcast_to(seen[:, None], (*tokens.shape, self.sinks))
            mask = jnp.concatenate([first, path], axis=2)
            write = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)

            def attend(q: Array, k: Array, v: Array) -> Array:
                nonlocal keys, values
                at = self.sinks + nodes.start
                keys, values = write(keys, k, start_index=at), write(values, v, start_index=at)
                return speculative_attention(
                    *(q, prefix, Fresh(keys, values, mask)),
                    scale=c.attention_scale,
                    implementation=self.attention,
                )

            hidden, feedback = draft.level(c, tokens, feature, positions, attend)
            outputs = write(outputs, feedback, start_index=nodes.start)
            return (keys, values, outputs), noise.scores(draft.logits(hidden), depth)

        return beam_search(
            *(view.pending, self.tree, score, (*rows, outputs), draft.vocabulary, self.attention)
        )

    def _past(self, state: Eagle3State, entries: Lengths) -> Prefix:
        """What is read of the cache. The order of a ring does not matter to attention."""
        length = entries
        if self.window is not None:
            length = jnp.clip(entries - self.sinks, 0, self.window)
        return state.cache.layer(0, length)

    def _sinks(
        self, state: Eagle3State, entries: Lengths
    ) -> tuple[tuple[Array, Array], Bool[Array, "B s"]]:
        """Keys and values of the sinks, turned to right before the ring, and which there are."""
        seen = jnp.arange(self.sinks) < entries[:, None]
        if not self.sinks:
            return (state.sink_keys, state.sink_values), seen
        left_out = jnp.maximum(entries - self.sinks - (self.window or 0), 0)
        shift = self.config.angles(jnp.broadcast_to(left_out[:, None], seen.shape))
        return (rotate(state.sink_keys, shift), state.sink_values), seen


def _written(
    layer: CacheSlots, cache_rows: Lengths | None, at: Int[Array, "B n"], new: TreeRows
) -> CacheSlots:
    """The cache with new entries at the slots ``at``; those that do not exist are dropped."""
    if cache_rows is not None:
        return layer.at[cache_rows[:, None], :, at].set(new, mode="drop")
    write = jax.vmap(lambda row, at, new: row.at[:, at].set(new.swapaxes(0, 1), mode="drop"))
    return write(layer, at, new)
