"""EAGLE-3 (arXiv 2503.01840): beam search with one layer over features of the target.

Hidden states of several layers of the target are fused to one feature of the draft's width. The
layer reads a token's embedding next to the feature of the token before it; attention takes both,
twice as wide as the model. Its output stands in for the feature of the token itself, which only the
target knows: so the next level of a tree goes on from it. Keys and values of a committed token
depend only on (feature, token, position), because there is one layer. So a prompt costs one matmul
a token, and a window of the last entries is exact.

Entry ``i`` of the draft's cache is made of the target's feature of token ``i`` and of token
``i + 1``. A row that holds ``n`` committed tokens has ``n - 1`` entries, and the feature of its
last token, whose entry is completed by the pending token: the root of the tree. Below the root a
node takes its parent's output for the feature. None of this is kept: the accepted path enters the
cache with the features that its verification computed.

Without a window the cache grows with the context. With one it is a ring of the last entries and the
first few besides it (:mod:`longspec_jax.drafters.window`), in constant memory. Of a whole cache it
may read what the target attends to (:mod:`longspec_jax.drafters.retrieval.working_cache`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Float

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.checks import Whole
from longspec_jax.config.layers import BASE, RopeScaling, Rotary, YarnRopeScaling
from longspec_jax.config.target import EPSILON, LayerSizes, TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.retrieval.working_cache import (
    CachedSelection,
    WorkingCache,
    WorkingCacheOptions,
)
from longspec_jax.drafters.tables import (
    FeatureOptions,
    TableParams,
    check_fits,
    check_proposable,
)
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.drafters.window import DraftWindow, Entries
from longspec_jax.models.layers import (
    GroupedQKV,
    Projection,
    RMSNorm,
    SwiGLU,
    applied,
    rotary_frequencies,
)
from longspec_jax.models.target import HEADS
from longspec_jax.ops.attention.dispatch import speculative_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.layer import add, added, split_heads
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.ops.slicing import along, last_along

C = TypeVar("C", bound="Eagle3Config")
D = TypeVar("D", bound="Eagle3Draft")


@dataclass(frozen=True)
class Eagle3Config(LayerSizes):
    """Shape of the one-layer EAGLE-3 draft."""

    model_width: Annotated[int, Whole()]
    target_width: Annotated[int, Whole()]
    """Width of the target's hidden states."""
    mlp_width: Annotated[int, Whole()]
    num_heads: Annotated[int, Whole()]
    num_kv_heads: Annotated[int, Whole()]
    head_width: Annotated[int, Whole()]
    vocab_size: Annotated[int, Whole()]
    """Tokens of the target."""
    proposable: Annotated[int, Whole()]
    """Tokens that the draft's LM head knows."""
    features: tuple[int, ...]
    """Layers of the target after which the draft takes the hidden states; -1 is the embedding."""
    max_positions: Annotated[int, Whole()]
    """Positions it was made for."""
    rope_theta: Annotated[float, BASE] = 10000.0
    rope_scaling: RopeScaling = None
    norm_eps: Annotated[float, EPSILON] = 1e-6
    dtype: str = "bfloat16"
    window: Annotated[int | None, Whole(2)] = None
    """Tokens that it saw of each text in training, its own included; all of them if absent."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    """Whether the residual stream of the layer is the normed feature (EAGLE-3.1)."""
    norm_before_fuse: bool = False
    """Whether one norm over all features precedes their fusion."""
    feature_norms: bool = False
    """Whether each feature has a norm of its own before their fusion (EAGLE-3.1)."""
    normed_feedback: bool = False
    """Whether the next level takes the normed output of this one (EAGLE-3.1)."""
    normed_head: bool = True
    """Whether the LM head reads the normed output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_proposable(self)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's features and tokens."""
        check_fits(self, target)

    @property
    def rotary(self) -> Rotary:
        """The rotation of its heads."""
        return Rotary(self.rope_theta, self.rope_scaling)

    @property
    def attention_scale(self) -> float | None:
        """Factor on the attention scores; None for the usual one, ``H ** -0.5``."""
        if not isinstance(self.rope_scaling, YarnRopeScaling):
            return None
        return self.rope_scaling.attention_factor**2 * self.head_width**-0.5

    def stretched(self: C, factor: float) -> C:
        """The same draft with YaRN over its trained range."""
        yarn = YarnRopeScaling.usual(factor, self.max_positions)
        return dataclasses.replace(
            self, rope_scaling=yarn, max_positions=int(factor * self.max_positions)
        )

    @cached_property
    def plain_layer(self) -> TargetConfig:
        """A target of one Llama layer of these sizes."""
        return TargetConfig(
            architecture="LlamaForCausalLM",  # Which names a layer as these are named.
            vocab_size=self.vocab_size,
            model_width=self.model_width,
            mlp_width=self.mlp_width,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_width=self.head_width,
            max_positions=self.max_positions,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            norm_eps=self.norm_eps,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            dtype=self.dtype,
        )

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """Cosines and sines at positions ``[B, T]``, float32 ``[B, T, H / 2]``.

        Without the factor of YaRN, which :attr:`attention_scale` has: so rotations can be added.
        """
        frequencies = jnp.asarray(rotary_frequencies(self.head_width, self.rotary))
        turned = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(turned), jnp.sin(turned)


class LevelOutput(NamedTuple):
    """What one forward over the nodes of a level yields."""

    hidden: Array
    """``[B, T, D]``; the draft's LM head turns it into logits."""
    feedback: Array
    """``[B, T, D]``; what the children of these nodes take as their feature."""


class Eagle3Layer(nn.Module):
    """The draft as pure functions of features and embeddings; attention is the caller's."""

    config: Eagle3Config
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0: all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        fused = len(c.features) * c.target_width
        self.fuse = Projection((fused,), (c.model_width,), dtype)
        if c.norm_before_fuse:
            self.fuse_norm = RMSNorm(c.norm_eps, dtype)
        if c.feature_norms:
            self.feature_norms = [RMSNorm(c.norm_eps, dtype) for _ in c.features]
        self.embedding_norm = RMSNorm(c.norm_eps, dtype)
        self.hidden_norm = RMSNorm(c.norm_eps, dtype)
        self.self_qkv = GroupedQKV(
            2 * c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=c.qkv_bias,
        )
        if c.qk_norm:
            self.q_norm = RMSNorm(c.norm_eps, dtype)
            self.k_norm = RMSNorm(c.norm_eps, dtype)
        self.self_out = Projection((c.num_heads, c.head_width), (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype, chunk=self.mlp_chunk)
        if c.normed_head or c.normed_feedback:
            self.final_norm = RMSNorm(c.norm_eps, dtype)

    def fused(self, hidden: Sequence[Array]) -> Array:
        """One feature ``[B, n, D]`` of each token, of the target's states at ``config.features``.

        Args:
          hidden: ``[B, n, target_width]`` each.
        """
        if self.config.feature_norms:
            pairs = zip(self.feature_norms, hidden, strict=True)
            hidden = [norm(state) for norm, state in pairs]
        together = jnp.concatenate(hidden, axis=-1)
        if self.config.norm_before_fuse:
            together = self.fuse_norm(together)
        # A long contraction with few outputs: without splits half of a GPU would read.
        fused = added(self.fuse.partials(together)).astype(together.dtype)
        [feature] = with_sharding("b t d", fused)
        return feature

    def keys_values(self, embedded: Array, feature: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values ``[B, T, K, H]`` of tokens; arguments as in :meth:`__call__`."""
        _, k, v = self._heads(embedded, self.hidden_norm(feature), positions)
        return k, v

    def __call__(
        self,
        embedded: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """Run the layer over ``T`` tokens.

        Args:
          embedded: their embeddings ``[B, T, D]``.
          feature: of the token before each, ``[B, T, D]``.
          positions: of the token before each, ``[B, T]``; ``[B, 1]`` if all are the same.
          attend: ``(q, k, v) -> out`` over what each token sees.
        """
        c = self.config
        x, delta = self.stream(embedded, feature, positions, attend)
        if not (c.normed_head or c.normed_feedback):
            [out] = with_sharding("b t d", add(x, delta))
            return LevelOutput(out, out)
        out, normed = with_sharding("b t d, b t d", *self.final_norm.add(x, delta))
        return LevelOutput(normed if c.normed_head else out, normed if c.normed_feedback else out)

    def stream(
        self,
        embedded: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> tuple[Array, Array]:
        """The residual stream before the MLP, and what the MLP adds to it, as partials.

        Arguments as in :meth:`__call__`.
        """
        normed = self.hidden_norm(feature)
        q, k, v = self._heads(embedded, normed, positions)
        residual = normed if self.config.norm_before_residual else feature
        x, normalised = with_sharding(
            "b t d, b t d", *self.mlp_norm.add(residual, self.self_out.partials(attend(q, k, v)))
        )
        return x, self.mlp(normalised)

    def _heads(
        self, embedded: Array, normed: Array, positions: Array
    ) -> tuple[Array, Array, Array]:
        c, scales = self.config, None
        if c.qk_norm:
            scales = self.q_norm.weights(c.head_width), self.k_norm.weights(c.head_width)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        heads = split_heads(self.self_qkv(both), *c.angles(positions), scales, c.norm_eps)
        q, k, v = with_sharding(HEADS, *heads)
        return q, k, v


@struct.dataclass
class Eagle3Params(TableParams):
    """The draft's layer and its tables, some of which may be the target's."""

    module: ClassVar[type[Any]] = Eagle3Layer
    """Class of the draft's module, which a configuration makes."""

    def fused(self, config: Eagle3Config, hidden: Sequence[Array]) -> Array:
        """See :meth:`Eagle3Layer.fused`."""
        return applied(self.module.fused, self.module(config), self.layer, hidden)

    def keys_values(
        self, config: Eagle3Config, tokens: Array, feature: Array, positions: Array
    ) -> tuple[Array, Array]:
        """Keys and values of tokens ``[B, T]``; arguments as in :class:`Eagle3Layer`."""
        module, embedded = self.module(config), self.embedded(tokens)
        return applied(self.module.keys_values, module, self.layer, embedded, feature, positions)

    def level(
        self,
        config: Eagle3Config,
        tokens: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """The layer over tokens ``[B, T]``; arguments as in :class:`Eagle3Layer`."""
        module, embedded = self.module(config), self.embedded(tokens)
        given = self.layer, embedded, feature, positions, attend
        return applied(self.module.__call__, module, *given)


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
    """Entries of committed tokens that it sees besides the sinks, the last ones; all if absent."""
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
    def seen(self) -> DraftWindow:
        """Which entries it sees."""
        return DraftWindow(self.window, self.sinks)

    @cached_property
    def needs(self) -> Needs:
        """The hidden states that it fuses, of the tokens that its entries are made of."""
        hidden = tuple(sorted({*self.config.features}))
        if self.window is None:
            return Needs(hidden, queries=self.working.queries if self.working else ())
        # An entry has the feature of a token and the token after it: so has the oldest, and so
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
            positions = entries[:, None] + depth
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
                    q,
                    prefix,
                    Fresh(keys, values, mask),
                    scale=c.attention_scale,
                    implementation=self.attention,
                )

            hidden, feedback = draft.level(c, tokens, feature, positions, attend)
            outputs = write(outputs, feedback, start_index=nodes.start)
            return (keys, values, outputs), noise.scores(draft.logits(hidden), depth)

        return beam_search(
            view.pending, self.tree, score, (*rows, outputs), draft.vocabulary, self.attention
        )

    def past(self, state: Eagle3State, entries: Lengths) -> Prefix:
        """What is read of the cache. A chosen token stands for the entry of its feature."""
        if self.working is None:
            return self.seen.past(state.entries, entries)
        layer = state.entries.cache.layer(0, entries)
        table = self.working.table(state.choice, entries, layer.keys.shape[2])
        return self.working.read(layer, table)


@dataclass(frozen=True)
class Eagle3Options(FeatureOptions):
    """Options of an EAGLE-3 draft; none changes a token."""

    rope_theta: float | None = None
    """Its rotary base; as its file says if absent."""
    working: int | None = None
    """Tokens that it reads of all of a text, first and recent ones included, in place of a window:
    those that the target attends to. A multiple of 32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.working is not None:
            for name, value in (("window", self.window), ("sinks", self.sinks)):
                if value is not None:
                    raise ValueError(
                        f"working={self.working} and {name}={value} exclude each other: either a "
                        "part of all tokens is read, or only some are kept; leave one out"
                    )
            _ = self.cache_options  # Raises for what they cannot be.
        if self.rope_theta is not None and self.rope_theta < 1:
            raise ValueError(f"rope_theta={self.rope_theta:g} must be at least 1")

    @property
    def cache_options(self) -> WorkingCacheOptions:
        """The options of a working cache."""
        return WorkingCacheOptions(working=self.working)


@dataclass(frozen=True, eq=False)
class Eagle3Draft(Draft):
    """A draft layer, the tables it shares with its target, and what it sees of a text."""

    config: Eagle3Config
    params: Eagle3Params = field(repr=False)
    seen: DraftWindow = DraftWindow(None, 0)
    working: WorkingCache | None = None
    """What it reads of all entries; all of them if absent."""
    name: str = field(default="eagle3", init=False)

    @classmethod
    def bind(
        cls: type[D],
        config: Eagle3Config,
        params: Eagle3Params,
        target: TargetConfig,
        options: Eagle3Options,
        *,
        int8: bool = False,
        mesh: Mesh | None = None,
    ) -> D:
        """A draft with its options applied.

        Args:
          config: its configuration.
          params: its parameters, not in 8 bits.
          target: what it drafts for.
          options: its options.
          int8: read its weights and its LM head in 8 bits.
          mesh: what the parameters are spread over; one device if absent.
        """
        if options.yarn is not None:
            config = config.stretched(options.yarn)
        if int8:
            params = params.in_int8(mesh)
        seen = DraftWindow(None, 0)
        if options.working is None:
            made_for, trained = config.max_positions, config.window
            seen = options.seen(made_for, target, MAX_TREE_LEVELS, trained)
        return cls(config, params, seen, options.cache_options.working_cache(target))

    @property
    def default_trees(self) -> DefaultTrees:
        """Trees of up to 32 nodes where nodes cost time; else about the authors' 60."""
        small = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((2, 2))
        tree, half = TreeConfig((10,) * 6), TreeConfig((4, 8, 8, 8, 8), 32)
        narrow = TreeConfig((4, 4, 4))
        fewer = TreeConfig((8,) * 5, 32), TreeConfig((4,) * 4, 12)
        return DefaultTrees(
            small, (half, narrow), (tree, narrow), settled=False, together=(tree, *fewer)
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> Drafter:
        """The drafter that grows this tree."""
        return Eagle3Drafter(self.config, tree, attention, *self.seen, self.working, name=self.name)
