"""The small-model drafter: beam search with a whole language model of its own, and its own cache.

The classic of speculative decoding (Leviathan et al. 2023, Chen et al. 2023) with trees. The model
shares nothing with the target but the tokenizer, so any published model of the same family serves;
in return its cache grows with the context.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.lax import dynamic_update_slice_in_dim

from longspec_jax.axes import Array
from longspec_jax.config import TargetConfig, TreeConfig
from longspec_jax.drafters.base import Beliefs, Committed, Needs, Params, Uncommitted, View
from longspec_jax.drafters.beam import beam_search, nodes_run
from longspec_jax.drafters.small_lm.state import SmallLMState, allocate, append
from longspec_jax.drafters.tree import Tree
from longspec_jax.models.target import Attend, Target, TargetOutput
from longspec_jax.ops.attention.dispatch import chunk_attention, speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix


@dataclass(frozen=True)
class SmallLMDrafter:
    """Proposes trees by beam search over the small model's cumulative log-probability.

    ``params.draft`` holds the parameters of its :class:`~longspec_jax.models.target.Target`.
    """

    config: TargetConfig
    """The small model's; it proposes the first ``vocab_size`` of the target's tokens."""
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""
    narrower: bool = False
    """Whether the target has tokens that the small model has not."""
    name: str = field(default="small_lm", init=False)
    needs: Needs = field(default=Needs(), init=False)

    def begin(self, params: Params, batch: int, capacity: int) -> SmallLMState:
        """An empty cache."""
        return allocate(self.config, batch, capacity)

    def extend(self, params: Params, state: SmallLMState, committed: Committed) -> SmallLMState:
        """Run the small model over the tokens, each row behind its own past."""
        tokens, start, count, _ = committed
        # A row without tokens has nothing to read either.
        seen = jnp.where(count > 0, start, 0)
        positions = start[:, None] + jnp.arange(tokens.shape[1])

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            prefix = Prefix(state.keys[layer], state.values[layer], seen)
            return chunk_attention(q, prefix, k, v, implementation=self.attention)

        output = self._run(params.draft, tokens, positions, attend)
        return append(state, output.keys, output.values, start, count)

    def propose(self, params: Params, state: SmallLMState, view: View, beliefs: Beliefs) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        if self.narrower:
            beliefs = beliefs.among(jnp.arange(self.config.vocab_size))
        batch, room = view.pending.shape[0], nodes_run(self.tree)
        shape = (batch, room, self.config.num_kv_heads, self.config.head_width)
        empty = jnp.zeros(shape, jnp.dtype(self.config.dtype))
        rows = Uncommitted(*((empty,) * self.config.num_layers for _ in range(2)))

        def score(
            rows: Uncommitted, tree: Tree, nodes: slice, depth: int
        ) -> tuple[Uncommitted, Array]:
            keys, values = list(rows.keys), list(rows.values)
            tokens, mask = tree.tokens[:, nodes], tree.mask[:, nodes, :room]
            positions = jnp.broadcast_to(view.position[:, None] + depth, tokens.shape)

            def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
                write = partial(dynamic_update_slice_in_dim, start_index=nodes.start, axis=1)
                keys[layer], values[layer] = write(keys[layer], k), write(values[layer], v)
                # The cache goes as far as the pending token, the target's may not.
                prefix = Prefix(state.keys[layer], state.values[layer], view.position)
                fresh = Fresh(keys[layer], values[layer], mask)
                return speculative_attention(q, prefix, fresh, implementation=self.attention)

            hidden = self._run(params.draft, tokens, positions, attend).hidden
            belief = beliefs.log_probabilities(self._unembed(params.draft, hidden), depth)
            return Uncommitted(tuple(keys), tuple(values)), belief

        return beam_search(view.pending, self.tree, score, rows)

    def _run(self, params: Any, tokens: Array, positions: Array, attend: Attend) -> TargetOutput:
        # A token that the small model has not is read as its last one.
        known = jnp.minimum(tokens, self.config.vocab_size - 1)
        output: Any = Target(self.config).apply({"params": params}, known, positions, attend)
        return output

    def _unembed(self, params: Any, hidden: Array) -> Array:
        logits: Any = Target(self.config).apply({"params": params}, hidden, method="unembed")
        return logits
