"""The parallel LongSpec draft: one forward over a block of learnt slots proposes all tokens.

A block is the pending token and learnt vectors in the slots after it. Its layers are those of the
LongSpec draft (:class:`~longspec_jax.drafters.longspec.LongSpecLayer`): self-attention,
cross-attention to the target's last-layer keys and values, MLP. The slots see each other in every
layer. Only the first layer sees the tokens before the block, by self-attention keys and values of
their embeddings: these depend only on (token, position), so one ring of the last ``W`` tokens
serves any number of layers and no committed token passes through a layer. A final norm precedes the
target's LM head, because learnt vectors need not be of the size of embeddings.

Slot ``j`` stands at the position of the pending token plus ``j`` and proposes the token after it.
All slots together read the target's cache in place, so a long cache is read once a round, whatever
the depth of the tree. A level of the tree takes the logits of one slot, to which a Markov head of
low rank adds after every node what its token makes likely (DSpark, section 3.2).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from longspec_jax.axes import Array
from longspec_jax.checks import Whole
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.longspec import DraftConfig, LongSpecLayer, check_vocab_size
from longspec_jax.drafters.tables import BlockParams
from longspec_jax.drafters.tree import Tree, beam_search, root_tree
from longspec_jax.drafters.window import DraftWindow, Entries, Rows
from longspec_jax.models.layers import INITIAL_SCALE, RMSNorm, applied, parameter
from longspec_jax.models.target import scaled, stored_logits
from longspec_jax.ops.attention.attention_xla import capped
from longspec_jax.ops.attention.dispatch import (
    prefix_attention,
    speculative_attention,
    tree_attention,
)
from longspec_jax.ops.attention.operands import Fresh
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.schema import Checked

MOST_LAYERS = 3
"""More would cost a round more than they were ever seen to gain."""
MOST_SLOTS = 16


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """LongSpec layers over a block: the pending token, and learnt slots after it."""

    layer: DraftConfig
    """Of every layer; the first one's window counts the committed tokens before the block."""
    vocab_size: Annotated[int, Whole()]
    """Tokens of the target."""
    num_layers: Annotated[int, Whole(1, MOST_LAYERS)] = 3
    block: Annotated[int, Whole(2, MOST_SLOTS)] = 6
    """Slots of a block, the pending token's included. Each proposes the token after its own."""
    markov_rank: Annotated[int, Whole(0)] = 64
    """Rank of the head that corrects a slot's logits by the token before it; 0 without one."""

    def check_fits(self, target: TargetConfig) -> None:
        """Raise unless this draft can read the target's embedding, head and last-layer K/V."""
        self.layer.check_fits(target)
        check_vocab_size(self.vocab_size, target)


class ParallelLayers(nn.Module):
    """The draft as pure functions of embeddings; attention patterns are the caller's."""

    config: ParallelConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0 for all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, layer = self.config, self.config.layer
        dtype, slots = jnp.dtype(layer.dtype), (c.block - 1, layer.model_width)
        # A target's factors are of what enters the first layer, and of what leaves the last norm.
        first = dataclasses.replace(layer, logits_divisor=1.0)
        behind = dataclasses.replace(first, embedding_factor=1.0)
        self.layers = [
            LongSpecLayer(each, self.mlp_chunk) for each in (first, *(behind,) * (c.num_layers - 1))
        ]
        self.final_norm = RMSNorm(layer.norm_eps, dtype)
        self.slots = parameter(self, "slots", nn.initializers.normal(INITIAL_SCALE), slots, dtype)

    def __call__(
        self,
        pending: Array,
        positions: Array,
        attend_self: Callable[[int, Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> Array:
        """Run the layers over ``M`` blocks of every row, one after the other.

        Args:
          pending: embeddings of the blocks' first tokens ``[B, M, D]``.
          positions: rotary positions ``[B, M * block]``, the target's own.
          attend_self: ``(layer, q, k, v) -> out`` over what the slots see of block and window.
          attend_cross: ``q -> out`` over the target's last-layer keys and values.

        Returns:
          What the LM head reads of every slot, ``[B, M * block, D]``.
        """
        rows, blocks, width = pending.shape
        shape = rows, blocks, self.config.block - 1, width
        learnt = jnp.broadcast_to(self.slots.astype(pending.dtype), shape)
        x = jnp.concatenate([pending[:, :, None], learnt], axis=2).reshape(rows, -1, width)
        for index, layer in enumerate(self.layers):
            attend = lambda q, k, v, index=index: attend_self(index, q, k, v)  # noqa: E731
            [x] = with_sharding("b t d", x)
            x = layer(x, positions, attend, attend_cross).hidden
        return scaled(self.final_norm(x), 1 / self.config.layer.logits_divisor)

    def keys_values(self, embedded: Array, positions: Array) -> Rows:
        """What the first layer's window holds of tokens ``[B, T]``, by their embeddings."""
        return self.layers[0].keys_values(embedded, positions)


@struct.dataclass
class ParallelParams(BlockParams):
    """The draft's own parameters and the two tables it shares with the target."""

    @classmethod
    def with_target_tables(cls, target_params: PyTree, layer: PyTree) -> "ParallelParams":
        """Loaded or trained parameters with the tables of their target."""
        layer = {**layer}
        markov = layer.pop("markov", None)
        return dataclasses.replace(super().with_target_tables(target_params, layer), markov=markov)

    def keys_values(self, config: ParallelConfig, tokens: Array, positions: Array) -> Rows:
        """As in :meth:`ParallelLayers.keys_values`, of tokens ``[B, T]``."""
        module, embedded = ParallelLayers(config), self.embedded(tokens)
        return applied(ParallelLayers.keys_values, module, self.layer, embedded, positions)

    def block(
        self,
        config: ParallelConfig,
        pending: Int[Array, " B"],
        positions: Int[Array, "B slots"],
        attend_self: Callable[[int, Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> Float[Array, "B slots D"]:
        """The layers over a block of every row; arguments as in :class:`ParallelLayers`."""
        return applied(
            ParallelLayers.__call__,
            ParallelLayers(config),
            self.layer,
            self.embedded(pending[:, None]),
            positions,
            attend_self,
            attend_cross,
        )

    def correction(self, tokens: Int[Array, "B w"]) -> Float[Array, "B w V"]:
        """What the Markov head adds to the logits after these tokens, float32."""
        before = look_up(self.markov["embedding"], tokens)
        return stored_logits(self.markov["head"], before)


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

    @cached_property
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
            return root_tree(view.pending, self.tree)
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
    def _seen(self) -> DraftWindow:
        return DraftWindow(self.config.layer.window, 0)

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


@dataclass(frozen=True)
class ParallelOptions:
    """Options of a parallel LongSpec draft; none changes a token."""

    int8: bool | None = None
    """Read its weights and a copy of the target's LM head in 8 bits: half the bytes.

    If absent, on a GPU with a large target in 16 bits, where it pays."""


@dataclass(frozen=True, eq=False)
class ParallelDraft(Draft):
    """Layers over a block, and the tables they share with their target."""

    config: ParallelConfig
    params: ParallelParams = field(repr=False)
    name: str = field(default="parallel", init=False)

    @classmethod
    def bind(
        cls,
        config: ParallelConfig,
        params: PyTree,
        target_params: PyTree,
        *,
        int8: bool = False,
        mesh: Mesh | None = None,
    ) -> "ParallelDraft":
        """A draft for a loaded target.

        Args:
          config: the draft's configuration.
          params: of :func:`~longspec_jax.drafters.checkpoints.parallel.load_draft`.
          target_params: the target's parameters, whose embedding and LM head the draft reads.
          int8: read its weights and a copy of the head in 8 bits.
          mesh: what the parameters are spread over; one device if absent.
        """
        bound = ParallelParams.with_target_tables(target_params, params)
        if int8:
            bound = bound.in_int8(mesh)
        return cls(config, bound)

    @property
    def default_trees(self) -> DefaultTrees:
        """Trees as deep as the block, as levels are nearly free; narrow where nodes cost time."""

        def tree(width: int, depth: int, budget: int | None = None) -> TreeConfig:
            return TreeConfig((width,) * min(depth, self.config.block), budget)

        whole, half, chain = tree(16, 8, 64), tree(8, 8, 32), tree(1, 8)
        return DefaultTrees(
            (tree(1, 3), tree(1, 2), tree(2, 2)),
            (tree(4, 4, 16), half),
            (whole, half, chain),
            settled=False,
            together=(whole, half, tree(4, 6, 16)),
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> ParallelDrafter:
        """The drafter that grows this tree; raises ValueError if it is deeper than a block."""
        return ParallelDrafter(self.config, tree, attention)
