"""The target: decoder-only transformers, whose layers the configuration describes.

One linen module, no mutable collections, no cache inside. How tokens see each other is the
caller's: ``attend(layer, q, k, v)`` receives every layer's fresh queries, keys and values (rotary
applied) and returns the attention output, which includes the layer's sinks (:func:`sinks_of`) if
there are any. Training passes plain causal attention, decoding closes over a cache. The fresh keys
and values come back with the output, because the caller owns the cache and the draft reads one
layer's. The recurrence of recurrent layers is the caller's, too.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from longspec_jax.axes import Array
from longspec_jax.config.layers import LayerConfig, QueryScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.models.experts import Experts
from longspec_jax.models.layers import (
    INITIAL_SCALE,
    GroupedQKV,
    OrderedProjection,
    Projection,
    RMSNorm,
    SwiGLU,
    parameter,
    rotary_angles,
)
from longspec_jax.models.recurrence import Recur, Recurrence
from longspec_jax.ops.attention.attention_xla import capped
from longspec_jax.ops.embedding import look_up
from longspec_jax.ops.layer import add, added, rms_norm, split_heads, wide_qk_norm
from longspec_jax.ops.matmul.few_rows import head_matmul_xla
from longspec_jax.ops.matmul.ordered import head_matmul
from longspec_jax.ops.matmul.quantised import quantised_matmul
from longspec_jax.ops.matmul.quantised_weights import QuantisedWeights
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.recurrence.operands import RecurrentTokens

HEADS = "b t (k g) h, b t k h, b t k h"
"""The axes of fresh queries, keys and values."""
Attend: TypeAlias = Callable[[int, Array, Array, Array], Array]
"""``(layer, q[B,T,N,H], k[B,T,K,H], v[B,T,K,H]) -> out[B,T,N,H]``."""


class TargetOutput(NamedTuple):
    """What one forward pass over ``T`` fresh tokens yields."""

    hidden: Array
    """Hidden states after the final norm, ``[B, T, D]``; :meth:`Target.unembed` makes logits."""
    keys: tuple[Array | None, ...]
    """Fresh keys of every layer, ``L x [B, T, K, H]``, rotary applied; None of a recurrent one and
    of one that reads those of another."""
    values: tuple[Array | None, ...]
    """Fresh values of every layer, ``L x [B, T, K, H]``."""
    kept: dict[int, Array]
    """The residual stream ``[B, T, D]`` after the layers of ``keep``; the embedding at -1."""


class Attention(nn.Module):
    """Self-attention of one layer, up to and after the caller's ``attend``."""

    config: TargetConfig
    projection: Callable[..., Any] = Projection
    kind: LayerConfig = LayerConfig()

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        own = c.heads(self.kind)
        self.kv_heads, self.head_width = own.num_kv_heads, own.head_width
        self.groups = c.num_heads // self.kv_heads
        self.qkv = GroupedQKV(
            c.model_width,
            self.kv_heads,
            self.groups * (2 if c.gated_attention else 1),
            self.head_width,
            dtype,
            c.qkv_bias,
            projection=self.projection,
            own=0 if self.kind.keys_of is not None else 2 - self.kind.keys_are_values,
        )
        heads = c.num_heads, self.head_width
        self.out = self.projection(heads, (c.model_width,), dtype, c.out_bias)
        if c.attention_sinks:  # For the caller's ``attend``, which finds them by sinks_of.
            shape = self.kv_heads, self.groups
            self.sinks = parameter(self, "sinks", nn.initializers.zeros, shape, dtype)
        if c.qk_norm or c.wide_qk_norm:
            self.q_norm = RMSNorm(c.norm_eps, dtype, c.offset_norms)
            if self.kind.keys_of is None:
                self.k_norm = RMSNorm(c.norm_eps, dtype, c.offset_norms)

    def __call__(
        self, x: Array, angles: tuple[Array, Array], attend: Callable[[Array, Array, Array], Array]
    ) -> tuple[Array, Array, Array]:
        """Return partials ``[S, B, T, D]`` of the projected output, fresh keys and values."""
        c, qkv, scales, gates = self.config, self.qkv(x), None, None
        if c.gated_attention:  # Every query's gate is after it.
            pairs = 2 * self.groups
            gates = qkv[:, :, :, 1:pairs:2]
            qkv = jnp.concatenate([qkv[:, :, :, :pairs:2], qkv[:, :, :, pairs:]], axis=3)
        if c.wide_qk_norm:
            queries = self.q_norm.weights(self.kv_heads, self.groups, self.head_width)
            keys = self.k_norm.weights(self.kv_heads, self.head_width)
            qkv = wide_qk_norm(qkv, (queries, keys), c.norm_eps)
        elif c.qk_norm:
            norms = self.q_norm, self.q_norm if self.kind.keys_of is not None else self.k_norm
            scales = norms[0].weights(self.head_width), norms[1].weights(self.head_width)
        heads = split_heads(qkv, *angles, scales, c.norm_eps)
        q, k, v = with_sharding(HEADS, *heads)
        if c.value_norm:
            v = rms_norm(v, jnp.ones(()), c.norm_eps)
        attended = attend(q, k, v)
        if gates is not None:
            opened = jax.nn.sigmoid(gates.astype(jnp.float32)).reshape(attended.shape)
            attended = (attended.astype(jnp.float32) * opened).astype(attended.dtype)
        return self.out(attended)[None] if c.out_bias else self.out.partials(attended), k, v


class Layer(nn.Module):
    """One transformer layer: norms before attention and MLP, after them, or both.

    Or a recurrence in the place of attention.
    """

    config: TargetConfig
    mlp_chunk: int = 0
    projection: Callable[..., Any] = Projection
    kind: LayerConfig = LayerConfig()
    """The layer's heads, experts or recurrence; what it attends to is the caller's."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        norm = partial(RMSNorm, c.norm_eps, dtype, c.offset_norms)
        if self.kind.recurrence is None:
            self.attention = Attention(c, self.projection, self.kind)
        else:
            self.recurrence = Recurrence(c, self.kind.recurrence, self.projection)
        if c.pre_norms:
            self.attention_norm, self.mlp_norm = norm(), norm()
        if c.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        if (experts := self.kind.experts) is not None:
            ordered = self.projection is OrderedProjection
            mixture = Experts(
                c.model_width,
                experts,
                dtype,
                chunk=self.mlp_chunk,
                ordered=ordered,
                gelu=c.gelu,
                eps=c.norm_eps,
            )
            if experts.parallel_mlp:
                self.experts, self.mlp_own_norm, self.experts_norm = mixture, norm(), norm()
            else:
                self.mlp = mixture
        if experts is None or experts.parallel_mlp:
            widths = c.model_width, self.kind.mlp_width or c.mlp_width
            self.mlp = SwiGLU(*widths, dtype, self.projection, self.mlp_chunk, c.gelu)
        if c.layer_inputs is not None:
            outer, inner = (c.model_width,), (c.layer_inputs,)
            self.input_gate = self.projection(outer, inner, dtype)
            self.input_projection = self.projection(inner, outer, dtype)
            self.input_norm = norm()
        if c.layer_factors:
            self.factor = parameter(self, "factor", nn.initializers.ones, (1,), dtype)

    def __call__(
        self,
        x: Array,
        delta: Array | None,
        angles: tuple[Array, Array],
        attend: Callable[..., Array],
        inputs: Array | None = None,
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """Return the residual stream ``[B, T, D]``, its increment, and the fresh keys and values.

        ``attend`` takes queries, keys and values, or what :class:`Recurrence` makes of the tokens.
        ``inputs`` ``[B, T, P]`` are what the tokens give to this layer.

        The stream between layers is ``x`` and the split-K partials of its increment,
        ``[S, B, T, D]``: the next norm adds and normalises in one op. A layer with a factor adds
        them itself.
        """
        c = self.config
        x, entering = _enter(self.attention_norm if c.pre_norms else None, x, delta)
        k = v = None
        if self.kind.recurrence is None:
            attended, k, v = self.attention(entering, angles, attend)
        else:
            attended = self.recurrence(entering, attend)
        attended = self._leave(self.attention_post_norm if c.post_norms else None, attended)
        x, entering = _enter(self.mlp_norm if c.pre_norms else None, x, attended)
        made = self.mlp(entering)
        if self.kind.experts is not None and self.kind.experts.parallel_mlp:
            own = self._normed(self.mlp_own_norm, made)
            made = own + self._normed(self.experts_norm, self.experts(x))
        delta = self._leave(self.mlp_post_norm if c.post_norms else None, made)
        if inputs is not None:
            x = add(x, delta)
            given = jax.nn.gelu(self.input_gate(x), approximate=True) * inputs
            delta = self._normed(self.input_norm, self.input_projection(given)[None])
        if not c.layer_factors:
            return x, delta, k, v
        wide = add(x, delta).astype(jnp.float32) * self.factor.astype(jnp.float32)
        return wide.astype(x.dtype), None, k, v

    def _leave(self, norm: RMSNorm | None, partials: Array) -> Array:
        """What is added to the residual stream of a sublayer's partials, as partials."""
        if norm is not None:
            partials = self._normed(norm, partials)
        if self.config.residual_factor != 1:
            partials = partials * self.config.residual_factor
        return partials

    def _normed(self, norm: RMSNorm, partials: Array) -> Array:
        """The norm of what partials add up to, as one partial."""
        dtype = jnp.dtype(self.config.dtype)
        [total] = with_sharding("b t d", added(partials).astype(dtype))
        return norm.add(total, None)[1][None]


def _enter(norm: RMSNorm | None, x: Array, delta: Array | None) -> tuple[Array, Array]:
    """The residual stream with its increment, and what the next sublayer reads of it."""
    if norm is not None:
        stream, normalised = with_sharding("b t d, b t d", *norm.add(x, delta))
        return stream, normalised
    if delta is not None:
        [x] = with_sharding("b t d", add(x, delta))
    return x, x


class Target(nn.Module):
    """A decoder-only language model; embedding and LM head are shared with the draft."""

    config: TargetConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""
    ordered: bool = False
    """Whether the bits of a row depend on no other row, where there is a kernel for it."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        table = nn.initializers.normal(INITIAL_SCALE)
        shape = (c.vocab_size, c.model_width)
        self.embedding = parameter(self, "embedding", table, shape, dtype)
        # Separate modules, not a scan over stacked weights: slicing a stack costs decode a factor
        # of three in bandwidth (docs/design/decisions.md, decision 4.6).
        projection = OrderedProjection if self.ordered else Projection
        kinds = map(c.layer, range(c.num_layers))
        self.layers = [Layer(c, self.mlp_chunk, projection, kind) for kind in kinds]
        self.final_norm = RMSNorm(c.norm_eps, dtype, c.offset_norms)
        if c.layer_inputs is not None:
            every = c.num_layers * c.layer_inputs
            rows = c.vocab_size, every
            self.input_embedding = parameter(self, "input_embedding", table, rows, dtype)
            self.input_projection = projection((c.model_width,), (every,), dtype)
            self.input_norm = RMSNorm(c.norm_eps, dtype, c.offset_norms)
        if not c.tied_embeddings:
            stored = self.get_variable("params", "head")
            quantised = isinstance(stored, QuantisedWeights)
            self.head = stored if quantised else parameter(self, "head", table, shape, dtype)

    def embed(self, tokens: Array) -> Array:
        """What enters the first layer for tokens ``[B, T]``, ``[B, T, D]``."""
        [embedded] = with_sharding("b t d", self.look_up(tokens))
        return scaled(embedded, self.config.embedding_factor)

    def _layer_inputs(self, tokens: Array, embedded: Array) -> Array:
        """What tokens ``[B, T]``, embedded as ``[B, T, D]``, give to each layer: ``[B, T, L, P]``.

        Hugging Face rounds the root of the width to the dtype of the weights.
        """
        c, width = self.config, self.config.layer_inputs or 0
        shape = *tokens.shape, c.num_layers, width
        root = float(jnp.dtype(c.dtype).type(math.sqrt(width)))
        own = scaled(look_up(self.input_embedding, tokens), root).reshape(shape)
        others = scaled(self.input_projection(embedded), c.model_width**-0.5).reshape(shape)
        return scaled(self.input_norm(others) + own, 2**-0.5)

    def look_up(self, tokens: Array) -> Array:
        """Rows of the embedding table."""
        return look_up(self.embedding, tokens)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        attend: Attend,
        keep: Sequence[int] = (),
        recur: Recur | None = None,
    ) -> TargetOutput:
        """Run all layers over ``T`` fresh tokens.

        Args:
          tokens: token ids ``[B, T]``.
          positions: rotary positions ``[B, T]``.
          attend: how the tokens of a layer see each other and the past.
          keep: layers after which the residual stream is returned as well, -1 for the embedding. So
            ``i - 1`` is what enters layer ``i``. The number of layers stands for what leaves the
            final norm.
          recur: the same of recurrent layers; needed where there are any.
        """
        c = self.config
        rotations = [(c.heads(kind).head_width, kind.rotary) for kind in c.layers]
        kinds = dict.fromkeys(rotations)  # In order, so that the program is always the same.
        angles = {each: rotary_angles(positions, *each) for each in kinds}
        if c.query_scaling is not None:
            attend = _scaling_queries(attend, c.query_scaling, positions)
        x, delta = self.embed(tokens), None
        inputs = None if c.layer_inputs is None else self._layer_inputs(tokens, x)
        keys, values, kept = [], [], {-1: x} if -1 in keep else {}
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                # Bound now: the layer calls back while the loop variable is current, but a
                # rematerialised layer calls back later.
                see: Any = recur if index in c.recurrent_layers else attend
                see = partial(see, index)
                own = c.source(index) == index
                if not own:
                    see = _with_rows(see, keys[c.source(index)], values[c.source(index)])
                given = None if inputs is None else inputs[:, :, index]
                x, delta, k, v = layer(x, delta, angles[rotations[index]], see, given)
                if not own:
                    k = v = None
            keys.append(k)
            values.append(v)
            if index in keep:
                kept[index] = x if delta is None else add(x, delta)
        [hidden] = with_sharding("b t d", self.final_norm.add(x, delta)[1])
        if len(self.layers) in keep:
            kept[len(self.layers)] = hidden
        return TargetOutput(hidden, tuple(keys), tuple(values), kept)

    def unembed(self, hidden: Array) -> Array:
        """Logits ``[..., V]`` of hidden states ``[..., D]``, float32."""
        table = self.embedding if self.config.tied_embeddings else self.head
        logits = stored_logits(table, hidden, ordered=self.ordered)
        return target_logits(logits, self.config.logits_divisor, self.config.logit_cap)

    def initialize(self, tokens: Array) -> None:
        """Touch every parameter; the method ``init`` runs, since the passes above share them."""
        positions = jnp.zeros(tokens.shape, jnp.int32)

        def recur(layer: int, tokens: RecurrentTokens, taps: Array) -> Array:
            width = self.config.recurrent_layers[layer].value_width
            return jnp.zeros((*tokens.log_decay.shape, width), jnp.float32)

        output = self(tokens, positions, lambda layer, q, k, v: q, recur=recur)
        self.unembed(output.hidden)


def _with_rows(attend: Callable[..., Array], keys: Array, values: Array) -> Callable[..., Array]:
    """The attention of a layer's queries to the keys and values of another layer."""
    return lambda q, k, v: attend(q, keys, values)


def _scaling_queries(attend: Attend, scaling: QueryScaling, positions: Array) -> Attend:
    """The same attention for queries times a factor of their position."""
    periods = jnp.floor(positions.astype(jnp.float32) / scaling.original_max_positions)
    factor = (1 + scaling.beta * jnp.log(1 + periods))[..., None, None]
    return lambda layer, q, k, v: attend(layer, q * factor.astype(q.dtype), k, v)


def scaled(x: Array, factor: float) -> Array:
    """``x`` times a factor, computed in float32, in the dtype of ``x``."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def target_logits(products: Array, divisor: float, cap: float | None) -> Array:
    """Logits of the products of hidden states with an LM head: divided, and softly bounded."""
    return capped(products if divisor == 1 else products / divisor, cap)


def sinks_of(params: PyTree, layer: int) -> Array | None:
    """A layer's attention sinks ``[N]`` of a target's parameters; None if it has none."""
    attention = params[f"layers_{layer}"]["attention"]
    return attention["sinks"].reshape(-1) if "sinks" in attention else None


def head_of(params: PyTree) -> Array:
    """The LM head ``[V, D]`` of a target's parameters; the embedding where they are tied.

    A quantised one is dequantised: what it gives is a copy.
    """
    head = params["head"] if "head" in params else params["embedding"]
    if not isinstance(head, QuantisedWeights):
        return head
    return head.kernel(params["embedding"].dtype).T


def shares_head(params: PyTree) -> bool:
    """Whether :func:`head_of` is the target's own array, and no copy of it."""
    return not isinstance(params.get("head"), QuantisedWeights)


def stored_logits(
    table: Array | QuantisedWeights, hidden: Array, *, ordered: bool = False
) -> Array:
    """Logits ``[..., V]`` of hidden states ``[..., D]`` in float32, of a head as it is stored.

    ``ordered`` rows have the same bits whatever rows are next to them, where there is a kernel.
    """
    if isinstance(table, QuantisedWeights):
        return quantised_matmul(hidden, table, ordered=ordered, dtype=jnp.float32)
    return head_matmul(hidden, table) if ordered else head_logits(table, hidden)


def head_logits(table: Array, hidden: Array) -> Array:
    """Logits ``[..., V]``, accumulated and returned in float32, for a head ``table[V, D]``."""
    return head_matmul_xla(hidden, table)
