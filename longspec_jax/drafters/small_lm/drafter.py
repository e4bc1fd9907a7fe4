"""The small-model drafter: beam search with a whole language model of its own, and its own cache.

The classic of speculative decoding (Leviathan et al. 2023, Chen et al. 2023) with trees. The model
shares nothing with the target but the tokenizer, so any published model of the same family serves;
in return its cache grows with the context. Of a long one it may read a part that the target's
attention chooses (SpecExtend), as fast as a short one; the whole is kept to choose from.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.lax import dynamic_update_slice_in_dim

from longspec_jax.axes import Array, Lengths
from longspec_jax.config import TargetConfig, TreeConfig
from longspec_jax.drafters.base import Committed, Needs, Params, SamplingNoise, Uncommitted, View
from longspec_jax.drafters.small_lm.state import SPARE, SmallLMState, allocate, append
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.drafters.working_cache import WorkingCache
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
    working: WorkingCache | None = None
    """What is read of a long cache; all of it if absent."""
    name: str = field(default="small_lm", init=False)

    @property
    def needs(self) -> Needs:
        """All tokens, and what a working cache is chosen by."""
        return Needs(queries=self.working.queries if self.working else ())

    def begin(self, params: Params, batch: int, capacity: int) -> SmallLMState:
        """An empty cache."""
        if self.working is None:
            return allocate(self.config, batch, capacity)
        state = allocate(self.config, batch, capacity, self.working.budget.block)
        return replace(state, choice=self.working.begin(batch))

    def extend(self, params: Params, state: SmallLMState, committed: Committed) -> SmallLMState:
        """Run the small model over the tokens, each row behind its own past.

        Short blocks, as accepted paths are, see the working cache; chunks of a prompt see all.
        """
        tokens, start, count, _ = committed
        # A row without tokens has nothing to read either.
        seen = jnp.where(count > 0, start, 0)
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        past = self._past(state, seen, whole=tokens.shape[1] > SPARE)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return chunk_attention(q, past[layer], k, v, implementation=self.attention)

        output = self._run(params.draft, tokens, positions, attend)
        if self.working is not None:
            state = replace(state, choice=self.working.learn(state.choice, committed))
        return append(state, output.keys, output.values, start, count)

    def before_round(self, params: Params, state: SmallLMState, view: View) -> SmallLMState:
        """Choose what is read of the cache, where it is time."""
        if self.working is None:
            return state
        return replace(state, choice=self.working.before_round(state.choice, view))

    def propose(
        self, params: Params, state: SmallLMState, view: View, noise: SamplingNoise
    ) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        if self.narrower:
            noise = noise.among(jnp.arange(self.config.vocab_size))
        batch, room = view.pending.shape[0], nodes_run(self.tree)
        shape = (batch, room, self.config.num_kv_heads, self.config.head_width)
        empty = jnp.zeros(shape, jnp.dtype(self.config.dtype))
        # The cache goes as far as the pending token, the target's may not.
        past = self._past(state, view.position)
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
                fresh = Fresh(keys[layer], values[layer], mask)
                return speculative_attention(q, past[layer], fresh, implementation=self.attention)

            hidden = self._run(params.draft, tokens, positions, attend).hidden
            scores = noise.scores(self._unembed(params.draft, hidden), depth)
            return Uncommitted(tuple(keys), tuple(values)), scores

        return beam_search(view.pending, self.tree, score, rows, implementation=self.attention)

    def _past(
        self, state: SmallLMState, length: Lengths, whole: bool = False
    ) -> tuple[Prefix, ...]:
        """What is read of every layer's cache that holds ``length[b]`` tokens."""
        layers = tuple(zip(state.keys, state.values, strict=True))
        if self.working is None or whole:
            return tuple(Prefix(keys, values, length) for keys, values in layers)
        table = self.working.table(state.choice, length, layers[0][0].shape[2])
        return tuple(self.working.read(keys, values, table) for keys, values in layers)

    def _run(self, params: Any, tokens: Array, positions: Array, attend: Attend) -> TargetOutput:
        # A token that the small model has not is read as its last one.
        known = jnp.minimum(tokens, self.config.vocab_size - 1)
        output: Any = Target(self.config).apply({"params": params}, known, positions, attend)
        return output

    def _unembed(self, params: Any, hidden: Array) -> Array:
        logits: Any = Target(self.config).apply({"params": params}, hidden, method="unembed")
        return logits
