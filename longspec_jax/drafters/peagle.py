"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that proposes all levels of a tree in one forward.

The first layer is EAGLE-3's (:mod:`longspec_jax.drafters.eagle3`), plain layers follow. A round
runs them over a block: the slot of the pending token, which is EAGLE-3's root, and mask slots
after it. A mask slot has the embedding of a mask token and a learnt feature, since neither its
token nor the target's feature is known. Slots see all entries and the slots before them, and slot
``j`` proposes the token after its own. Slots do not know of each other's tokens, so beam search by
the sums of their log-probabilities is the tree of the best paths, as in
:mod:`longspec_jax.drafters.dflash`.

What mask slots compute is not kept: accepted tokens run again with the features that their
verification computed. Entry ``i`` is made of the target's feature of token ``i`` and of token
``i + 1``, as EAGLE-3's. In the first layer that is all; entries of later layers depend on what the
layers below attended to. So committed tokens pass through the layers, and a window of ``W`` entries
in each of ``L`` layers reaches ``L W`` tokens back: a prompt's last ``L W`` entries make the window
exact. Sinks would be turned to stand before the window, which keys of later layers do not survive.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.checks import Whole, whole_number
from longspec_jax.config.tree import MAX_TREE_LEVELS, PLAIN, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.dflash import block_trees
from longspec_jax.drafters.draft import DefaultTrees
from longspec_jax.drafters.eagle3 import (
    Eagle3Config,
    Eagle3Draft,
    Eagle3Layer,
    Eagle3Options,
    Eagle3Params,
)
from longspec_jax.drafters.tree import Tree, beam_search, root_tree
from longspec_jax.drafters.window import SLOTS, DraftWindow, Entries, Rows
from longspec_jax.models.layers import applied, parameter
from longspec_jax.models.target import Attend, Layer
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import last_along

USUAL_DEPTHS = 8
"""Levels of the deepest default tree where a file does not say how many were trained."""


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """EAGLE-3's layer, plain ones after it, and what stands in mask slots."""

    num_layers: Annotated[int, Whole()] = 1
    """All of them."""
    mask_token: int = 0
    """What stands in mask slots."""
    depths: Annotated[int | None, Whole()] = None
    """Tokens that a block proposed in training; None if the file does not say."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("mask_token_id", self.mask_token, 0, self.vocab_size - 1)


class PEagleLayers(Eagle3Layer):
    """The draft as pure functions of features and embeddings; attention is the caller's."""

    # Narrower than the base's, as fields of flax modules are not known to be frozen.
    config: PEagleConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        """Declare the submodules."""
        super().setup()
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        fused = 1, 1, len(c.features) * c.target_width
        self.mask_hidden = parameter(self, "mask_hidden", nn.initializers.zeros, fused, dtype)
        self.layers = [Layer(c.plain_layer, self.mlp_chunk) for _ in range(c.num_layers - 1)]

    def mask_feature(self, rows: int) -> Array:
        """The feature of mask slots, ``[B, 1, D]``."""
        stored = jnp.broadcast_to(self.mask_hidden, (rows, *self.mask_hidden.shape[1:]))
        return self.fused(jnp.split(stored, len(self.config.features), axis=-1))

    def run(self, embedded: Array, feature: Array, positions: Array, attend: Attend) -> Array:
        """Run all layers over ``T`` tokens; returns what the LM head reads, ``[B, T, D]``.

        Args:
          embedded: their embeddings ``[B, T, D]``.
          feature: of the token before each, ``[B, T, D]``.
          positions: of the token before each, ``[B, T]``.
          attend: ``(layer, q, k, v) -> out`` over what each token sees.
        """
        x, delta = self.stream(embedded, feature, positions, partial(attend, 0))
        angles = self.config.angles(positions)
        for index, layer in enumerate(self.layers, 1):
            x, delta, _, _ = layer(x, delta, angles, partial(attend, index))
        [hidden] = with_sharding("b t d", self.final_norm.add(x, delta)[1])
        return hidden


@struct.dataclass
class PEagleParams(Eagle3Params):
    """The draft's layers and its tables, some of which may be the target's."""

    module = PEagleLayers

    def mask_feature(self, config: PEagleConfig, rows: int) -> Array:
        """See :meth:`PEagleLayers.mask_feature`."""
        return applied(PEagleLayers.mask_feature, PEagleLayers(config), self.layer, rows)

    def run(
        self,
        config: PEagleConfig,
        tokens: Array,
        feature: Array,
        positions: Array,
        attend: Attend,
    ) -> Array:
        """The layers over tokens ``[B, T]``; arguments as in :meth:`PEagleLayers.run`."""
        module, embedded = PEagleLayers(config), self.embedded(tokens)
        return applied(PEagleLayers.run, module, self.layer, embedded, feature, positions, attend)


@struct.dataclass
class PEagleState:
    """What a row keeps of its committed tokens."""

    layers: tuple[Entries, ...]
    """One for each token but the last, in every layer."""
    feature: Leaf[Float[Array, "B D"]]
    """Fused, of the last committed token."""


@dataclass(frozen=True)
class PEagleDrafter(Drafter):
    """Proposes trees by beam search over the cumulative log-probability of a block's slots."""

    config: PEagleConfig
    tree: TreeConfig = PLAIN
    attention: str | None = None
    """Implementation of attention, and of the choice among a level's continuations; chosen
    automatically if absent."""
    window: int | None = None
    """Entries before its own that a token sees in every layer; all if absent."""
    name: str = field(default="peagle", init=False)

    def __post_init__(self) -> None:
        depths = self.config.depths
        if depths is not None and self.tree.num_levels > depths:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels is deeper than the block of this draft, "
                f"which proposes {depths} tokens; use fewer levels"
            )

    @cached_property
    def needs(self) -> Needs:
        """The hidden states that it fuses, of the tokens that the window reaches."""
        hidden = tuple(sorted({*self.config.features}))
        # As EAGLE-3's entries, these have the token after that of their feature.
        reach = None if self.window is None else self.config.num_layers * self.window + 1
        return Needs(hidden, recent=reach)

    @property
    def _ring(self) -> DraftWindow:
        """The entries that are kept: whole steps of the kernels, where there is a window."""
        return DraftWindow(None if self.window is None else -(-self.window // SLOTS) * SLOTS, 0)

    def begin(self, params: Params, batch: int, capacity: int) -> PEagleState:
        """No entry yet."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        sizes = batch, capacity, c.num_kv_heads, c.head_width, dtype
        layers = tuple(self._ring.begin(*sizes) for _ in range(c.num_layers))
        return PEagleState(layers, jnp.zeros((batch, c.model_width), dtype))

    def extend(self, params: Params, state: PEagleState, committed: Committed) -> PEagleState:
        """Run the tokens that complete entries, and keep the feature of the last one."""
        tokens, start, count, features = committed
        draft: PEagleParams = params.draft
        fused = draft.fused(self.config, [features.hidden[layer] for layer in self.config.features])
        before = jnp.concatenate([state.feature[:, None], fused[:, :-1]], axis=1)
        # The first token of a text follows none: the first entry is the second token's.
        first = start == 0
        before = jnp.where(first[:, None, None], fused, before)
        tokens = jnp.where(first[:, None], jnp.roll(tokens, -1, axis=1), tokens)
        joined = jnp.maximum(count - first, 0)
        entry = jnp.where(joined > 0, jnp.maximum(start - 1, 0), 0)
        _, fresh = self._run(draft, state, tokens, before, entry)
        # No layer is written before all are read, or the compiler copies whole caches.
        joined = jnp.where(jnp.isfinite(fresh[-1][0][:, 0, 0, 0]), joined, 0)
        at = entry[:, None] + jnp.arange(tokens.shape[1])
        layers = tuple(
            self._ring.written(entries, rows, at, joined)
            for entries, rows in zip(state.layers, fresh, strict=True)
        )
        last = jnp.where((count > 0)[:, None], last_along(fused, count), state.feature)
        return PEagleState(layers, last)

    def propose(self, params: Params, state: PEagleState, view: View, noise: SamplingNoise) -> Tree:
        """Run the block, and grow the tree over its slots."""
        levels, batch = self.tree.num_levels, len(view.pending)
        if not levels:
            return root_tree(view.pending, self.tree)
        draft: PEagleParams = params.draft
        if draft.vocabulary is not None:
            noise = noise.among(draft.vocabulary)
        tokens = jnp.full((batch, levels), self.config.mask_token, jnp.int32)
        masks = draft.mask_feature(self.config, batch)
        shape = batch, levels - 1, masks.shape[2]
        feature = jnp.concatenate([state.feature[:, None], jnp.broadcast_to(masks, shape)], axis=1)
        entry = jnp.where(view.done, 0, jnp.maximum(view.position - 1, 0))
        hidden, _ = self._run(draft, state, tokens.at[:, 0].set(view.pending), feature, entry)
        logits = draft.logits(hidden)

        def score(
            memory: tuple[()], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[()], Array]:
            scores = noise.scores(logits[:, depth : depth + 1], depth)
            shape = batch, nodes.stop - nodes.start, scores.shape[2]
            return memory, jnp.broadcast_to(scores, shape)

        return beam_search(
            view.pending, self.tree, score, (), draft.vocabulary, implementation=self.attention
        )

    def _run(
        self, draft: PEagleParams, state: PEagleState, tokens: Array, feature: Array, entry: Lengths
    ) -> tuple[Array, tuple[Rows, ...]]:
        """What the LM head reads of tokens that make entries from ``entry[b]`` on, and these."""
        positions = entry[:, None] + jnp.arange(tokens.shape[1])
        window = None if self.window is None else self.window + 1  # The own one is one of them.
        rows: list[Rows] = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            rows.append((k, v))
            prefix = state.layers[layer].cache.layer(0, entry).within(window, positions)
            fresh = Fresh(k, v)
            if tokens.shape[1] <= MAX_TREE_LEVELS + 1:
                # Kernels split the past of a few queries, not that of a chunk.
                fresh = Fresh(k, v, fresh.seen(prefix))
            return speculative_attention(
                q,
                prefix,
                fresh,
                scale=self.config.attention_scale,
                implementation=self.attention,
            )

        return draft.run(self.config, tokens, feature, positions, attend), tuple(rows)


@dataclass(frozen=True)
class PEagleOptions(Eagle3Options):
    """Options of a P-EAGLE draft; none changes a token."""

    sinks: int | None = 0

    def __post_init__(self) -> None:
        if self.sinks:
            raise ValueError(
                f"sinks={self.sinks} would be turned to stand before the window, for which the "
                "keys of a P-EAGLE draft's later layers were not computed; leave sinks out"
            )
        if self.working is not None:
            raise ValueError(
                f"working={self.working}: a P-EAGLE draft reads the last tokens or all of them; "
                "use window=N"
            )
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class PEagleDraft(Eagle3Draft):
    """Layers over features and mask slots, the tables they share, and what they see of a text."""

    config: PEagleConfig
    params: PEagleParams = field(repr=False)
    name: str = field(default="peagle", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """As deep as the block."""
        return block_trees(self.config.depths or USUAL_DEPTHS)

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> PEagleDrafter:
        """The drafter that grows this tree; raises ValueError if it is deeper than the block."""
        return PEagleDrafter(self.config, tree, attention, self.seen.window)
