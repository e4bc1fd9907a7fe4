"""EAGLE-1, EAGLE-2 and multi-token prediction: layers over the target's last hidden state.

The target's hidden state of a token, after the final norm, and the embedding of the token after
it are projected to one vector of the model's width, which a layer reads. The target's own LM head
makes logits of its output. The output stands in for the hidden state that only the target knows, so
the next level of a tree goes on from it. The drafter is EAGLE-3's.

- EAGLE (arXiv 2401.15077, section 3): no norm before the attention, and none after the layer. Both
  papers train the same weights; EAGLE-2's tree, the best paths under a budget, is the one that all
  drafters here grow.
- MTP (arXiv 2412.19437, section 2.2; arXiv 2509.18362): the two inputs are normed, each by itself.
  One more layer of the target reads them, with all that the target's layers have, and a norm of its
  own precedes the LM head. One layer serves all levels, and what it feeds back is normed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from longspec_jax.axes import Array
from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary
from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.draft import DefaultTrees
from longspec_jax.drafters.eagle3 import (
    Eagle3Config,
    Eagle3Draft,
    Eagle3Options,
    Eagle3Params,
    LevelOutput,
)
from longspec_jax.drafters.tables import check_sizes
from longspec_jax.models.layers import GroupedQKV, Projection, RMSNorm, SwiGLU, rotary_angles
from longspec_jax.models.target import HEADS, Layer
from longspec_jax.ops.layer import add, split_heads
from longspec_jax.ops.partitioned import with_sharding


@dataclass(frozen=True)
class EagleConfig(Eagle3Config):
    """Shape of an EAGLE-1 or 2 draft; ``features`` holds what leaves the target's final norm."""

    fuse_bias: bool = True
    """Whether the projection of embedding and hidden state has a bias."""

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's hidden states and tokens."""
        check_sizes(self.target_width, self.vocab_size, target)


class EagleLayer(nn.Module):
    """The draft as pure functions of hidden states and embeddings; attention is the caller's.

    Arguments and results as in :class:`longspec_jax.drafters.eagle3.Eagle3Layer`.
    """

    config: EagleConfig

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.fuse = Projection((2 * c.model_width,), (c.model_width,), dtype, c.fuse_bias)
        self.self_qkv = GroupedQKV(
            c.model_width,
            c.num_kv_heads,
            c.num_heads // c.num_kv_heads,
            c.head_width,
            dtype,
            bias=c.qkv_bias,
        )
        self.self_out = Projection((c.num_heads, c.head_width), (c.model_width,), dtype)
        self.mlp_norm = RMSNorm(c.norm_eps, dtype)
        self.mlp = SwiGLU(c.model_width, c.mlp_width, dtype)

    def fused(self, hidden: Sequence[Array]) -> Array:
        """The hidden state itself."""
        [feature] = hidden
        return feature

    def keys_values(self, embedded: Array, feature: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values ``[B, T, K, H]`` of tokens."""
        _, k, v = self._heads(self._joined(embedded, feature), positions)
        return k, v

    def __call__(
        self,
        embedded: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """Run the layer over ``T`` tokens."""
        joined = self._joined(embedded, feature)
        attended = self.self_out.partials(attend(*self._heads(joined, positions)))
        x, normed = with_sharding("b t d, b t d", *self.mlp_norm.add(joined, attended))
        [out] = with_sharding("b t d", add(x, self.mlp(normed)))
        return LevelOutput(out, out)

    def _joined(self, embedded: Array, feature: Array) -> Array:
        both = jnp.concatenate([embedded, feature], axis=-1)
        [joined] = with_sharding("b t d", self.fuse(both))
        return joined

    def _heads(self, joined: Array, positions: Array) -> tuple[Array, Array, Array]:
        c = self.config
        heads = split_heads(self.self_qkv(joined), *c.angles(positions), None, c.norm_eps)
        q, k, v = with_sharding(HEADS, *heads)
        return q, k, v


@struct.dataclass
class EagleParams(Eagle3Params):
    """The draft's layer and its tables; the LM head is the target's."""

    module = EagleLayer


@dataclass(frozen=True)
class MtpConfig(EagleConfig):
    """Shape of an MTP layer; ``features`` holds what leaves the target's final norm.

    What is beyond an EAGLE layer's is as in :class:`~longspec_jax.config.target.TargetConfig`.
    """

    hidden_first: bool = False
    """Whether the projection reads the hidden state before the embedding."""
    rotary_width: int | None = None
    gated_attention: bool = False
    offset_norms: bool = False
    experts: ExpertsConfig | None = None

    @classmethod
    def of(cls, layer: TargetConfig, kind: LayerConfig, target_layers: int) -> "MtpConfig":
        """One more layer of a target.

        Args:
          layer: the target.
          kind: the layer of it that this one is like; it has attention and no window.
          target_layers: of the target that the layer drafts for.
        """
        return cls(
            model_width=layer.model_width,
            target_width=layer.model_width,
            mlp_width=layer.mlp_width,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_width=layer.head_width,
            vocab_size=layer.vocab_size,
            proposable=layer.vocab_size,
            features=(target_layers,),
            max_positions=layer.max_positions,
            rope_theta=layer.rope_theta,
            rope_scaling=layer.rope_scaling,
            rotary_width=layer.rotary_width,
            norm_eps=layer.norm_eps,
            qkv_bias=layer.qkv_bias,
            qk_norm=layer.qk_norm,
            gated_attention=layer.gated_attention,
            offset_norms=layer.offset_norms,
            experts=kind.experts,
            dtype=layer.dtype,
            normed_head=False,
            fuse_bias=False,
        )

    @property
    def rotary(self) -> Rotary:
        """The rotation of its heads."""
        return Rotary(self.rope_theta, self.rope_scaling, self.rotary_width)

    @property
    def attention_scale(self) -> None:
        """The usual factor: the angles of the layer have that of YaRN, as a target's have."""

    @property
    def kind(self) -> LayerConfig:
        """The kind of the layer, one of those that a target may have."""
        return LayerConfig(self.rotary, experts=self.experts)

    @cached_property
    def layer(self) -> TargetConfig:
        """A target with only this layer."""
        return replace(
            self.plain_layer,
            rotary_width=self.rotary_width,
            kinds=(self.kind,),
            pattern=(0,),
            gated_attention=self.gated_attention,
            offset_norms=self.offset_norms,
        )


class MtpLayer(nn.Module):
    """The layer as pure functions of hidden states and embeddings; attention is the caller's.

    Arguments and results as in :class:`longspec_jax.drafters.eagle3.Eagle3Layer`.
    """

    config: MtpConfig

    def setup(self) -> None:
        """Declare the submodules."""
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        norm = partial(RMSNorm, c.norm_eps, dtype, c.offset_norms)
        self.embedding_norm, self.hidden_norm, self.output_norm = norm(), norm(), norm()
        self.fuse = Projection((2 * c.model_width,), (c.model_width,), dtype)
        self.layer = Layer(c.layer, kind=c.kind)

    def fused(self, hidden: Sequence[Array]) -> Array:
        """The hidden state itself."""
        [feature] = hidden
        return feature

    def keys_values(self, embedded: Array, feature: Array, positions: Array) -> tuple[Array, Array]:
        """Keys and values ``[B, T, K, H]`` of tokens."""
        normed = self.layer.attention_norm(self._joined(embedded, feature))
        _, k, v = self.layer.attention(normed, self._angles(positions), lambda q, k, v: q)
        return k, v

    def __call__(
        self,
        embedded: Array,
        feature: Array,
        positions: Array,
        attend: Callable[[Array, Array, Array], Array],
    ) -> LevelOutput:
        """Run the layer over ``T`` tokens."""
        joined = self._joined(embedded, feature)
        x, delta, _, _ = self.layer(joined, None, self._angles(positions), attend)
        [out] = with_sharding("b t d", self.output_norm.add(x, delta)[1])
        return LevelOutput(out, out)

    def _joined(self, embedded: Array, feature: Array) -> Array:
        parts = self.embedding_norm(embedded), self.hidden_norm(feature)
        both = jnp.concatenate(parts[::-1] if self.config.hidden_first else parts, axis=-1)
        [joined] = with_sharding("b t d", self.fuse(both))
        return joined

    def _angles(self, positions: Array) -> tuple[Array, Array]:
        return rotary_angles(positions, self.config.head_width, self.config.rotary)


@struct.dataclass
class MtpParams(EagleParams):
    """The layer and the target's tables."""

    module = MtpLayer


@dataclass(frozen=True)
class EagleOptions(Eagle3Options):
    """Options of an EAGLE-1 or 2 draft, or of an MTP layer; none changes a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            raise ValueError(
                f"layers={self.layers!r}: an EAGLE-1 or 2 draft reads the last hidden state; leave "
                "layers out"
            )


@dataclass(frozen=True, eq=False)
class EagleDraft(Eagle3Draft):
    """A layer over the last hidden state, and the target's tables."""

    name: str = field(default="eagle", init=False)


@dataclass(frozen=True, eq=False)
class MtpDraft(Eagle3Draft):
    """An MTP layer, and the target's tables."""

    name: str = field(default="mtp", init=False)

    @property
    def default_trees(self) -> DefaultTrees:
        """Trees of 8 to 16 nodes: such layers were trained for one level or few.

        Of targets with recurrent layers a tree of 64 nodes takes more than twice a plain step.
        """
        few, tree, chain = TreeConfig((3, 3, 3), 8), TreeConfig((4,) * 5, 16), TreeConfig((1,) * 3)
        small = super().default_trees.cpu
        return DefaultTrees(
            small, (few, tree, chain), (tree, few, chain), settled=False, together=(few, chain)
        )
