"""The families of targets: what a Hugging Face class fixes beyond the numbers in ``config.json``.

A family is an entry of :data:`FAMILIES`. Nothing else asks for a family by name: what an entry says
becomes fields of :class:`longspec_jax.config.target.TargetConfig`, and the names of stored tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from longspec_jax.config.layers import LayerConfig, QueryScaling
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.gemma import (
    CAPS,
    GLOBAL_HEADS,
    gemma2_dialect,
    gemma4_dialect,
    raw_gemma,
    raw_gemma4,
    read_gemma,
    read_gemma4,
)
from longspec_jax.weights.json_files import JsonObject, Keys
from longspec_jax.weights.layer_kinds import (
    described,
    raw_experts,
    raw_gpt_oss,
    raw_recurrences,
    raw_sparse_recurrences,
    read_experts,
    read_gpt_oss,
    read_recurrences,
)
from longspec_jax.weights.rope import raw_rope, rope_entry, rotary_of

Fields = Mapping[str, Any]
"""Fields of a :class:`TargetConfig` by name."""


@dataclass(frozen=True)
class Names:
    """Stored names of a layer's tensors, without ``.weight`` and ``.bias``.

    One name for several parts is one tensor whose rows are the parts, one after the other.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    recurrence: str = "linear_attn"
    recurrent_rows: tuple[tuple[str, str], ...] = (
        ("in_proj_qkv", "(J X) D"),
        ("in_proj_qkv", "(J X) D"),
        ("in_proj_qkv", "(J Z) D"),
        ("in_proj_z", "(J Z) D"),
    )
    """What makes query, key, values and gate of a recurrence, and how its rows are stored."""
    rate_rows: tuple[tuple[str, str], ...] = (("in_proj_b", "(J P) D"), ("in_proj_a", "(J P) D"))
    """What makes the strength of writing and the decay."""
    stacked_experts: bool = False
    """Whether a layer's experts are one tensor, as gpt-oss names them."""


def _nothing(*_: object) -> dict[str, Any]:
    return {}


def _as_it_is(raw: JsonObject) -> JsonObject:
    return raw


@dataclass(frozen=True)
class Family:
    """What a Hugging Face class fixes beyond the numbers in its ``config.json``."""

    model_type: str
    fixed: Fields = field(default_factory=dict)
    """Fields that are always so."""
    keys: Keys = field(default_factory=dict)
    """Fields beyond those of all families, and where a file has them."""
    read: Callable[[JsonObject, Fields], Fields] = _nothing
    """Fields that are no single key, given the file and the fields that are known."""
    write: Callable[[TargetConfig], dict[str, Any]] = _nothing
    """The inverse of ``read``: keys that replace those that all families have."""
    accepts: frozenset[str] = frozenset()
    """Keys that are refused of other families, and computed of this one; those that stand in the
    entry of the rotary scaling as well."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What Hugging Face assumes of keys that are absent."""
    mlp_width: str = "intermediate_size"
    """The key of the MLP's width."""
    interleaved: bool = False
    """Whether the pairs that a rotation turns are neighbours."""
    window_switch: str | None = None
    """The key that turns ``sliding_window`` on; ``None`` where the family has no windows."""
    default_window: int | None = None
    """``sliding_window`` where the key is absent; null means none."""
    windows: Callable[[JsonObject, int], bool] = lambda raw, index: True
    """Whether a layer has the window where the file has no ``layer_types``; usually all have it."""
    local_theta: str | None = None
    """The key of the rotary base of layers with a window, which take no scaling; None where they
    rotate as the others."""
    full_heads: Mapping[str, str] = field(default_factory=dict)
    """Keys of the heads of layers without a window, by those of the others'; empty where all have
    the same."""
    dialect: Callable[[JsonObject], JsonObject] = _as_it_is
    """A file of the family in the form that is read."""
    names: Names = Names()


_QUERY_SCALING: Keys = {
    "beta": "llama_4_scaling_beta",
    "original_max_positions": "original_max_position_embeddings",
}


def _query_scaling(raw: JsonObject, known: Fields) -> Fields:
    """Ministral 3 keeps it among the numbers of its rotary scaling."""
    entry = rope_entry(raw)
    if not entry.has("llama_4_scaling_beta"):
        return {}
    return {"query_scaling": entry.made(QueryScaling, _QUERY_SCALING)}


def _raw_query_scaling(config: TargetConfig) -> dict[str, Any]:
    rope, scaling = raw_rope(config.rotary, config.head_width), config.query_scaling
    if scaling is None or not rope["rope_scaling"]:
        return {}
    return {"rope_scaling": rope["rope_scaling"] | {"llama_4_scaling_beta": scaling.beta}}


def _unrotated(raw: JsonObject, known: Fields) -> Fields:
    """SmolLM3: a 1 in ``no_rope_layers`` is a layer with a rotation; every fourth has none."""
    layers = known["num_layers"]
    flags = raw.values.get("no_rope_layers")
    if flags is None:
        every = raw.whole("no_rope_layer_interval", 4)
        flags = [int((index + 1) % every != 0) for index in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or {*map(repr, flags)} - {"0", "1"}:
        raise raw.error("no_rope_layers", f"must be 0 or 1 for each of the {layers} layers")
    return _layers_with_rotation(tuple(map(bool, flags[:layers])), known)


def _raw_unrotated(config: TargetConfig) -> dict[str, Any]:
    layers = map(config.layer, range(config.num_layers))
    return {"no_rope_layers": [int(layer.rotary is not None) for layer in layers]}


def _layers_with_rotation(rotated: tuple[bool, ...], known: Fields) -> Fields:
    """Layers of full attention, some of which have a rotation."""
    if all(rotated):
        return {}
    rotary = rotary_of(known)
    return described([LayerConfig(rotary if each else None) for each in rotated])


_MULTIPLIERS: Keys = {
    "embedding_factor": ("embedding_multiplier", 1.0),
    "residual_factor": ("residual_multiplier", 1.0),
    "attention_scale": ("attention_multiplier", 1.0),
    "logits_divisor": ("logits_scaling", 1.0),
}


def _attention_alone(raw: JsonObject, known: Fields) -> Fields:
    """Granite 4: only layers of attention and a dense MLP; maybe none has positions."""
    for key in ("layer_types", "layers_block_type"):
        if other := {*raw.texts(key)} - {"attention", "full_attention"}:
            rule = f"has {other.pop()!r}: only layers of attention are computed"
            raise raw.error(key, rule, "load a dense model of the family")
    if not raw.has("layer_types") and not raw.has("layers_block_type"):
        raise raw.error("layer_types", "means recurrent layers", "load a dense model of the family")
    if raw.whole("num_local_experts", 8, 0):
        raise raw.error("num_local_experts", "is not supported, only 0", "load a dense model")
    if (kind := raw.text("position_embedding_type", "")) not in ("", "rope"):
        raise raw.error("position_embedding_type", "must be rope or null", "load another model")
    return _layers_with_rotation((kind == "rope",) * known["num_layers"], known)


def _raw_attention_alone(config: TargetConfig) -> dict[str, Any]:
    rotated = config.layer(config.read_layer).rotary is not None
    return {
        "layer_types": ["attention"] * config.num_layers,
        "num_local_experts": 0,
        "shared_intermediate_size": config.mlp_width,
        "position_embedding_type": "rope" if rotated else None,
        "mamba_n_heads": 1,  # Of layers that are not there, but their sizes must fit.
    }


def _beyond_max_window_layers(raw: JsonObject, index: int) -> bool:
    """Qwen: the layers from ``max_window_layers`` on have windows."""
    return index >= raw.whole("max_window_layers", 28, 0)


_QWEN2 = Family(
    "qwen2",
    fixed={"qkv_bias": True},
    window_switch="use_sliding_window",
    default_window=4096,
    windows=_beyond_max_window_layers,
)
_GEMMA_FIXED = {"post_norms": True, "offset_norms": True, "gelu": True}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2 = Family(
    "gemma2",
    fixed=_GEMMA_FIXED,
    accepts=frozenset({"hidden_act"}),
    keys=CAPS,
    read=read_gemma,
    dialect=gemma2_dialect,
    defaults=_GEMMA_DEFAULTS,
    windows=lambda raw, index: index % 2 == 0,
    write=raw_gemma,
    window_switch="sliding_window",
    default_window=4096,
    names=Names(
        mlp_norm="pre_feedforward_layernorm", attention_post_norm="post_attention_layernorm"
    ),
)
_GEMMA4_DEFAULTS = _GEMMA_DEFAULTS | {"max_position_embeddings": 131072}
_GEMMA4 = replace(
    _GEMMA2,
    model_type="gemma4_text",
    fixed={
        "post_norms": True,
        "gelu": True,
        "qk_norm": True,
        "value_norm": True,
        "layer_factors": True,
    },
    accepts=frozenset({"hidden_act", "partial_rotary_factor"}),
    read=read_gemma4,
    write=raw_gemma4,
    defaults=_GEMMA4_DEFAULTS,
    default_window=512,
    windows=lambda raw, index: (index + 1) % 6 != 0 and index + 1 < raw.whole("num_hidden_layers"),
    local_theta="rope_theta",
    full_heads=GLOBAL_HEADS,
    dialect=gemma4_dialect,
)
_OLMO_FIXED = {"wide_qk_norm": True, "pre_norms": False, "post_norms": True}

_HYBRID_FIXED = {"qk_norm": True, "offset_norms": True, "gated_attention": True}
_HYBRID_ACCEPTS = frozenset({"partial_rotary_factor"})
_HYBRID_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
}
_SPARSE_HYBRID_DEFAULTS = _HYBRID_DEFAULTS | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512,
}

_FUSED_GATE_UP = ("mlp.gate_up_proj",) * 2
_GRANITE_4 = Names(gate_up=("shared_mlp.input_linear",) * 2, down="shared_mlp.output_linear")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window_switch="sliding_window", default_window=4096),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(
        _QWEN2, model_type="qwen3", fixed={"qk_norm": True}, defaults={"head_dim": 128}
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        fixed={"qk_norm": True},
        read=read_experts,
        write=raw_experts,
        window_switch="use_sliding_window",
    ),
    "MiMoForCausalLM": replace(
        _QWEN2,
        model_type="mimo",
        # The code that comes with it adds layers that are a draft here; all else is Qwen2's.
        accepts=frozenset({"auto_map", "attention_bias"}),
        write=lambda config: {"attention_bias": True},
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        read=read_recurrences,
        write=raw_recurrences,
        defaults=_HYBRID_DEFAULTS | {"num_key_value_heads": 4},
        fixed=_HYBRID_FIXED,
        accepts=_HYBRID_ACCEPTS,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        read=partial(read_recurrences, sparse=True),
        write=raw_sparse_recurrences,
        defaults=_SPARSE_HYBRID_DEFAULTS | {"num_experts": 256},
        mlp_width="moe_intermediate_size",  # No layer is dense.
        fixed=_HYBRID_FIXED,
        accepts=_HYBRID_ACCEPTS,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        read=partial(read_recurrences, sparse=True),
        write=raw_sparse_recurrences,
        defaults=_SPARSE_HYBRID_DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10},
        # Each key head's rows are together.
        names=Names(
            recurrent_rows=(("in_proj_qkvz", "(J W) D"),), rate_rows=(("in_proj_ba", "(J C) D"),)
        ),
        fixed=_HYBRID_FIXED,
        accepts=_HYBRID_ACCEPTS,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        fixed={"attention_sinks": True},
        keys={"qkv_bias": ("attention_bias", True)},
        read=read_gpt_oss,
        write=raw_gpt_oss,
        accepts=frozenset({"attention_bias"}),
        defaults={
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
        window_switch="sliding_window",
        default_window=128,
        windows=lambda raw, index: index % 2 == 0,
        names=Names(stacked_experts=True),
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        read=_query_scaling,
        write=_raw_query_scaling,
        accepts=frozenset({"llama_4_scaling_beta"}),
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
        window_switch="sliding_window",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        # Hugging Face's class computes the same as the code that published models carry.
        accepts=frozenset({"auto_map", "partial_rotary_factor"}),
        defaults={"rms_norm_eps": 1e-5},
        window_switch="sliding_window",
        names=Names(qkv=("self_attn.qkv_proj",) * 3, gate_up=_FUSED_GATE_UP),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        read=_unrotated,
        write=_raw_unrotated,
        accepts=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
        window_switch="use_sliding_window",
    ),
    "GraniteForCausalLM": Family("granite", keys=_MULTIPLIERS),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        keys=_MULTIPLIERS,
        read=_attention_alone,
        write=_raw_attention_alone,
        mlp_width="shared_intermediate_size",
        names=_GRANITE_4,
    ),
    "Olmo2ForCausalLM": Family("olmo2", fixed=_OLMO_FIXED, defaults={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        fixed=_OLMO_FIXED,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        window_switch="sliding_window",
        default_window=4096,
        windows=lambda raw, index: (index + 1) % 4 != 0,
        local_theta="rope_theta",
    ),
    "MinistralForCausalLM": Family(
        "ministral", window_switch="sliding_window", default_window=4096
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        model_type="gemma3_text",
        fixed=_GEMMA_FIXED | {"qk_norm": True},
        accepts=frozenset({"hidden_act", "rope_local_base_freq"}),
        dialect=_as_it_is,
        # Files of models that also see leave out what is as in Hugging Face's class.
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        windows=lambda raw, index: (index + 1) % raw.whole("sliding_window_pattern", 6) != 0,
        local_theta="rope_local_base_freq",
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": replace(
        _GEMMA4,
        model_type="gemma4_unified_text",
        defaults=_GEMMA4_DEFAULTS | {"max_position_embeddings": 262144},
        default_window=1024,
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        fixed={"post_norms": True},
        keys={"qkv_bias": ("attention_bias", False)},
        accepts=frozenset({"attention_bias", "partial_rotary_factor"}),
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
        interleaved=True,
        names=Names(
            gate_up=_FUSED_GATE_UP,
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
        ),
    ),
}
"""The supported architectures."""

_VISION = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
_QWEN_VISION = (r"model\.visual\..*",)
_GEMMA4_SENSES = (
    r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\..*",
)
WRAPPERS: dict[str, tuple[str, ...]] = {
    "Gemma3ForConditionalGeneration": _VISION,
    "Gemma4ForConditionalGeneration": _GEMMA4_SENSES,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4_SENSES,
    "Mistral3ForConditionalGeneration": _VISION,
    "Qwen3_5ForConditionalGeneration": _QWEN_VISION,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_VISION,
}
"""Classes that wrap a target as ``text_config``: patterns of the tensors that it does not need."""
NOT_COMPUTED = {
    "gemma4": "keys and values of another model, and drafts for it",
    "qwen4exp": "embeddings of several tokens and for every layer, and attention over an index",
}
"""Beginnings of newer classes, in small letters, and what they have beyond all of these."""
