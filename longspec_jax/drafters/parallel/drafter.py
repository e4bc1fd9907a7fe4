"""The parallel LongSpec drafter: one forward over a block, and a tree of its slots' best tokens.

Slot ``j`` stands at the position of the pending token plus ``j`` and proposes the token behind it.
All slots together read the target's last-layer cache in place, so a long cache is read once a
round, whatever the depth of the tree. A level of the tree takes the logits of one slot, which the
Markov head corrects behind every node by its token. The draft's memory is a ring of the last ``W``
tokens' keys and values.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.parallel.config import ParallelConfig
from longspec_jax.drafters.parallel.model import ParallelParams
from longspec_jax.drafters.tree import Tree, beam_search, plant
from longspec_jax.drafters.window import Entries, Seen
from longspec_jax.models.target import capped
from longspec_jax.ops.attention.dispatch import (
    prefix_attention,
    speculative_attention,
    tree_attention,
)
from longspec_jax.ops.attention.operands import Fresh


@dataclass(frozen=True)
class ParallelDrafter(Drafter):
    """Proposes trees by beam search over the cumulative log-probability of a block's slots."""

    config: ParallelConfig
    tree: TreeConfig
    attention: str | None = None
    """Implementation of attention, and of the choice among a level's continuations; chosen
    automatically if absent."""
    name: str = field(default="parallel", init=False)

    def __post_init__(self) -> None:
        if self.tree.num_levels > self.config.block:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels is deeper than the block of this draft, "
                f"which proposes {self.config.block} tokens; use fewer levels"
            )

    @property
    def needs(self) -> Needs:
        """The last ``W`` tokens."""
        return Needs(recent=self.config.layer.window)

    def begin(self, params: Params, batch: int, capacity: int) -> Entries:
        """An empty ring, whatever the capacity."""
        c = self.config.layer
        sizes = batch, capacity, c.num_kv_heads, c.head_width, jnp.dtype(c.dtype)
        return self._seen.begin(*sizes)

    def extend(self, params: Params, state: Entries, committed: Committed) -> Entries:
        """Write the keys and values of the last ``W`` of the tokens over the oldest ones."""
        tokens, start, count, _ = committed.last(self.config.layer.window)
        at = start[:, None] + jnp.arange(tokens.shape[1])
        draft: ParallelParams = params.draft
        fresh = draft.keys_values(self.config, tokens, at)
        return self._seen.written(state, fresh, at, count)

    def propose(self, params: Params, state: Entries, view: View, noise: SamplingNoise) -> Tree:
        """Run the block, and grow the tree over its slots."""
        if not self.tree.num_levels:
            return plant(view.pending, self.tree)
        draft: ParallelParams = params.draft
        logits = draft.logits(self._block(draft, state, view)[:, : self.tree.num_levels])

        def score(
            memory: tuple[()], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[()], Array]:
            slot, tokens = logits[:, depth : depth + 1], tree.tokens[:, nodes]
            cap = self.config.layer.logit_cap
            if draft.markov is not None:
                corrected = slot + draft.correction(tokens)
                return memory, noise.scores(capped(corrected, cap), depth)
            scores = noise.scores(capped(slot, cap), depth)
            return memory, jnp.broadcast_to(scores, (*tokens.shape, scores.shape[2]))

        return beam_search(view.pending, self.tree, score, (), implementation=self.attention)

    @property
    def _seen(self) -> Seen:
        return Seen(self.config.layer.window, 0)

    def _block(self, draft: ParallelParams, state: Entries, view: View) -> Array:
        """What the LM head reads of every slot, ``[B, block, D]``."""
        slots, position = self.config.block, view.position
        ring = self._seen.past(state, jnp.where(view.done, 0, position))
        past = view.read_layer()
        each_other = jnp.ones((len(position), slots, slots), bool)

        def attend_self(layer: int, q: Array, k: Array, v: Array) -> Array:
            fresh = Fresh(k, v, each_other)
            if layer:
                found = tree_attention(q, fresh, dtype=q.dtype, implementation=self.attention)
                return found.out
            return speculative_attention(q, ring, fresh, implementation=self.attention)

        def attend_cross(q: Array) -> Array:
            return prefix_attention(q, past, dtype=q.dtype, implementation=self.attention).out

        positions = position[:, None] + jnp.arange(slots)
        return draft.block(self.config, view.pending, positions, attend_self, attend_cross)
