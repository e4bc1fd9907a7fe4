"""The LongSpec drafter: beam search with one layer and a ring of its own K/V.

Self-attention sees the last 512 tokens. Cross-attention reads the target's last-layer cache in
place, so the draft stores nothing that grows with the context (LongSpec section 3.1); or it reads
the chunks of it that the target attends to, or the selection of a partial forward. Self-attention
keys and values depend on (token, position) alone: of a prompt only the last 512 tokens are run.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.model import LongSpecParams
from longspec_jax.drafters.retrieval.working_cache import CachedSelection, WorkingCache
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.models.target import capped
from longspec_jax.ops.attention.dispatch import prefix_attention, tree_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix


@struct.dataclass
class LongSpecState:
    """A ring of the last ``W`` tokens' self-attention K/V: the draft's only memory.

    The token at position ``p`` lives in slot ``p % W``; which positions are present follows from
    the committed length alone.
    """

    keys: Leaf[Float[Array, "B W K H"]]
    values: Leaf[Float[Array, "B W K H"]]
    choice: CachedSelection | None = None
    """What is read of the target's cache, if not all is; a few numbers."""


@dataclass(frozen=True)
class LongSpecDrafter(Drafter):
    """Proposes trees by beam search over the draft's cumulative log-probability."""

    config: DraftConfig
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Implementation of attention, and of the choice among a level's continuations; chosen
    automatically if absent."""
    working: WorkingCache | None = None
    """What cross-attention reads of the target's cache; all of it if absent."""
    name: str = field(default="longspec", init=False)

    def __post_init__(self) -> None:
        if self.tree.num_levels >= self.config.window:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels does not fit the draft window of "
                f"{self.config.window} tokens; use fewer levels"
            )

    @property
    def needs(self) -> Needs:
        """The last ``W`` tokens, and what a working cache is chosen by."""
        queries = self.working.queries if self.working else ()
        return Needs(queries=queries, recent=self.config.window)

    def begin(self, params: Params, batch: int, capacity: int) -> LongSpecState:
        """An empty ring, whatever the capacity."""
        c = self.config
        shape = (batch, c.window, c.num_kv_heads, c.head_width)
        keys, values = (jnp.zeros(shape, jnp.dtype(c.dtype)) for _ in range(2))
        return LongSpecState(keys, values, self.working and self.working.begin(batch))

    def extend(self, params: Params, state: LongSpecState, committed: Committed) -> LongSpecState:
        """Write the K/V of the last ``W`` of the tokens over the oldest ring slots."""
        window = self.config.window
        tokens, start, count, _ = committed.last(window)
        offsets = jnp.arange(tokens.shape[1])
        positions = start[:, None] + offsets
        draft: LongSpecParams = params.draft
        keys, values = draft.keys_values(self.config, tokens, positions)
        # Tokens beyond the count go to a slot that does not exist, and are dropped.
        slots = jnp.where(offsets < count[:, None], positions % window, window)
        write = jax.vmap(lambda ring, at, fresh: ring.at[at].set(fresh, mode="drop"))
        choice = self.working and self.working.extend(state.choice, committed)
        ring = write(state.keys, slots, keys), write(state.values, slots, values)
        return LongSpecState(*ring, choice)

    def before_round(self, params: Params, state: LongSpecState, view: View) -> LongSpecState:
        """Choose what is read of the target's cache, in the rows that need it."""
        return replace(state, choice=self.working and self.working.before_round(state.choice, view))

    def propose(
        self, params: Params, state: LongSpecState, view: View, noise: SamplingNoise
    ) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        window = self.config.window
        draft: LongSpecParams = params.draft
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)
        ring = ring_positions(view.position, window)
        # One buffer for ring and tree: a level's K/V are written behind the ring as it is run.
        nodes_kept = nodes_run(self.tree)
        slack = ((0, 0), (0, nodes_kept), (0, 0), (0, 0))
        rows = jnp.pad(state.keys, slack), jnp.pad(state.values, slack)
        past = self._past(state, view)

        def score(
            rows: tuple[Array, Array], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[Array, Array], Array]:
            tokens = tree.tokens[:, nodes]
            positions = jnp.broadcast_to(view.position[:, None] + depth, tokens.shape)
            inside = ring_mask(ring, positions, window)
            mask = jnp.concatenate([inside, tree.mask[:, nodes, :nodes_kept]], axis=2)

            def attend_self(q: Array, k: Array, v: Array) -> Array:
                nonlocal rows
                write = partial(
                    jax.lax.dynamic_update_slice_in_dim, start_index=window + nodes.start, axis=1
                )
                rows = write(rows[0], k), write(rows[1], v)
                fresh = Fresh(*rows, mask)
                return tree_attention(q, fresh, dtype=q.dtype, implementation=self.attention).out

            attend_cross = partial(self._attend_cross, past)
            hidden = draft.hidden(self.config, tokens, positions, attend_self, attend_cross)
            logits = capped(draft.logits(hidden), self.config.logit_cap)
            return rows, noise.scores(logits, depth)

        return beam_search(view.pending, self.tree, score, rows, draft.vocabulary, self.attention)

    def _past(self, state: LongSpecState, view: View) -> Prefix:
        """What cross-attention reads of the target."""
        if self.working is None:
            return view.read_layer()
        layer = view.cache.read(view.length)
        table = self.working.table(state.choice, layer.length, layer.keys.shape[2])
        return self.working.read(layer, table)

    def _attend_cross(self, past: Prefix, q: Array) -> Array:
        return prefix_attention(q, past, dtype=q.dtype, implementation=self.attention).out


def ring_positions(length: Lengths, window: int) -> Int[Array, "B W"]:
    """Position of the token in every ring slot: the latest ``p < length`` with ``p % W == slot``.

    Negative where the row has fewer tokens than slots: the slot is empty.
    """
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(window)) % window


def ring_mask(
    ring: Int[Array, "B W"], positions: Int[Array, "B T"], window: int
) -> Bool[Array, "B T W"]:
    """Which ring slots each query sees: present ones at most ``window`` positions behind it."""
    distance = positions[:, :, None] - ring[:, None, :]
    return (ring[:, None, :] >= 0) & (distance <= window)
