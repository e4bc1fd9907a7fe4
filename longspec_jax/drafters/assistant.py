"""Gemma 4's assistant: thin layers that read the target's keys and values, and have none.

A step takes the newest token's embedding, which is the target's, next to a state, and projects both
to the assistant's width. Its layers are Gemma 4's with only queries: they attend to what the
target has cached in its last layer with a window, and in its last one without, that have keys of
their own. All steps of a round stand where the pending token does. The state is at first what left
the target's final norm for the last committed token, and then what the assistant projects back to
the target's width. So a node of a tree has one vector, and the draft keeps nothing else of a text.

Where a file has centroids, each step scores only the tokens of the best clusters.

Source: transformers' ``gemma4_assistant``.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array, Leaf
from longspec_jax.config.layers import LayerConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.tables import check_sizes
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.models.layers import Projection, RMSNorm, applied, rotary_angles
from longspec_jax.models.target import Attend, Layer, scaled, stored_logits
from longspec_jax.ops.attention.dispatch import prefix_attention
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.slicing import along, last_along

_UNLIKELY = -1e9
"""The logit of tokens outside the chosen clusters."""


@dataclass(frozen=True)
class AssistantConfig:
    """Shape of an assistant."""

    own: TargetConfig
    """Its layers, as those of a target whose layers all have keys; and the vocabulary."""
    target_width: int
    """Width of the target's hidden states."""
    target_layers: int
    """Of the target; what leaves its final norm is counted so."""
    sources: tuple[int, ...]
    """The layer of the target whose keys and values each layer reads."""
    centroids: int = 0
    """Clusters of tokens; 0 if all tokens are scored."""
    chosen: int = 0
    """How many clusters are scored in a step."""

    @property
    def kinds(self) -> tuple[LayerConfig, ...]:
        """Its layers, which have only queries."""
        return tuple(
            replace(kind, keys_of=source, keys_are_values=False)
            for kind, source in zip(self.own.layers, self.sources, strict=True)
        )

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless it can read the target's keys, values and hidden states."""
        check_sizes(self.target_width, self.own.vocab_size, target)
        if target.kv_dtype is not None:
            raise ValueError(
                f"Gemma 4's assistant reads keys and values as they are computed, and the target "
                f"caches them in {target.kv_dtype}; leave kv_dtype out"
            )
        for index, source in enumerate(self.sources):
            ours, theirs = self.own.layer(index), target.layer(source)
            mine = self.own.heads(ours), ours.rotary, ours.window
            if mine != (target.heads(theirs), theirs.rotary, theirs.window):
                raise ValueError(
                    f"layer {index} of the assistant and layer {source} of the target, which it "
                    "reads, differ in heads, rotation or window; load the assistant of this target"
                )


def sources_of(own: TargetConfig, target: TargetConfig) -> tuple[int, ...]:
    """The layer of the target that each layer of an assistant reads.

    Raises:
      ValueError: if the target has no such layer.
    """
    last: dict[bool, int] = {}
    for index, kind in enumerate(target.layers):
        if kind.keys_of is None and kind.recurrence is None:
            last[kind.window is not None] = index
    if missing := [kind for kind in own.layers if (kind.window is not None) not in last]:
        what = "a window" if missing[0].window is not None else "the whole context"
        raise ValueError(f"the target has no layer with {what}, which the assistant reads")
    return tuple(last[kind.window is not None] for kind in own.layers)


class Assistant(nn.Module):
    """The assistant as a pure function of embeddings and states; attention is the caller's."""

    config: AssistantConfig

    def setup(self) -> None:
        """Declare the submodules."""
        c, own = self.config, self.config.own
        dtype, width = jnp.dtype(own.dtype), own.model_width
        self.fuse = Projection((2 * c.target_width,), (width,), dtype)
        self.layers = [Layer(own, kind=kind) for kind in c.kinds]
        self.norm = RMSNorm(own.norm_eps, dtype, own.offset_norms)
        self.feedback = Projection((width,), (c.target_width,), dtype)
        if c.centroids:
            self.centroids = Projection((width,), (c.centroids,), dtype)

    def __call__(
        self, embedded: Array, state: Array, positions: Array, attend: Attend
    ) -> tuple[Array, Array, Array | None]:
        """Run ``T`` nodes.

        Args:
          embedded: the target's embeddings ``[B, T, D]`` of their tokens.
          state: ``[B, T, D]`` before them.
          positions: ``[B, T]``.
          attend: as in :class:`~longspec_jax.models.target.Target`, by the layer here.

        Returns:
          What the LM head reads ``[B, T, d]``, the states after the nodes ``[B, T, D]``, and how
          well each cluster fits, ``[B, T, C]``, if there are any.
        """
        c, delta = self.config, None
        x = self.fuse(jnp.concatenate([embedded, state], axis=-1))
        for index, (layer, kind) in enumerate(zip(self.layers, c.kinds, strict=True)):
            angles = rotary_angles(positions, c.own.heads(kind).head_width, kind.rotary)
            x, delta, _, _ = layer(x, delta, angles, partial(attend, index))
        hidden = self.norm.add(x, delta)[1]
        return hidden, self.feedback(hidden), self.centroids(hidden) if c.centroids else None


@struct.dataclass
class AssistantParams:
    """Its layers and its LM head, next to the target's embedding, which is wider."""

    layer: PyTree
    """Parameters of :class:`Assistant`."""
    embedding: Leaf[Float[Array, "V D"]]
    """The target's."""
    head: Leaf[Float[Array, "V d"]]
    clusters: Leaf[Int[Array, " V"]] | None = None
    """The cluster of each token, where there are any."""
    embedding_factor: float = struct.field(pytree_node=False, default=1.0)
    """On embeddings, as in the target."""

    @property
    def own_params(self) -> Any:
        """The parameters that are not shared with the target."""
        return self.layer, self.head, self.clusters

    def step(
        self, config: AssistantConfig, tokens: Array, state: Array, positions: Array, attend: Attend
    ) -> tuple[Float[Array, "B T V"], Array]:
        """Logits of the tokens after nodes, and the states after these; as in the module."""
        embedded = scaled(look_up(self.embedding, tokens), self.embedding_factor)
        given = embedded, state, positions, attend
        module = Assistant(config)
        hidden, after, fits = applied(Assistant.__call__, module, self.layer, *given)
        logits = stored_logits(self.head, hidden)
        if fits is not None and self.clusters is not None:
            _, best = jax.lax.top_k(fits, config.chosen)
            chosen = jax.nn.one_hot(best, config.centroids, dtype=bool).any(axis=-2)
            logits = jnp.where(jnp.take(chosen, self.clusters, axis=2), logits, _UNLIKELY)
        return logits, after


@dataclass(frozen=True)
class AssistantDrafter(Drafter):
    """Proposes trees by beam search over the draft's cumulative log-probability."""

    config: AssistantConfig
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Implementation of attention, and of the choice among a level's continuations; chosen
    automatically if absent."""
    name: str = field(default="assistant", init=False)

    @cached_property
    def needs(self) -> Needs:
        """What left the target's final norm for the last token."""
        return Needs(hidden=(self.config.target_layers,), recent=1)

    def begin(self, params: Params, batch: int, capacity: int) -> Array:
        """The state, ``[B, D]``."""
        return jnp.zeros((batch, self.config.target_width), jnp.dtype(self.config.own.dtype))

    def extend(self, params: Params, state: Array, committed: Committed) -> Array:
        """The state of the last token that joined."""
        hidden = committed.features.hidden[self.config.target_layers]
        last = last_along(hidden, committed.count).astype(state.dtype)
        return jnp.where((committed.count > 0)[:, None], last, state)

    def propose(self, params: Params, state: Array, view: View, noise: SamplingNoise) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        draft: AssistantParams = params.draft
        own, sources = self.config.own, self.config.sources
        shape = len(state), nodes_run(self.tree), self.config.target_width

        def score(
            states: Array, tree: Tree, nodes: slice, depth: int
        ) -> tuple[Array, Float[Array, "B w V"]]:
            tokens = tree.tokens[:, nodes]
            positions = jnp.broadcast_to(view.position[:, None], tokens.shape)

            def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
                past = view.cache.layer(sources[layer], view.length)
                past = past.within(own.layer(layer).window, positions)
                return prefix_attention(
                    q,
                    past,
                    scale=own.attention_scale,
                    cap=own.attention_cap,
                    dtype=q.dtype,
                    implementation=self.attention,
                ).out

            before = state[:, None]
            if depth:
                before = along(jnp.maximum(tree.parents[:, nodes], 0), states)
            logits, after = draft.step(self.config, tokens, before, positions, attend)
            states = jax.lax.dynamic_update_slice_in_dim(states, after, nodes.start, axis=1)
            return states, noise.scores(logits, depth)

        states = jnp.zeros(shape, state.dtype)
        return beam_search(view.pending, self.tree, score, states, implementation=self.attention)


@dataclass(frozen=True)
class AssistantOptions:
    """An assistant has no options."""


@dataclass(frozen=True, eq=False)
class AssistantDraft(Draft):
    """An assistant and its target's embedding."""

    config: AssistantConfig
    params: AssistantParams = field(repr=False)
    name: str = field(default="assistant", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Small ones: levels run one after another, and it was trained for a few."""
        few, tree, chain = TreeConfig((3, 3, 3), 8), TreeConfig((4,) * 5, 16), TreeConfig((1,) * 3)
        small = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((2, 2))
        trees = (few, tree, chain), (tree, few, chain)
        return DefaultTrees(small, *trees, settled=False, together=(few, chain))

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> AssistantDrafter:
        """The drafter that grows this tree."""
        return AssistantDrafter(self.config, tree, attention)
