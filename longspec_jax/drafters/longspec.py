"""The LongSpec draft: one layer that reads the target's last-layer cache, and a ring of its K/V.

The layer (LongSpec section 3.1): ``x += self_attention(norm(x)); x += cross_attention(norm(x));
x += mlp(norm(x))``, on the target's token embeddings, read by the target's LM head without a final
norm. Self-attention comes first, so its keys and values depend only on (token, position): of a
prompt only the last 512 tokens are run.

The drafter is beam search. Self-attention sees the last 512 tokens. Cross-attention reads the
target's cache in place, so the draft stores nothing that grows with the context; or it reads the
chunks of it that the target attends to, or the selection of a partial forward.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, PyTree

from longspec_jax.axes import Array, Leaf, Lengths
from longspec_jax.checks import Whole
from longspec_jax.config.layers import BASE, RopeScaling, Rotary
from longspec_jax.config.target import EPSILON, LayerSizes, TargetConfig
from longspec_jax.config.tree import DEFAULT_TREE, TreeConfig
from longspec_jax.drafters.base import Committed, Drafter, Needs, Params, SamplingNoise, View
from longspec_jax.drafters.draft import DefaultTrees, Draft
from longspec_jax.drafters.retrieval.working_cache import (
    CachedSelection,
    WorkingCache,
    WorkingCacheOptions,
)
from longspec_jax.drafters.tables import TableParams
from longspec_jax.drafters.tree import Tree, beam_search, nodes_run
from longspec_jax.drafters.vocabulary import OwnTokens, check_vocabulary
from longspec_jax.models.layers import (
    GroupedQKV,
    Projection,
    RMSNorm,
    SwiGLU,
    applied,
    rotary_angles,
)
from longspec_jax.models.target import HEADS, scaled
from longspec_jax.ops.attention.attention_xla import capped
from longspec_jax.ops.attention.dispatch import prefix_attention, tree_attention
from longspec_jax.ops.attention.operands import Fresh, Prefix
from longspec_jax.ops.layer import add, rotate, split_heads, split_into
from longspec_jax.ops.matmul.quantised_weights import QuantisedWeights
from longspec_jax.ops.partitioned import with_sharding
from longspec_jax.sharding import param_shardings

WINDOW = 512
"""Tokens before it that a node's self-attention sees (LongSpec 3.1)."""


def check_vocab_size(vocab_size: int, target: TargetConfig) -> None:
    """Raise ValueError unless a draft was made for a target of as many tokens."""
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft was made for vocab_size={vocab_size}, the target has "
            f"{target.vocab_size}. A draft shares its target's vocabulary: load the draft that "
            "belongs to this target"
        )


@dataclass(frozen=True)
class DraftConfig(LayerSizes):
    """Shape of the one-layer LongSpec draft; all but the window follows the target."""

    model_width: Annotated[int, Whole()]
    mlp_width: Annotated[int, Whole()]
    num_heads: Annotated[int, Whole()]
    num_kv_heads: Annotated[int, Whole()]
    head_width: Annotated[int, Whole()]
    rope_theta: Annotated[float, BASE]
    rope_scaling: RopeScaling
    norm_eps: Annotated[float, EPSILON]
    dtype: str
    rotary_width: int | None = None
    """Dimensions of a head that are rotated, as in the target's layer that it reads."""
    embedding_factor: float = 1.0
    """Factor on the target's embeddings, as in the target."""
    logits_divisor: float = 1.0
    """What the logits are divided by, as in the target."""
    logit_cap: float | None = None
    """Bounds the logits softly after the division, as in the target."""
    window: Annotated[int, Whole()] = WINDOW
    """A node sees the tokens at most this many positions before it, and itself (LongSpec 3.1)."""

    @classmethod
    def for_target(
        cls, target: TargetConfig, *, window: int = WINDOW, dtype: str | None = None
    ) -> "DraftConfig":
        """The draft that fits a target: same widths and heads, same rotary embedding."""
        target.check_read("a LongSpec draft")
        return cls(
            model_width=target.model_width,
            mlp_width=target.mlp_width,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_width=target.head_width,
            rope_theta=target.rope_theta,
            rope_scaling=target.rope_scaling,
            norm_eps=target.norm_eps,
            dtype=dtype or target.dtype,
            rotary_width=target.rotary_width,
            embedding_factor=target.embedding_factor,
            logits_divisor=target.logits_divisor,
            logit_cap=target.logit_cap,
            window=window,
        )

    @property
    def rotary(self) -> Rotary:
        """The rotation of its heads, which is that of the keys it reads."""
        return Rotary(self.rope_theta, self.rope_scaling, self.rotary_width)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise unless this draft can read the target's embedding, head and keys and values."""
        target.check_read("a LongSpec draft")
        heads = "model_width", "num_kv_heads", "head_width"
        for name in (*heads, "rope_theta", "rope_scaling", "rotary_width"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ValueError(
                    f"the draft has {name}={ours} but the target {name}={theirs}. A draft reads "
                    "its target's embeddings and keys, so it works only with the target "
                    "it was trained for; load the draft that belongs to this target, or train one."
                )


class DraftOutput(NamedTuple):
    """What one forward of the draft over ``T`` tokens yields."""

    hidden: Array
    """``[B, T, D]``; the target's LM head turns it into logits."""
    keys: Array
    """Self-attention keys ``[B, T, K, H]``, rotary applied; or all among which they are."""
    values: Array
    """Self-attention values, likewise."""


class Among(NamedTuple):
    """Keys and values ``[B, U, K, H]``, and the first place that those of the tokens take there."""

    rows: tuple[Array, Array]
    first: int


class LongSpecLayer(nn.Module):
    """The draft layer as a pure function of embeddings; attention patterns are the caller's."""

    config: DraftConfig
    mlp_chunk: int = 0
    """Most tokens of a device whose MLP activations exist at once; 0 for all."""

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        heads = (c.num_heads, c.head_width)
        self.self_norm = RMSNorm(c.norm_eps, dtype)
        self.self_qkv = GroupedQKV(
            c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=True,
        )
        self.self_out = Projection(heads, (c.model_width,), dtype)
        self.cross_norm = RMSNorm(c.norm_eps, dtype)
        self.cross_q = Projection((c.model_width,), heads, dtype, bias=True)
        self.cross_out = Projection(heads, (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype, chunk=self.mlp_chunk)

    def __call__(
        self,
        embedded: Array,
        positions: Array,
        attend_self: Callable[[Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
        among: Among | None = None,
    ) -> DraftOutput:
        """Run the layer over ``T`` tokens.

        Args:
          embedded: the target's token embeddings ``[B, T, D]``.
          positions: rotary positions ``[B, T]``, the target's own; ``[B, 1]`` if all are the same.
          attend_self: ``(q, k, v) -> out`` over the window and the path to each token.
          attend_cross: ``q -> out`` over keys and values of the target.
          among: where keys and values go, of which ``attend_self`` gets all; nowhere if absent.
        """
        angles = _angles(self.config, positions)
        embedded = scaled(embedded, self.config.embedding_factor)
        qkv = self.self_qkv(self.self_norm(embedded))
        heads = split_heads(qkv, *angles) if among is None else split_into(qkv, *angles, *among)
        q, k, v = with_sharding(HEADS, *heads)
        attended = self.self_out.partials(attend_self(q, k, v))
        x, normalised = with_sharding("b t d, b t d", *self.cross_norm.add(embedded, attended))
        cross_q, *_ = with_sharding(HEADS, rotate(self.cross_q(normalised), angles), k, v)
        attended = self.cross_out.partials(attend_cross(cross_q))
        x, normalised = with_sharding("b t d, b t d", *self.mlp_norm.add(x, attended))
        [hidden] = with_sharding("b t d", add(x, self.mlp(normalised)))
        return DraftOutput(scaled(hidden, 1 / self.config.logits_divisor), k, v)

    def keys_values(self, embedded: Array, positions: Array) -> tuple[Array, Array]:
        """Self-attention keys and values of tokens, which depend only on (token, position)."""
        angles = _angles(self.config, positions)
        embedded = scaled(embedded, self.config.embedding_factor)
        _, k, v = split_heads(self.self_qkv(self.self_norm(embedded)), *angles)
        return k, v


@struct.dataclass
class LongSpecParams(TableParams):
    """The draft's own parameters and the two tables it shares with the target."""

    whole: Leaf[Float[Array, "V D"]] | None = None
    """The target's LM head, of which rows of a row's own tokens are read; None where no token is
    proposed for having occurred."""
    listed: Leaf[Bool[Array, " V"]] | None = None
    """Which tokens are in the vocabulary, where there is the whole head."""

    def restricted(
        self, vocabulary: Int[Array, " v"], own_tokens: bool = False
    ) -> "LongSpecParams":
        """Propose only these tokens, the most frequent ones: a cheaper LM head at every level.

        Verification stays over the whole vocabulary, so the output is unchanged. Call it before
        :meth:`in_int8`.

        Args:
          vocabulary: ids of the tokens.
          own_tokens: propose what a row's text holds, too
            (:class:`~longspec_jax.drafters.vocabulary.OwnTokens`).
        """
        if isinstance(self.head, QuantisedWeights):
            raise ValueError("the draft is in 8 bits already; restrict it before in_int8")
        rows = jnp.take(self.head, vocabulary, axis=0)
        fewer = dataclasses.replace(self, head=rows, vocabulary=vocabulary, own_head=True)
        if not own_tokens:
            return fewer
        listed = jnp.zeros(self.head.shape[0], bool).at[vocabulary].set(True)
        return dataclasses.replace(fewer, whole=self.head, listed=listed)

    @property
    def own_params(self) -> Any:
        """The parameters that are not shared with the target."""
        return *super().own_params, self.listed

    @property
    def proposable(self) -> int:
        """How many tokens it may propose."""
        head = self.head
        return head.out_axes[0] if isinstance(head, QuantisedWeights) else head.shape[0]

    def keys_values(
        self, config: DraftConfig, tokens: Array, positions: Array
    ) -> tuple[Array, Array]:
        """Self-attention keys and values of tokens ``[B, T]`` at positions ``[B, T]``."""
        embedded = self.embedded(tokens)
        return applied(
            LongSpecLayer.keys_values, LongSpecLayer(config), self.layer, embedded, positions
        )

    def run(
        self,
        config: DraftConfig,
        tokens: Array,
        positions: Array,
        attend_self: Callable[[Array, Array, Array], Array],
        attend_cross: Callable[[Array], Array],
        among: Among,
    ) -> DraftOutput:
        """The layer over tokens ``[B, T]``; the rest as in :class:`LongSpecLayer`."""
        return applied(
            LongSpecLayer.__call__,
            LongSpecLayer(config),
            self.layer,
            self.embedded(tokens),
            positions,
            attend_self,
            attend_cross,
            among,
        )


def _angles(config: DraftConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines at positions ``[B, T]``."""
    return rotary_angles(positions, config.head_width, config.rotary)


@struct.dataclass
class LongSpecState:
    """A ring of the last ``W`` tokens' self-attention K/V: the draft's only memory.

    The token at position ``p`` lives in slot ``p % W``; which positions are present follows only
    from the committed length.
    """

    keys: Leaf[Float[Array, "B W K H"]]
    values: Leaf[Float[Array, "B W K H"]]
    choice: CachedSelection | None = None
    """What is read of the target's cache, if not all is; a few numbers."""
    own: OwnTokens | None = None
    """Tokens of the row outside the draft vocabulary, where they are proposed."""


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
    own_tokens: bool = False
    """Whether it proposes what a row's text holds besides its vocabulary."""
    name: str = field(default="longspec", init=False)

    def __post_init__(self) -> None:
        if self.tree.num_levels >= self.config.window:
            raise ValueError(
                f"a tree of {self.tree.num_levels} levels does not fit the draft window of "
                f"{self.config.window} tokens; use fewer levels"
            )

    @cached_property
    def needs(self) -> Needs:
        """The last ``W`` tokens, what a working cache is chosen by, and the text if it is used."""
        queries = self.working.queries if self.working else ()
        return Needs(queries=queries, recent=self.config.window, text=self.own_tokens)

    def begin(self, params: Params, batch: int, capacity: int) -> LongSpecState:
        """An empty ring, whatever the capacity."""
        c = self.config
        shape = (batch, c.window, c.num_kv_heads, c.head_width)
        keys, values = (jnp.zeros(shape, jnp.dtype(c.dtype)) for _ in range(2))
        own = OwnTokens.begin(batch) if self.own_tokens else None
        return LongSpecState(keys, values, self.working and self.working.begin(batch), own)

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
        own = state.own
        if own is not None:
            assert draft.listed is not None, "own tokens are those that are not listed"
            own = own.extended(committed, draft.listed)
        return LongSpecState(*ring, choice, own)

    def before_round(self, params: Params, state: LongSpecState, view: View) -> LongSpecState:
        """Choose what is read of the target's cache, in the rows that need it."""
        return replace(state, choice=self.working and self.working.before_round(state.choice, view))

    def propose(
        self, params: Params, state: LongSpecState, view: View, noise: SamplingNoise
    ) -> Tree:
        """Grow the tree level by level; the last level's nodes are never run themselves."""
        window = self.config.window
        draft: LongSpecParams = params.draft
        vocabulary, more = draft.vocabulary, None
        if state.own is not None:
            more = MoreTokens.of_rows(draft, state.own)
            vocabulary = more.vocabulary
        if vocabulary is not None:
            noise = noise.among(vocabulary)
        ring = ring_positions(view.position, window)
        # One buffer for ring and tree: a level's K/V are written after the ring as it is run.
        nodes_kept = nodes_run(self.tree)
        slack = ((0, 0), (0, nodes_kept), (0, 0), (0, 0))
        rows = jnp.pad(state.keys, slack), jnp.pad(state.values, slack)
        past = self._past(state, view)

        def score(
            rows: tuple[Array, Array], tree: Tree, nodes: slice, depth: int
        ) -> tuple[tuple[Array, Array], Array]:
            tokens = tree.tokens[:, nodes]
            position = view.position[:, None] + depth
            inside = ring_mask(ring, jnp.broadcast_to(position, tokens.shape), window)
            mask = jnp.concatenate([inside, tree.mask[:, nodes, :nodes_kept]], axis=2)

            def attend_self(q: Array, k: Array, v: Array) -> Array:
                fresh = Fresh(k, v, mask)
                return tree_attention(q, fresh, dtype=q.dtype, implementation=self.attention).out

            attend = attend_self, partial(self._attend_cross, past)
            places = Among(rows, window + nodes.start)
            hidden, keys, values = draft.run(self.config, tokens, position, *attend, places)
            logits = capped(draft.logits(hidden), self.config.logit_cap)
            if more is not None:
                logits = more.joined(logits, hidden, self.config.logit_cap)
            return (keys, values), noise.scores(logits, depth)

        return beam_search(view.pending, self.tree, score, rows, vocabulary, self.attention)

    def _past(self, state: LongSpecState, view: View) -> Prefix:
        """What cross-attention reads of the target."""
        if self.working is None:
            return view.read_layer()
        layer = view.cache.read(view.length)
        table = self.working.table(state.choice, layer.length, layer.keys.shape[2])
        return self.working.read(layer, table)

    def _attend_cross(self, past: Prefix, q: Array) -> Array:
        return prefix_attention(q, past, dtype=q.dtype, implementation=self.attention).out


class MoreTokens(NamedTuple):
    """Tokens that each row proposes besides the draft vocabulary, with their LM head rows."""

    vocabulary: Int[Array, "B m"]
    """The draft vocabulary, then the row's own tokens."""
    head: Float[Array, "B X D"]
    possible: Bool[Array, "B X"]
    """Which of the row's own are not empty slots, nor repetitions of a token."""

    @classmethod
    def of_rows(cls, draft: LongSpecParams, own: OwnTokens) -> "MoreTokens":
        """The tokens of some rows; of their LM head what they need is gathered once a round."""
        assert draft.vocabulary is not None and draft.whole is not None
        listed = jnp.broadcast_to(draft.vocabulary, (len(own.tokens), draft.proposable))
        vocabulary = jnp.concatenate([listed, own.tokens], axis=1)
        head = jnp.take(draft.whole, own.tokens, axis=0)
        # Without a barrier XLA would compare the slots with one another again at every level.
        return cls(vocabulary, head, jax.lax.optimization_barrier(own.distinct()))

    def joined(
        self, logits: Float[Array, "B w v"], hidden: Float[Array, "B w D"], cap: float | None
    ) -> Float[Array, "B w m"]:
        """Logits of all tokens after those of the draft vocabulary, -inf for those not possible.

        Args:
          logits: over the draft vocabulary, bounded already.
          hidden: of the nodes.
          cap: bounds the others softly.
        """
        products = jnp.einsum("bwd,bxd->bwx", hidden, self.head, preferred_element_type=jnp.float32)
        own = jnp.where(self.possible[:, None], capped(products, cap), -jnp.inf)
        # Else it computes a single node's products inside the concatenation, each by one thread:
        # 87 us of an H200 for Llama 3's width.
        return jnp.concatenate([logits, jax.lax.optimization_barrier(own)], axis=2)


def ring_positions(length: Lengths, window: int) -> Int[Array, "B W"]:
    """Position of the token in every ring slot: the latest ``p < length`` with ``p % W == slot``.

    Negative where the row has fewer tokens than slots: the slot is empty.
    """
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(window)) % window


def ring_mask(
    ring: Int[Array, "B W"], positions: Int[Array, "B T"], window: int
) -> Bool[Array, "B T W"]:
    """Which ring slots each query sees: present ones at most ``window`` positions before it."""
    distance = positions[:, :, None] - ring[:, None, :]
    return (ring[:, None, :] >= 0) & (distance <= window)


@dataclass(frozen=True)
class LongSpecOptions(WorkingCacheOptions):
    """Options of a LongSpec draft; all make it cheaper, and none changes a token.

    With a working cache, cross-attention reads chosen chunks of the target's last layer.
    """

    vocabulary: int | None = None
    """How many tokens it may propose besides those that a row's text holds: the first ones of the
    table next to the draft, which ``python -m train.vocabulary`` makes; as many as the target has
    for all.

    If absent, those that the tokenizer learned first, on a GPU with a large target in 16 bits whose
    vocabulary is so large that it pays; else all."""
    int8: bool | None = None
    """Read its weights and a copy of the target's LM head in 8 bits: half the bytes.

    If absent, on a GPU with a large target in 16 bits, where it pays."""


@dataclass(frozen=True, eq=False)
class LongSpecDraft(Draft):
    """A draft layer and the tables it shares with its target."""

    config: DraftConfig
    params: LongSpecParams
    name: str = "longspec"
    working: WorkingCache | None = None
    """What cross-attention reads of the target's cache; all of it if absent."""

    @classmethod
    def bind(
        cls,
        config: DraftConfig,
        layer: PyTree,
        target_params: PyTree,
        *,
        vocabulary: ArrayLike | Sequence[object] | None = None,
        own_tokens: bool = False,
        int8: bool = False,
        working: WorkingCache | None = None,
        mesh: Mesh | None = None,
    ) -> "LongSpecDraft":
        """A draft for a loaded target.

        Args:
          layer: parameters of :class:`~longspec_jax.drafters.longspec.LongSpecLayer`.
          target_params: the target's parameters, whose embedding and LM head the draft reads.
          vocabulary: ids of the tokens that it may propose, ``[v]``; all if absent.
          own_tokens: with a vocabulary, also propose what each row's text holds; on one device.
          int8: read the layer and a copy of the LM head in 8 bits.
          working: what cross-attention reads of the target's cache; all of it if absent.
          mesh: what the parameters are spread over; one device if absent.
        """
        params = LongSpecParams.with_target_tables(target_params, layer)
        if vocabulary is not None:
            tokens = check_vocabulary(vocabulary, params.embedding.shape[0])
            params = params.restricted(jnp.asarray(tokens), own_tokens)
        if int8:
            params = params.in_int8(mesh)
        elif mesh is not None and vocabulary is not None:
            head = jax.device_put(params.head, param_shardings(mesh, {"head": params.head})["head"])
            params = replace(params, head=head)
        return cls(config, params, working=working)

    @property
    def default_trees(self) -> DefaultTrees:
        """Chains and small trees where nodes cost time; the paper's where they are nearly free.

        The more rows decode together, the fewer of its nodes pay.
        """
        small = TreeConfig((1, 1, 1)), TreeConfig((1, 1)), TreeConfig((2, 2))
        fewer = (replace(DEFAULT_TREE, budget=nodes) for nodes in (32, 16))
        return DefaultTrees(
            small,
            (TreeConfig((4, 8, 8, 8, 8), 32), TreeConfig((4, 4, 4))),
            (DEFAULT_TREE,),
            together=(DEFAULT_TREE, *fewer),
        )

    def drafter(self, tree: TreeConfig, attention: str | None = None) -> LongSpecDrafter:
        """The drafter that grows this tree."""
        own = self.params.whole is not None
        return LongSpecDrafter(self.config, tree, attention, self.working, own)
