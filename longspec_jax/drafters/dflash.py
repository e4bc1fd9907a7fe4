"""DFlash and its kin: one forward over a block of mask tokens, a tree of its slots' best tokens.

Hidden states of several layers of the target are fused to one feature a token (arXiv:2602.06036).
Every layer makes keys and values of it with the weights that serve the block's own tokens, so the
committed tokens are context for all layers without passing through any. Their entries depend only
on (feature, position): entry ``i`` of every layer's cache is made of the feature of token ``i``.

A round runs the block once, whatever the tree: the pending token and mask tokens after it, which
see the entries and each other, or in a causal block the earlier ones of each other (JetSpec, arXiv
2606.18394). A level of the tree takes the logits of one slot. Slots do not know of each other's
tokens, so without a Markov head the continuations of all nodes of a level are the same, and beam
search by their sums is the tree of the best paths (DDTree, arXiv:2604.12989). A Markov head
(DSpark) corrects the logits after every node by its token. A confidence head says how likely a
slot is correct after a node: paths through it are worth less by that, so that a budget or a
threshold stops where the slots become guesses. What DFlash 2 has beyond that is in
:mod:`longspec_jax.drafters.dflash2`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.checks import whole_number
from longspec_jax.config.layers import YarnRopeScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.dflash2 import Convolution, ConvolvedLayer, Selector, edge_scores
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.tables import (
    BlockParams,
    FeatureOptions,
    check_fits,
    check_proposable,
)
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run, root_tree
from longspec_jax.drafters.window import DraftWindow, Entries, Rows
from longspec_jax.models.layers import Projection, RMSNorm, applied, rotary_angles
from longspec_jax.models.target import HEADS, Attend, Layer, stored_logits
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.layer import split_heads
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import along


@dataclass(frozen=True)
class Markov:
    """A head that corrects a slot's logits by the token before it (DSpark)."""

    rank: int
    gated: bool = False
    """Whether a gate of the slot's hidden state precedes the correction."""
    recurrent: bool = False
    """Whether a state runs along the tokens of the block."""

    def __post_init__(self) -> None:
        whole_number("markov_rank", self.rank)
        if self.gated and self.recurrent:
            raise ValueError("a Markov head is either gated or recurrent")

    def joint_shape(self, model_width: int) -> tuple[int, int]:
        """Inputs and outputs of the projection of a gated or a recurrent head."""
        if self.recurrent:
            return 2 * self.rank + model_width, 3 * self.rank
        return model_width + self.rank, self.rank


@dataclass(frozen=True)
class Confidence:
    """A head that predicts how likely a slot's token is accepted (DSpark)."""

    with_markov: bool
    """Whether it reads the Markov head's embedding of the token before as well."""


@dataclass(frozen=True)
class DFlashConfig:
    """Layers over a block: the pending token and mask tokens after it."""

    trunk: TargetConfig
    """Its layers, which are those of Qwen3."""
    target_width: int
    """Width of the target's hidden states."""
    target_layers: int
    """Layers of the target."""
    proposable: int
    """Tokens that the draft's LM head knows."""
    features: tuple[int, ...]
    """Layers of the target after which the draft takes the hidden states; -1 is the embedding."""
    block: int
    """Slots of a block, the pending token's included."""
    mask_token: int
    """What stands in the other slots."""
    from_pending: bool = False
    """Whether the pending token's slot proposes too: every slot proposes the token after its own.
    Else every other slot proposes its own token."""
    windows: tuple[int | None, ...] = ()
    """Committed tokens that each layer sees, the last ones; all where None. One for each layer."""
    causal: tuple[bool, ...] = ()
    """Whether a slot sees none of the later ones, for each layer: in all of them (JetSpec), in all
    that have a window, or in none."""
    markov: Markov | None = None
    confidence: Confidence | None = None
    convolution: Convolution | None = None
    """Of DFlash 2, which has a selector too."""
    selector: Selector | None = None

    def __post_init__(self) -> None:
        layers = self.trunk.num_layers
        object.__setattr__(self, "windows", self.windows or (None,) * layers)
        object.__setattr__(self, "causal", self.causal or (False,) * layers)
        if (len(self.windows), len(self.causal)) != (layers, layers):
            raise ValueError(
                f"windows={self.windows} and causal={self.causal} must name each of the {layers} "
                "layers"
            )
        slides = tuple(window is not None for window in self.windows)
        if self.causal not in ((True,) * layers, (False,) * layers, slides):
            raise ValueError(
                f"causal={self.causal} must be true of all layers, of those with a window in "
                f"windows={self.windows}, or of none: no file says more"
            )
        for name in ("target_width", "target_layers", "proposable"):
            whole_number(name, getattr(self, name))
        whole_number("block_size", self.block, 1 if self.from_pending else 2)
        whole_number("mask_token_id", self.mask_token, 0, self.vocab_size - 1)
        for window in filter(None, self.windows):
            whole_number("sliding_window", window)
        check_proposable(self)
        self._check_dflash2(self.convolution, self.selector)
        if self.confidence and self.confidence.with_markov and not self.markov:
            raise ValueError(
                "confidence_head_with_markov reads a Markov head, and markov_rank is 0: use the "
                "config.json that was saved with the weights"
            )

    def _check_dflash2(self, conv: Convolution | None, selector: Selector | None) -> None:
        """Refuse half of DFlash 2, and sizes that do not fit together."""
        if conv is None or selector is None:
            if conv or selector:
                raise ValueError("drafts of DFlash 2 have both convolutions and a selector")
            return
        if self.markov or self.confidence or self.proposable != self.vocab_size:
            raise ValueError(
                "a selector is not used with a Markov head, a confidence head or a "
                "draft_vocab_size below vocab_size; load another draft"
            )
        if conv.taps > self.block or self.model_width % conv.group:
            raise ValueError(
                f"conv_kernel_size={conv.taps} must be at most block_size={self.block}, and "
                f"conv_group_size={conv.group} a divisor of hidden_size={self.model_width}"
            )
        whole_number("selector_top_k", selector.candidates, 1, self.vocab_size)

    @property
    def model_width(self) -> int:
        """Width of the draft."""
        return self.trunk.model_width

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return self.trunk.vocab_size

    @property
    def first_slot(self) -> int:
        """The slot that proposes the token after the pending one."""
        return 0 if self.from_pending else 1

    @property
    def tokens(self) -> int:
        """Tokens that a block proposes, one after the other."""
        return self.block - self.first_slot

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        reads_markov = self.confidence and self.confidence.with_markov
        return self.model_width + (self.markov.rank if self.markov and reads_markov else 0)

    def stretched(self, factor: float) -> "DFlashConfig":
        """The same draft with YaRN over its trained range."""
        trained = self.trunk.max_positions
        trunk = dataclasses.replace(
            self.trunk,
            rope_scaling=YarnRopeScaling.usual(factor, trained),
            max_positions=int(factor * trained),
        )
        return dataclasses.replace(self, trunk=trunk)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's features and tokens."""
        check_fits(self, target)
        if self.target_layers != target.num_layers:
            raise ValueError(
                f"the draft was made for a target of num_target_layers={self.target_layers}, the "
                f"target has {target.num_layers} layers; load the draft that belongs to this target"
            )


class DFlashLayers(nn.Module):
    """The draft as pure functions of features and embeddings; attention is the caller's."""

    config: DFlashConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0 for all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config.trunk, jnp.dtype(self.config.trunk.dtype)
        fused = len(self.config.features) * self.config.target_width
        self.fuse = Projection((fused,), (c.model_width,), dtype)
        self.hidden_norm = RMSNorm(c.norm_eps, dtype)
        if (convolution := self.config.convolution) is None:
            self.layers = [Layer(c, self.mlp_chunk) for _ in range(c.num_layers)]
        else:
            self.layers = [
                ConvolvedLayer(c, self.mlp_chunk, convolution=convolution)
                for _ in range(c.num_layers)
            ]
        self.final_norm = RMSNorm(c.norm_eps, dtype)

    def keys_values(self, hidden: Sequence[Array], positions: Array) -> tuple[Rows, ...]:
        """Keys and values ``[B, n, K, H]`` of committed tokens, for every layer.

        Args:
          hidden: the target's states at ``config.features``, ``[B, n, target_width]`` each.
          positions: of the tokens, ``[B, n]``.
        """
        c, angles = self.config.trunk, self._angles(positions)
        [fused] = with_sharding("b t d", self.fuse(jnp.concatenate(hidden, axis=-1)))
        feature = self.hidden_norm(fused)
        rows = []
        for layer in self.layers:
            attention, scales = layer.attention, None
            if c.qk_norm:
                norms = attention.q_norm, attention.k_norm
                scales = norms[0].weights(c.head_width), norms[1].weights(c.head_width)
            heads = split_heads(attention.qkv(feature), *angles, scales, c.norm_eps)
            _, k, v = with_sharding(HEADS, *heads)
            rows.append((k, v))
        return tuple(rows)

    def __call__(self, embedded: Array, positions: Array, attend: Attend) -> Array:
        """Run the layers over a block; returns what the LM head reads, ``[B, T, D]``.

        Args:
          embedded: embeddings of the block's tokens ``[B, T, D]``.
          positions: theirs, ``[B, T]``.
          attend: ``(layer, q, k, v) -> out`` over what the slots see.
        """
        x, delta, angles = embedded, None, self._angles(positions)
        for index, layer in enumerate(self.layers):
            x, delta, _, _ = layer(x, delta, angles, lambda q, k, v, i=index: attend(i, q, k, v))
        [hidden] = with_sharding("b t d", self.final_norm.add(x, delta)[1])
        return hidden

    def _angles(self, positions: Array) -> tuple[Array, Array]:
        c = self.config.trunk
        return rotary_angles(positions, c.head_width, c.rotary)


@struct.dataclass
class DFlashParams(BlockParams):
    """The draft's layers, its heads, and its tables, some of which may be the target's."""

    confidence: PyTree = None
    """``kernel [1, C]`` and ``bias [1]`` of the confidence head; None without one."""
    selector: Mapping[str, Any] | None = None
    """See :func:`~longspec_jax.drafters.dflash2.edge_scores`; None without one."""

    @property
    def own_params(self) -> Any:
        """The parameters that are not shared with the target."""
        return *super().own_params, self.confidence, self.selector

    def keys_values(
        self, config: DFlashConfig, hidden: Sequence[Array], positions: Array
    ) -> tuple[Rows, ...]:
        """See :meth:`DFlashLayers.keys_values`."""
        return applied(
            DFlashLayers.keys_values, DFlashLayers(config), self.layer, hidden, positions
        )

    def block(self, config: DFlashConfig, tokens: Array, positions: Array, attend: Attend) -> Array:
        """The layers over tokens ``[B, T]``; arguments as in :class:`DFlashLayers`."""
        module, embedded = DFlashLayers(config), self.embedded(tokens)
        return applied(DFlashLayers.__call__, module, self.layer, embedded, positions, attend)

    def trust(self, config: DFlashConfig, tokens: Array, hidden: Array) -> Array:
        """How likely the target accepts a slot's token, a logarithm ``[B, w]`` (DSpark, 3.3).

        Args:
          config: of the draft, which has a confidence head.
          tokens: those before the slot, ``[B, w]``.
          hidden: the slot's, ``[B, 1, D]``.
        """
        parts = [jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))]
        if config.confidence is not None and config.confidence.with_markov:
            parts.append(look_up(self.markov["embedding"], tokens))
        joint = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
        kernel, bias = (self.confidence[name].astype(jnp.float32) for name in ("kernel", "bias"))
        return jax.nn.log_sigmoid((joint * kernel).sum(axis=-1) + bias)


def markov_step(
    params: PyTree, config: Markov, tokens: Array, hidden: Array, state: Array
) -> tuple[Array, Array]:
    """What a Markov head adds to a slot's logits after each of some tokens (DSpark, section 3.2).

    Args:
      params: :attr:`DFlashParams.markov`.
      config: of the head.
      tokens: those before the slot, ``[B, w]``.
      hidden: the slot's, ``[B, 1, D]``.
      state: what the recurrent head knows of the tokens before these, ``[B, w, r]``.

    Returns:
      What is added, ``[B, w, v]`` in float32, and the state after the tokens.
    """
    before = look_up(params["embedding"], tokens)
    latent = before
    if config.gated or config.recurrent:
        slot = jnp.broadcast_to(hidden, (*tokens.shape, hidden.shape[-1]))
        parts = (state, before, slot) if config.recurrent else (slot, before)
        joint = params["fuse"]
        mixed = jnp.concatenate(parts, axis=-1) @ joint["kernel"] + joint["bias"]
        if config.gated:
            latent = jax.nn.sigmoid(mixed) * before
        else:
            gate, candidate, output = jnp.split(mixed, 3, axis=-1)
            gate, latent = jax.nn.sigmoid(gate), jnp.tanh(output)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
    return stored_logits(params["head"], latent), state


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
    """Entries of committed tokens that it sees besides the sinks, the last ones; all if absent.
    Layers with a shorter window of their own see that."""
    sinks: int = 0
    """First entries that it sees as well, where there is a window."""
    name: str = field(default="dflash", init=False)

    def __post_init__(self) -> None:
        DraftWindow(self.window, self.sinks).checked()
        if self.tree.num_levels > self.config.tokens:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels is deeper than the block of this draft, "
                f"which proposes {self.config.tokens} tokens; use fewer levels"
            )

    @property
    def seen(self) -> tuple[DraftWindow, ...]:
        """Which entries each layer sees."""
        both = DraftWindow(self.window, self.sinks)
        own = self.config.windows
        return tuple(
            both if each is None or (both.window or each) < each else DraftWindow(each, 0)
            for each in own
        )

    @cached_property
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
            return root_tree(view.pending, self.tree)
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
            if self.config.selector is not None and draft.selector is not None:
                count, own = self.config.selector.candidates, hidden[:, depth : depth + 1]
                edges = edge_scores(draft.selector, count, slot, tokens, own, self.attention)
                return states, noise.scores(edges, depth)
            if markov is None:
                scores = noise.scores(slot, depth)
                return states, jnp.broadcast_to(scores, (*tokens.shape, scores.shape[2]))
            # The root has no parent: its state is still zero.
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
            view.pending,
            self.tree,
            score,
            states,
            draft.vocabulary,
            self.attention,
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


DEEPEST = 16
"""Levels of the deepest default tree; longer blocks are hardly ever accepted whole."""


def block_trees(tokens: int, *, wide: bool = False) -> DefaultTrees:
    """Trees as deep as a block, as levels are nearly free; narrow where nodes cost time.

    Args:
      tokens: that the block proposes, one after the other.
      wide: whether a tree of 128 nodes is tried too. JetSpec gains up to there and beyond.
    """
    levels = min(tokens, DEEPEST)

    def tree(width: int, depth: int, budget: int | None = None) -> TreeConfig:
        return TreeConfig((width,) * min(depth, levels), budget)

    whole, half, chain = tree(8, levels, 64), tree(4, levels, 32), tree(1, levels)
    return DefaultTrees(
        (tree(1, 4), tree(1, 2), tree(2, 2)),
        (chain, half, whole),
        (whole, *(tree(16, 15, 128),) * wide, half, chain),
        settled=False,
        together=(whole, half, tree(4, 6, 12)),
    )


@dataclass(frozen=True)
class DFlashOptions(FeatureOptions):
    """Options of a DFlash or DSpark draft; none changes a token."""


@dataclass(frozen=True, eq=False)
class DFlashDraft(Draft):
    """Layers over a block, the tables they share with their target, and what they see of a text."""

    config: DFlashConfig
    params: DFlashParams = field(repr=False)
    seen: DraftWindow = DraftWindow(None, 0)
    name: str = field(default="dflash", init=False)

    @classmethod
    def bind(
        cls,
        config: DFlashConfig,
        params: DFlashParams,
        target: TargetConfig,
        options: DFlashOptions,
        *,
        int8: bool = False,
        mesh: Mesh | None = None,
    ) -> "DFlashDraft":
        """A draft with its options applied; arguments as of ``Eagle3Draft.bind``."""
        if options.yarn is not None:
            config = config.stretched(options.yarn)
        if int8:
            params = params.in_int8(mesh)
        seen = options.seen(config.trunk.max_positions, target, config.block)
        return cls(config, params, seen)

    @property
    def default_trees(self) -> DefaultTrees:
        """Trees as deep as the block, and wide ones for JetSpec, whose slots are surer."""
        return block_trees(self.config.tokens, wide=all(self.config.causal))

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> DFlashDrafter:
        """The drafter that grows this tree; raises ValueError if it is deeper than a block."""
        return DFlashDrafter(self.config, tree, attention, *self.seen)
