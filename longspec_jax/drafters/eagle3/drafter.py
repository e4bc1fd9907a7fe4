"""The EAGLE-3 drafter: beam search with one layer over the target's features.

Entry ``i`` of the draft's cache is made of the target's feature of token ``i`` and of token
``i + 1``. A row that holds ``n`` committed tokens has ``n - 1`` entries, and the feature of its
last token, whose entry is completed by the pending token: the root of the tree. Below the root a
node takes its parent's output for the feature. None of this is kept: the accepted path enters the
cache with the features that its verification computed.

Without a window the cache grows with the context. With one it is a ring of the last entries and the
first few beside it (:mod:`longspec_jax.drafters.window`), in constant memory. Of a whole cache it
may read what the target attends to (:mod:`longspec_jax.drafters.retrieval.working_cache`).
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.eagle3.config import Eagle3Config
from longspec_jax.drafters.eagle3.model import Eagle3Params
from longspec_jax.drafters.retrieval.working_cache import CachedSelection, WorkingCache
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.drafters.window import Entries, Seen
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.slicing import along, last_along


@struct.dataclass
class Eagle3State:
    """What a row keeps of its committed tokens."""

    entries: Entries
    """One for each token but the last."""
    feature: Leaf[Float[Array, "B D"]]
    """Fused, of the last committed token."""
    choice: CachedSelection | None = None
    """Which entries are read, if chosen ones are."""


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
    working: WorkingCache | None = None
    """What it reads of all entries, where there is no window; all of them if absent."""
    name: str = "eagle3"
    """Or ``eagle`` or ``mtp``, by the layer that the parameters bring."""

    def __post_init__(self) -> None:
        self.seen.checked()
        if self.working and self.window is not None:
            raise ValueError(f"a working cache and window={self.window} exclude each other")

    @property
    def seen(self) -> Seen:
        """Which entries it sees."""
        return Seen(self.window, self.sinks)

    @property
    def needs(self) -> Needs:
        """The hidden states that it fuses, of the tokens that its entries are made of."""
        hidden = tuple(sorted({*self.config.features}))
        if self.window is None:
            return Needs(hidden, queries=self.working.queries if self.working else ())
        # An entry has the feature of a token and the token behind it: so has the oldest, and so
        # has the last of the sinks.
        return Needs(hidden, recent=self.window + 1, first=self.sinks and self.sinks + 1)

    def begin(self, params: Params, batch: int, capacity: int) -> Eagle3State:
        """No entry yet."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        if self.working:
            capacity += -capacity % self.working.budget.block
        entries = self.seen.begin(batch, capacity, c.num_kv_heads, c.head_width, dtype)
        feature = jnp.zeros((batch, c.model_width), dtype)
        return Eagle3State(entries, feature, self.working and self.working.begin(batch))

    def extend(self, params: Params, state: Eagle3State, committed: Committed) -> Eagle3State:
        """Complete the entries before the tokens, and keep the feature of the last one."""
        tokens, start, count, features = committed
        draft: Eagle3Params = params.draft
        fused = draft.fused(self.config, [features.hidden[layer] for layer in self.config.features])
        before = jnp.concatenate([state.feature[:, None], fused[:, :-1]], axis=1)
        # The first token of a text follows none: it has no entry.
        at = start[:, None] - 1 + jnp.arange(tokens.shape[1])
        fresh = draft.keys_values(self.config, tokens, before, at)
        entries = self.seen.written(state.entries, fresh, at, count)
        last = jnp.where((count > 0)[:, None], last_along(fused, count), state.feature)
        choice = self.working and self.working.extend(state.choice, committed)
        return Eagle3State(entries, last, choice)

    def before_round(self, params: Params, state: Eagle3State, view: View) -> Eagle3State:
        """Choose which entries are read, in the rows that need it."""
        return replace(state, choice=self.working and self.working.before_round(state.choice, view))

    def propose(self, params: Params, state: Eagle3State, view: View, noise: SamplingNoise) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        c, kept = self.config, nodes_run(self.tree)
        draft: Eagle3Params = params.draft
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)
        entries = jnp.maximum(view.position - 1, 0)
        prefix = self.past(state, jnp.where(view.done, 0, entries))
        # Sinks and tree share a buffer: a level's K/V are written as it is run.
        sinks, seen = self.seen.first(state.entries, entries, c.angles)
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

    def past(self, state: Eagle3State, entries: Lengths) -> Prefix:
        """What is read of the cache. A chosen token stands for the entry of its feature."""
        if self.working is None:
            return self.seen.past(state.entries, entries)
        layer = state.entries.cache.layer(0, entries)
        table = self.working.table(state.choice, entries, layer.keys.shape[2])
        return self.working.read(layer, table)
