"""The DFlash drafter: one forward over a block, and a tree of the best tokens of its slots.

Entry ``i`` of every layer's cache is made of the target's feature of token ``i``. A round runs the
block once, whatever the tree: the pending token and mask tokens behind it, which see each other and
the entries. A level of the tree takes the logits of one slot. Slots do not know of each other's
tokens, so without a Markov head the continuations of all nodes of a level are the same, and beam
search by their sums is the tree of the best paths (DDTree, arXiv:2604.12989). A Markov head
corrects the logits behind every node by its token. A confidence head says how likely a slot is
right behind a node: paths through it are worth less by that, so that a budget or a threshold stops
where the slots become guesses.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array
from longspec_jax.config.layers import YarnRopeScaling
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.dflash.config import DFlashConfig
from longspec_jax.drafters.dflash.model import DFlashParams, markov_step
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run, plant
from longspec_jax.drafters.window import Entries, Seen
from longspec_jax.models.layers import rotary_angles
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh
from longspec_jax.ops.slicing import along


@struct.dataclass
class DFlashState:
    """What a row keeps of its committed tokens: an entry of each, for every layer."""

    layers: tuple[Entries, ...]


@dataclass(frozen=True)
class DFlashDrafter(Drafter):
    """Proposes trees by beam search over the cumulative log-probability of a block's slots."""

    config: DFlashConfig
    tree: TreeConfig = PLAIN
    attention: str | None = None
    """Implementation of attention, and of the choice among a level's continuations; chosen
    automatically if absent."""
    window: int | None = None
    """Entries of committed tokens that it sees beside the sinks, the last ones; all if absent.
    Layers with a shorter window of their own see that."""
    sinks: int = 0
    """First entries that it sees as well, where there is a window."""
    name: str = field(default="dflash", init=False)

    def __post_init__(self) -> None:
        Seen(self.window, self.sinks).checked()
        if self.tree.num_levels > self.config.tokens:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels is deeper than the block of this draft, "
                f"which proposes {self.config.tokens} tokens; use fewer levels"
            )

    @property
    def seen(self) -> tuple[Seen, ...]:
        """Which entries each layer sees."""
        both = Seen(self.window, self.sinks)
        own = self.config.windows
        return tuple(
            both if each is None or (both.window or each) < each else Seen(each, 0) for each in own
        )

    @property
    def needs(self) -> Needs:
        """The hidden states that it fuses, of the tokens that its layers see."""
        windows = [seen.window for seen in self.seen if seen.window is not None]
        recent = max(windows) if len(windows) == len(self.seen) else None
        first = 0 if recent is None else max(seen.sinks for seen in self.seen)
        return Needs(tuple(sorted({*self.config.features})), recent=recent, first=first)

    def begin(self, params: Params, batch: int, capacity: int) -> DFlashState:
        """No entry yet."""
        c, dtype = self.config.trunk, jnp.dtype(self.config.trunk.dtype)
        sizes = batch, capacity, c.num_kv_heads, c.head_width, dtype
        return DFlashState(tuple(seen.begin(*sizes) for seen in self.seen))

    def extend(self, params: Params, state: DFlashState, committed: Committed) -> DFlashState:
        """Make entries of the tokens' features."""
        tokens, start, count, features = committed
        draft: DFlashParams = params.draft
        at = start[:, None] + jnp.arange(tokens.shape[1])
        hidden = [features.hidden[layer] for layer in self.config.features]
        fresh = draft.keys_values(self.config, hidden, at)
        layers = zip(self.seen, state.layers, fresh, strict=True)
        return DFlashState(
            tuple(seen.written(entries, rows, at, count) for seen, entries, rows in layers)
        )

    def propose(self, params: Params, state: DFlashState, view: View, noise: SamplingNoise) -> Tree:
        """Run the block, and grow the tree over its slots."""
        levels, first = self.tree.num_levels, self.config.first_slot
        if not levels:
            return plant(view.pending, self.tree)
        draft: DFlashParams = params.draft
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)
        hidden = self._block(draft, state, view)[:, first : first + levels]
        logits = draft.logits(hidden)
        markov, batch = self.config.markov, len(view.pending)
        rank = 0 if markov is None else markov.rank
        states = jnp.zeros((batch, nodes_run(self.tree), rank), hidden.dtype)

        def score(states: Array, tree: Tree, nodes: slice, depth: int) -> tuple[Array, Array]:
            slot, tokens = logits[:, depth : depth + 1], tree.tokens[:, nodes]
            if markov is None:
                scores = noise.scores(slot, depth)
                return states, jnp.broadcast_to(scores, (*tokens.shape, scores.shape[2]))
            # The root's parent is none: its state is still zero.
            state = along(jnp.maximum(tree.parents[:, nodes], 0), states)
            added, state = markov_step(
                draft.markov, markov, tokens, hidden[:, depth : depth + 1], state
            )
            states = jax.lax.dynamic_update_slice_in_dim(states, state, nodes.start, axis=1)
            return states, noise.scores(slot + added, depth)

        def trust(states: Array, tree: Tree, nodes: slice, depth: int) -> Array:
            tokens = tree.tokens[:, nodes]
            return draft.trust(self.config, tokens, hidden[:, depth : depth + 1])

        return beam_search(
            *(view.pending, self.tree, score, states, draft.vocabulary, self.attention),
            trust=None if self.config.confidence is None else trust,
        )

    def _block(self, draft: DFlashParams, state: DFlashState, view: View) -> Array:
        """What the LM head reads of every slot, ``[B, block, D]``."""
        c, slots, position = self.config, self.config.block, view.position
        tokens = jnp.full((len(position), slots), c.mask_token, jnp.int32)
        tokens = tokens.at[:, 0].set(view.pending)
        angles = partial(_turns, c)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            seen, entries = self.seen[layer], state.layers[layer]
            prefix = seen.past(entries, jnp.where(view.done, 0, position))
            sinks, there = seen.first(entries, position, angles)
            inside = jnp.tri(slots, dtype=bool) if c.causal[layer] else jnp.ones((slots,) * 2, bool)
            mask = jnp.concatenate(
                [
                    jnp.broadcast_to(there[:, None], (len(position), slots, seen.sinks)),
                    jnp.broadcast_to(inside, (len(position), slots, slots)),
                ],
                axis=2,
            )
            keys, values = (
                jnp.concatenate([one, other], axis=1)
                for one, other in zip(sinks, (k, v), strict=True)
            )
            fresh = Fresh(keys, values, mask)
            return speculative_attention(q, prefix, fresh, implementation=self.attention)

        return draft.block(c, tokens, position[:, None] + jnp.arange(slots), attend)


def _turns(config: DFlashConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines of rotations to add to others: without YaRN's factor, which keys have."""
    c, scaling = config.trunk, config.trunk.rope_scaling
    if isinstance(scaling, YarnRopeScaling):
        scaling = replace(scaling, attention_factor=1.0)
    return rotary_angles(positions, c.head_width, replace(c.rotary, scaling=scaling))
