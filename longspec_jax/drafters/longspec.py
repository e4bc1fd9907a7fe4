"""The LongSpec draft: one layer, a window of its own K/V, the target's last layer for the rest.

The layer (LongSpec section 3.1): ``x += self_attention(norm(x)); x += cross_attention(norm(x));
x += mlp(norm(x))``, on the target's token embeddings, read by the target's LM head without a final
norm. Self-attention sees the last 512 tokens; cross-attention reads the target's last-layer cache
in place, so that the draft stores nothing that grows with the context.

Self-attention comes first, so its keys and values depend on (token, position) alone: prefill needs
the last 512 prompt tokens and no more, and committed tokens can be embedded afresh.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.config import DraftConfig, TreeConfig
from longspec_jax.drafters.base import Context, Score
from longspec_jax.drafters.budget import within_budget
from longspec_jax.drafters.tree import Tree, best_continuations, grow, plant
from longspec_jax.models.layers import (
    GroupedQKV,
    Int8Projection,
    Projection,
    RMSNorm,
    SwiGLU,
    rotary_angles,
)
from longspec_jax.models.target import head_logits
from longspec_jax.ops.attention.dispatch import prefix_attention, tree_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.layer.residual_norm import add
from longspec_jax.ops.layer.split_heads import rotate, split_heads
from longspec_jax.ops.products.int8 import int8_product, round_rows


class DraftOutput(NamedTuple):
    """What one pass of the draft over ``T`` tokens yields."""

    hidden: Array
    """``[B, T, D]``; the target's LM head turns it into logits."""
    keys: Array
    """Self-attention keys ``[B, T, K, H]``, rotary applied."""
    values: Array
    """Self-attention values ``[B, T, K, H]``."""


class LongSpecDraft(nn.Module):
    """The draft layer as a pure function of embeddings; attention patterns are the caller's."""

    config: DraftConfig
    int8: bool = False
    """Whether the products' weights are of 8 bits."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        projection = Int8Projection if self.int8 else Projection
        heads = (c.num_heads, c.head_width)
        self.self_norm = RMSNorm(c.norm_eps, dtype)
        self.self_qkv = GroupedQKV(
            c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=True,
            projection=projection,
        )
        self.self_out = projection(heads, (c.model_width,), dtype)
        self.cross_norm = RMSNorm(c.norm_eps, dtype)
        self.cross_q = projection((c.model_width,), heads, dtype, bias=True)
        self.cross_out = projection(heads, (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype, projection)

    def __call__(
        self,
        embedded: Array,
        positions: Array,
        attend_self: Callable[[Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
    ) -> DraftOutput:
        """Run the layer over ``T`` tokens.

        Args:
          embedded: the target's token embeddings ``[B, T, D]``.
          positions: rotary positions ``[B, T]``, the target's own.
          attend_self: ``(q, k, v) -> out`` over the window and the path to each token.
          attend_cross: ``q -> out`` over the target's last-layer keys and values.
        """
        c = self.config
        angles = rotary_angles(positions, c.head_width, c.rope_theta, c.rope_scaling)
        q, k, v = split_heads(self.self_qkv(self.self_norm(embedded)), *angles)
        x, normalised = self.cross_norm.add(embedded, self.self_out.summands(attend_self(q, k, v)))
        cross_q = rotate(self.cross_q(normalised), angles)
        x, normalised = self.mlp_norm.add(x, self.cross_out.summands(attend_cross(cross_q)))
        return DraftOutput(add(x, self.mlp(normalised)), k, v)

    def keys_values(self, embedded: Array, positions: Array) -> tuple[Array, Array]:
        """Self-attention keys and values of tokens, which depend on (token, position) alone."""
        c = self.config
        angles = rotary_angles(positions, c.head_width, c.rope_theta, c.rope_scaling)
        _, k, v = split_heads(self.self_qkv(self.self_norm(embedded)), *angles)
        return k, v


@struct.dataclass
class LongSpecParams:
    """The draft's own parameters and the two tables it shares with the target."""

    layer: Any
    """Parameters of :class:`LongSpecDraft`."""
    embedding: Leaf
    """The target's embedding table ``[V, D]``."""
    head: Leaf
    """The target's LM head ``[V, D]``; the embedding itself where they are tied."""
    vocabulary: Leaf = None
    """``[v]`` int32 tokens that can be proposed, ``head`` being their rows; all of them if absent."""
    head_scale: Leaf = None
    """``[v]`` float32, what the rows of an int8 ``head`` are multiplied by; absent if it is not one."""

    def restricted(self, vocabulary: Int[Array, " v"]) -> "LongSpecParams":
        """Propose only these tokens, the most frequent ones: a cheaper LM head at every level.

        Verification stays over the whole vocabulary, so the output is unchanged.
        """
        rows = jnp.take(self.head, vocabulary, axis=0)
        scale = None if self.head_scale is None else jnp.take(self.head_scale, vocabulary)
        return self.replace(  # type: ignore[attr-defined]
            head=rows, vocabulary=vocabulary, head_scale=scale
        )

    def in_int8(self) -> "LongSpecParams":
        """Read copies of the layer's products and of the head in 8 bits; the target keeps its own.

        Half the bytes at every level. The head's rows are rounded one by one: it is the same before
        and after :meth:`restricted`.
        """
        if self.int8:
            raise ValueError("the draft is in 8 bits already; call in_int8 once")
        rows, scale = round_rows(self.head)
        layer = _rounded(self.layer)
        return self.replace(layer=layer, head=rows, head_scale=scale)  # type: ignore[attr-defined]

    @property
    def int8(self) -> bool:
        """Whether this is the result of :meth:`in_int8`."""
        return self.head_scale is not None

    def logits(self, hidden: Array) -> Array:
        """Logits ``[..., v]`` of the tokens that can be proposed, in float32."""
        if self.int8:
            return int8_product(hidden, self.head, self.head_scale)
        return head_logits(self.head, hidden)

    @property
    def own(self) -> Any:
        """What is not shared with the target: the layer, and the rows of a reduced or int8 head."""
        if self.vocabulary is None and not self.int8:
            return self.layer
        return self.layer, self.head, self.vocabulary, self.head_scale


def _rounded(layer: Any, name: str = "") -> Any:
    """Parameters of :class:`LongSpecDraft` for its 8-bit products."""
    if "kernel" not in layer:
        return {
            key: _rounded(value, key) if isinstance(value, Mapping) else value
            for key, value in layer.items()
        }
    # Attention's outputs are contracted over heads and their width.
    contracted = 2 if name.endswith("_out") else 1
    others, kernel = dict(layer), layer["kernel"]
    del others["kernel"]
    inputs = int(np.prod(kernel.shape[:contracted]))
    rows, scale = round_rows(kernel.reshape(inputs, -1).T)
    return {"rows": rows, "scale": scale, **others}


@struct.dataclass
class LongSpecState:
    """A ring of the last ``W`` tokens' self-attention K/V: the draft's only memory.

    The token at position ``p`` lives in slot ``p % W``; which positions are present follows from the
    committed length alone.
    """

    keys: Leaf
    """``[B, W, K, H]``."""
    values: Leaf
    """``[B, W, K, H]``."""


@dataclass(frozen=True)
class LongSpecDrafter:
    """Proposes trees by beam search over the draft's cumulative log-probability."""

    config: DraftConfig
    tree: TreeConfig = TreeConfig()
    attention: str | None = None
    """Attention implementation; chosen automatically if absent."""

    def __post_init__(self) -> None:
        if self.tree.num_levels >= self.config.window:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels does not fit the draft window of "
                f"{self.config.window} tokens; use fewer levels"
            )

    def prefill(
        self, params: LongSpecParams, tokens: Int[Array, "B P"], length: Lengths
    ) -> LongSpecState:
        """Fill the ring from the last ``W`` prompt tokens."""
        positions = ring_positions(length, self.config.window)
        # Slots without a token (negative position) get K/V of token 0, and are never seen.
        recent = jnp.take_along_axis(tokens, jnp.maximum(positions, 0), axis=1)
        return LongSpecState(*self._keys_values(params, recent, positions))

    def propose(
        self, params: LongSpecParams, state: LongSpecState, context: Context, score: Score
    ) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        batch, window = context.pending.shape[0], self.config.window
        tree = plant(context.pending, self.tree)
        ring = ring_positions(context.length, window)
        # One buffer for ring and tree: a level's K/V are written behind the ring as it is run.
        rooms = ((0, 0), (0, self.tree.num_grown - (self.tree.widths or (0,))[-1]), (0, 0), (0, 0))
        keys, values = jnp.pad(state.keys, rooms), jnp.pad(state.values, rooms)
        total, totals = jnp.zeros((batch, 1), jnp.float32), []
        first, width = 0, 1
        for depth, children in enumerate(self.tree.widths):
            nodes = slice(first, first + width)
            positions = jnp.broadcast_to(context.length[:, None] + depth, (batch, width))
            seen = ring_mask(ring, positions, window)
            path = tree.mask[:, nodes, : keys.shape[1] - window]
            mask = jnp.concatenate([seen, path], axis=2)

            def attend_self(q: Array, k: Array, v: Array, at=window + first, mask=mask) -> Array:
                nonlocal keys, values
                keys = jax.lax.dynamic_update_slice_in_dim(keys, k, at, axis=1)
                values = jax.lax.dynamic_update_slice_in_dim(values, v, at, axis=1)
                fresh = Fresh(keys, values, mask)
                partial = tree_attention(q, fresh, implementation=self.attention)
                return partial.out.astype(q.dtype)

            with jax.named_scope(f"draft_level_{depth + 1}"):
                output: Any = LongSpecDraft(self.config, params.int8).apply(
                    {"params": params.layer},
                    jnp.take(params.embedding, tree.tokens[:, nodes], axis=0),
                    positions,
                    attend_self,
                    lambda q: self._attend_cross(q, context),
                )
                logits = params.logits(output.hidden)
                if params.vocabulary is None:
                    belief = score(logits, depth)
                else:
                    belief = score(logits, depth, params.vocabulary)
                total, parents, tokens = best_continuations(total[:, :, None] + belief, children)
                if params.vocabulary is not None:
                    tokens = jnp.take(params.vocabulary, tokens)
                tree = grow(tree, first + width, tokens, first + parents)
            totals.append(total)
            first, width = first + width, children
        return within_budget(tree, totals, self.tree)

    def commit(
        self,
        params: LongSpecParams,
        state: LongSpecState,
        tokens: Int[Array, "B h"],
        count: Lengths,
        length: Lengths,
    ) -> LongSpecState:
        """Write the committed tokens' K/V over the oldest ring slots."""
        offsets = jnp.arange(tokens.shape[1])
        positions = length[:, None] + offsets
        keys, values = self._keys_values(params, tokens, positions)
        # Rows beyond the count go to a slot that does not exist, and are dropped.
        slots = jnp.where(
            offsets < count[:, None], positions % self.config.window, self.config.window
        )
        write = jax.vmap(lambda ring, at, fresh: ring.at[at].set(fresh, mode="drop"))
        return LongSpecState(write(state.keys, slots, keys), write(state.values, slots, values))

    def _keys_values(
        self, params: LongSpecParams, tokens: Array, positions: Array
    ) -> tuple[Array, Array]:
        embedded = jnp.take(params.embedding, tokens, axis=0)
        keys_values: Any = LongSpecDraft(self.config, params.int8).apply(
            {"params": params.layer}, embedded, positions, method="keys_values"
        )
        return keys_values

    def _attend_cross(self, q: Array, context: Context) -> Array:
        prefix = Prefix(context.keys, context.values, context.length)
        partial = prefix_attention(q, prefix, implementation=self.attention)
        return partial.out.astype(q.dtype)


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
