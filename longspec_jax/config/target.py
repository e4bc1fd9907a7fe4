"""The configuration of a target: a list of layers, described by data."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from longspec_jax.checks import LARGEST_NUMBER, Real, Truth, Whole, shown
from longspec_jax.config.layers import (
    BASE,
    FACTOR,
    SMALLEST_FACTOR,
    HeadScales,
    HeadsConfig,
    LayerConfig,
    QueryScaling,
    RecurrenceConfig,
    RopeScaling,
    Rotary,
)
from longspec_jax.config.names import KV_DTYPES
from longspec_jax.schema import Checked

MAX_LAYERS = 1024
"""Most layers of a target: every layer is a part of its own of the compiled program."""
SMALLEST_EPS = 1e-30
"""Least epsilon of a norm that float32 can still add and divide by."""
EPSILON = Real(SMALLEST_EPS, 1)
"""Of a norm."""


class LayerSizes(Checked):
    """A configuration of layers, of a target or of a draft like it, whose heads fit together."""

    num_heads: int
    num_kv_heads: int
    head_width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        HeadsConfig(self.num_kv_heads, self.head_width).check(self.num_heads)


@dataclass(frozen=True)
class TargetConfig(LayerSizes):
    """Shape and conventions of a target: a list of layers, described by data."""

    architecture: str
    """Hugging Face class name, such as ``LlamaForCausalLM``: what an export declares itself to
    be."""
    vocab_size: Annotated[int, Whole()]
    model_width: Annotated[int, Whole()]
    mlp_width: Annotated[int, Whole()]
    num_layers: Annotated[int, Whole(1, MAX_LAYERS)]
    num_heads: Annotated[int, Whole()]
    num_kv_heads: Annotated[int, Whole()]
    """With ``head_width`` of all layers whose kind has no ``heads``."""
    head_width: Annotated[int, Whole()]
    max_positions: Annotated[int, Whole()]
    """Positions the model was made for; prompts and generation stay below."""
    rope_theta: Annotated[float, BASE] = 10000.0
    """With the next two the rotation of :attr:`read_layer`, which a draft follows, and of all
    layers where ``kinds`` are absent."""
    rope_scaling: RopeScaling = None
    rotary_width: int | None = None
    """Dimensions of a head that are rotated; all of them if absent."""
    kinds: tuple[LayerConfig, ...] = ()
    """The kinds of layers; if absent, all have full attention and the rotation above."""
    pattern: tuple[int, ...] = ()
    """The kind of each layer, as an index of ``kinds``; empty without them."""
    gated_attention: bool = False
    """What a head attends to is multiplied by a sigmoid of the layer's input (Qwen3-Next)."""
    attention_cap: Annotated[float | None, Real(SMALLEST_FACTOR, LARGEST_NUMBER)] = None
    """Bounds the scores of attention softly: ``cap * tanh(score / cap)`` (Gemma 2)."""
    norm_eps: Annotated[float, EPSILON] = 1e-5
    qkv_bias: Annotated[bool, Truth()] = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: Annotated[bool, Truth()] = False
    """A bias on what leaves attention (gpt-oss)."""
    attention_sinks: bool = False
    """A learnt score of every head in its softmax's denominator (gpt-oss)."""
    qk_norm: bool = False
    """RMS normalisation of every query and key head before the rotation (Qwen3)."""
    value_norm: bool = False
    """RMS normalisation of every value head, without weights (Gemma 4)."""
    wide_qk_norm: bool = False
    """RMS normalisation of all query heads together, and of all key heads (OLMo 2)."""
    pre_norms: bool = True
    """A norm on what enters attention and MLP."""
    post_norms: bool = False
    """A norm on what leaves them (OLMo 2, GLM-4)."""
    offset_norms: bool = False
    """Norms multiply by ``1 + scale`` (Gemma)."""
    gelu: bool = False
    """The MLP's gate is a GELU by its tanh formula, not a SiLU (Gemma)."""
    query_scaling: QueryScaling | None = None
    """A factor on queries that grows with their position."""
    attention_scale: Annotated[float | None, FACTOR] = None
    """Factor on attention scores; ``head_width ** -0.5`` if absent."""
    embedding_factor: Annotated[float, FACTOR] = 1.0
    """Factor on embeddings."""
    residual_factor: Annotated[float, FACTOR] = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    layer_factors: bool = False
    """A learnt factor of every layer on the residual stream after it (Gemma 4)."""
    layer_inputs: Annotated[int | None, Whole()] = None
    """Width of what every token gives to each layer: of a table of its own, and of its embedding.
    It enters the stream after the MLP (Gemma 4 E4B and E2B)."""
    logits_divisor: Annotated[float, FACTOR] = 1.0
    """Logits are divided by it."""
    logit_cap: Annotated[float | None, FACTOR] = None
    """Logits are ``cap * tanh(logits / cap)``, after the division."""
    tied_embeddings: bool = False
    """The LM head is the embedding table."""
    dtype: str = "bfloat16"
    """Parameters and activations; norms, softmax, angles, loss and acceptance are float32."""
    kv_dtype: str | None = None
    """What keys and values are rounded to before anything attends to them, and cached as: one of
    :data:`KV_DTYPES`. ``dtype`` if absent."""
    kv_scales: tuple[HeadScales | None, ...] = ()
    """Of every layer, what keys and values are divided by before they are rounded to ``kv_dtype``;
    None for 1. Empty if all are 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rotary.check_fits(self.head_width)
        for kind in self.kinds:
            heads = self.heads(kind)
            heads.check(self.num_heads)
            if kind.rotary is not None:
                kind.rotary.check_fits(heads.head_width)
        if not (self.pre_norms or self.post_norms):
            raise ValueError("a layer needs norms: pre_norms or post_norms must be True")
        if self.kinds or self.pattern:
            self._check_kinds()
        self._check_cached()

    def _check_cached(self) -> None:
        """Raise unless keys and values are cached in a known dtype, with scales for it."""
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_dtype={shown(self.kv_dtype)} must be one of {', '.join(KV_DTYPES)}, or left "
                "out to cache keys and values as they are computed"
            )
        if self.kv_scales and (self.kv_dtype is None or len(self.kv_scales) != self.num_layers):
            raise ValueError(
                f"kv_scales has {len(self.kv_scales)} entries and needs one for each of the "
                f"{self.num_layers} layers, and a kv_dtype"
            )
        for index, scales in enumerate(self.kv_scales):
            heads = self.heads(self.layer(index)).num_kv_heads
            for each in () if scales is None else (scales.keys, scales.values):
                if len(each) not in (1, heads):
                    raise ValueError(
                        f"kv_scales: layer {index} has {len(each)} scales; it needs 1, or one for "
                        f"each of {heads} heads"
                    )

    def scales(self, index: int) -> HeadScales | None:
        """The scales of a layer's cached keys and values; None if all are 1."""
        return self.kv_scales[index] if self.kv_scales else None

    def _check_kinds(self) -> None:
        """Raise unless every layer has a kind, and the read layer's rotation is the target's."""
        if len(self.pattern) != self.num_layers or {*self.pattern} != {*range(len(self.kinds))}:
            raise ValueError(
                f"pattern={shown(self.pattern)} must name one of the {len(self.kinds)} kinds for "
                f"each of the {self.num_layers} layers, and every kind must be used"
            )
        for index, kind in enumerate(self.layers):
            if kind.keys_of is None:
                continue
            read = self.layers[kind.keys_of] if 0 <= kind.keys_of < index else kind
            if read.keys_of is not None or (read.window, read.heads) != (kind.window, kind.heads):
                raise ValueError(
                    f"layer {index} reads the keys of layer {kind.keys_of}, which must come before "
                    "it, have keys of its own, and the same window and heads"
                )
        rotary = self.layer(self.read_layer).rotary
        if rotary not in (None, self.rotary):
            raise ValueError(
                f"layer {self.read_layer}, which drafts read, has {rotary}; rope_theta, "
                "rope_scaling and rotary_width must be those of this layer"
            )
        if len(self.recurrent_layers) == self.num_layers:
            raise ValueError("one layer at least must have attention: prompts are measured by it")

    @cached_property
    def rotary(self) -> Rotary:
        """The rotation of the layer that drafts read."""
        return Rotary(self.rope_theta, self.rope_scaling, self.rotary_width)

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The description of every layer."""
        if not self.kinds:
            return (LayerConfig(self.rotary),) * self.num_layers
        return tuple(self.kinds[kind] for kind in self.pattern)

    def layer(self, index: int) -> LayerConfig:
        """The description of a layer."""
        return self.layers[index]

    def heads(self, kind: LayerConfig) -> HeadsConfig:
        """The heads of a kind of layers."""
        return kind.heads or HeadsConfig(self.num_kv_heads, self.head_width)

    @property
    def is_sparse(self) -> bool:
        """Whether any layer has experts."""
        return any(kind.experts is not None for kind in self.kinds)

    @property
    def read_layer(self) -> int:
        """The layer whose keys and values drafts read.

        The last one that sees the whole context, and of these one with positions if there is any:
        a draft that reads keys without positions cannot tell near tokens from far ones. The last
        layer if all have windows.
        """
        full = self.full_layers
        rotated = [index for index in full if self.layer(index).rotary is not None]
        return (rotated or full or [self.num_layers - 1])[-1]

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend to the whole context, with keys of their own."""
        alone = None, None, None
        kinds = enumerate(self.layers)
        return tuple(i for i, k in kinds if (k.window, k.recurrence, k.keys_of) == alone)

    def source(self, index: int) -> int:
        """The layer whose keys and values a layer reads: itself, or another."""
        read = self.layer(index).keys_of
        return index if read is None else read

    @cached_property
    def recurrent_layers(self) -> Mapping[int, RecurrenceConfig]:
        """The layers with a recurrence."""
        kinds = enumerate(self.layers)
        return {i: kind.recurrence for i, kind in kinds if kind.recurrence is not None}

    def check_read(self, reader: str) -> None:
        """Raise ValueError unless some layer sees the whole context, which the reader needs."""
        if not self.full_layers:
            raise ValueError(
                f"{reader} reads a layer that sees the whole context, and all layers of this "
                "target have a window or a state; use a draft that reads none, such as ngram"
            )

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head of a full layer (``G``)."""
        return self.num_heads // self.num_kv_heads
