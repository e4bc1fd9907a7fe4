"""Which GGUF architectures are read: their keys as a ``config.json``, their tensors' names.

An architecture is an entry of :data:`ARCHITECTURES`. What it says is handed to the readers of
Hugging Face's folders, which refuse what is not computed. A key or a tensor that no entry names is
refused by :mod:`longspec_jax.weights.gguf.model`: another reader may pass over it and compute
another model.

Source: llama.cpp's ``conversion/*.py``, which write these files, and its ``src/models``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from longspec_jax.config.layers import yarn_magnitude
from longspec_jax.weights.checkpoint import Tensor
from longspec_jax.weights.gguf import gemma, layouts
from longspec_jax.weights.gguf.experts import all_experts, each_expert
from longspec_jax.weights.gguf.file import StoredTensor
from longspec_jax.weights.gguf.layouts import Change
from longspec_jax.weights.gguf.metadata import Metadata, Raw, Reader, window_pattern

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""What all architectures have, and Hugging Face's name of it."""
SHAPES = (
    "vocab_size",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
)
"""Further keys of all, which :mod:`longspec_jax.weights.gguf.model` reads."""

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LAYER = _PRE | _ATTENTION | _MLP
MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors that are not a layer's; the names are without ``.weight`` and ``.bias``."""


Stacked: TypeAlias = Callable[[Mapping[str, StoredTensor]], dict[str, Tensor]]
"""The tensors of a layer's experts by Hugging Face's names, from those of the file's."""


def _no_more(metadata: Metadata, known: Raw) -> Raw:
    return {}


def _no_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """What an architecture's name implies."""

    name: str
    """Hugging Face's class."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Sizes of its own, and Hugging Face's names of them."""
    only: Mapping[str, object] = field(default_factory=dict)
    """Keys of its own that have one value if they are there."""
    keys: tuple[str, ...] = ()
    """Keys of its own that ``read`` asks for."""
    by_layer: tuple[str, ...] = ()
    """Those of :data:`KEYS` that ``read`` asks for: they may differ among layers."""
    read: Reader = _no_more
    model: Mapping[str, str] = field(default_factory=lambda: MODEL)
    """Tensors that are not a layer's."""
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    """The tensors of a layer, in the file and in Hugging Face's folder."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """What is laid out otherwise, by the file's name."""
    draft: Mapping[str, str] = field(default_factory=dict)
    """What stands around its MTP layer, a block after the others, likewise; none is read if
    empty."""
    unnamed: frozenset[str] = frozenset()
    """Those that Hugging Face names without ``.weight`` or ``.bias``."""
    experts: tuple[str, ...] = ()
    """The tensors of a layer's experts, which :attr:`stacked` reads."""
    stacked: Stacked = _no_experts
    factors: tuple[str, ...] = ()
    """Tensors that belong to the configuration."""


_HALVES: dict[str, Change] = {
    "attn_q": layouts.Halves("num_attention_heads"),
    "attn_k": layouts.Halves("num_key_value_heads"),
}


def _llama(metadata: Metadata, known: Raw) -> Raw:
    """Llama 3.1's scaling is a tensor of divisors; its numbers are found where they explain it."""
    factors = metadata.factors.get("rope_freqs")
    if factors is None or (factors == 1).all():
        return {}
    low, high, original = 1.0, 4.0, 8192
    theta, width = known.get("rope_theta", 10000.0), 2 * len(factors)
    lengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    factor = float(factors.max())
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-5):
        scaling: Raw = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low}
        scaling |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    else:
        each = [float(str(number)) for number in factors]
        scaling = {"rope_type": "longrope", "short_factor": each, "long_factor": each}
        scaling |= {"attention_factor": 1.0}
    return {"rope_scaling": scaling}


def _phi3(metadata: Metadata, known: Raw) -> Raw:
    """LongRoPE's factors are tensors; a window of 0, which marks Phi-4, means no window."""
    raw: Raw = {"sliding_window": metadata.whole("attention.sliding_window", 0) or None}
    long, short = (metadata.factors.get(f"rope_factors_{kind}") for kind in ("long", "short"))
    if (long is None) != (short is None):
        raise ValueError(f"{metadata.file.origin} has only one set of the two of LongRoPE")
    if long is None or short is None:
        metadata.only("rope.scaling.type", "none")
        metadata.only("rope.scaling.attn_factor", 1.0)
        return {**raw, "rope_scaling": None}
    numbers = ([float(str(each)) for each in factors] for factors in (short, long))
    scaling: Raw = dict(zip(("short_factor", "long_factor"), numbers, strict=True))
    original = metadata.whole("rope.scaling.original_context_length")
    if metadata.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    scaling = {"rope_type": "longrope", **scaling}
    return {**raw, "rope_scaling": scaling, "original_max_position_embeddings": original}


def _olmo(metadata: Metadata, known: Raw) -> Raw:
    """OLMo 3 is written as OLMo 2 with a window."""
    if not metadata.has("attention.sliding_window"):
        return {}
    raw = {"architectures": ["Olmo3ForCausalLM"]}
    raw |= {"sliding_window": metadata.whole("attention.sliding_window", least=1)}
    return raw | window_pattern(metadata, known["num_hidden_layers"])


def _mistral3(metadata: Metadata, known: Raw) -> Raw:
    """Ministral 3: YaRN whose magnitude is divided by another, and queries that grow."""
    scaling = known.get("rope_scaling")
    if not scaling:
        return {}
    if over := metadata.number("rope.scaling.yarn_log_multiplier", 0.0):
        factor = scaling["factor"]
        scaling["attention_factor"] = yarn_magnitude(factor) / yarn_magnitude(factor, over)
    original = scaling.get("original_max_position_embeddings")
    metadata.only("attention.temperature_length", original)
    if beta := metadata.number("attention.temperature_scale", 0.0):
        scaling["llama_4_scaling_beta"] = beta
    return {"rope_scaling": scaling}


def _qwen3moe(metadata: Metadata, known: Raw) -> Raw:
    """llama.cpp always lets the weights of the chosen experts add up to 1."""
    return {"norm_topk_prob": True}


def _gpt_oss(metadata: Metadata, known: Raw) -> Raw:
    """The ramp of the scaling begins and ends within a pair, which no key says."""
    scaling = known.get("rope_scaling")
    scaling = {**scaling, "truncate": False} if scaling else None
    return {"rope_scaling": scaling} | window_pattern(metadata, known["num_hidden_layers"])


def _qwen35(metadata: Metadata, known: Raw) -> Raw:
    """Recurrent layers; the blocks that predict several tokens are counted among the layers."""
    values, drafts = known["linear_num_value_heads"], metadata.whole("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": known["num_hidden_layers"] - drafts,
        "full_attention_interval": metadata.whole("full_attention_interval", 4, 1),
        "linear_value_head_dim": metadata.whole("ssm.inner_size", least=1) // values,
    }


def _offset(*names: str) -> dict[str, Change]:
    return dict.fromkeys((*names, "output_norm"), layouts.without_one)


_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    renamed=_WINDOW,
    only={"attention.sliding_window_pattern": 2},
    keys=("attn_logit_softcapping", "final_logit_softcapping"),
    read=gemma.read_gemma2,
    layer=_LAYER
    | _QK
    | {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    changes=_offset(
        "attn_norm",
        "ffn_norm",
        "post_attention_norm",
        "post_ffw_norm",
        "attn_q_norm",
        "attn_k_norm",
    ),
)
_EXPERTS = tuple(f"ffn_{name}_exps" for name in ("gate", "up", "down"))

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        only={"expert_count": 0, "expert_used_count": 0},
        read=_llama,
        changes=_HALVES,
        factors=("rope_freqs",),
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", layer=_LAYER | _QK),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        renamed={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        only={
            "expert_gating_func": 1,  # A softmax over all.
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
            "expert_shared_count": 0,
        },
        read=_qwen3moe,
        layer=_PRE | _ATTENTION | _QK | {"ffn_gate_inp": "mlp.gate"},
        experts=_EXPERTS,
        stacked=each_expert,
    ),
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        name="Gemma3ForCausalLM",
        only={"final_logit_softcapping": 0.0},
        keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        read=gemma.read_gemma3,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        keys=(
            "attention.key_length_swa",
            "attention.value_length_swa",
            "attention.shared_kv_layers",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "embedding_length_per_layer_input",
            "expert_count",
            "expert_used_count",
            "expert_feed_forward_length",
            "final_logit_softcapping",
            "rope.dimension_count_swa",
            "rope.freq_base_swa",
        ),
        by_layer=("attention.head_count_kv", "feed_forward_length"),
        read=gemma.read_gemma4,
        model=MODEL
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        layer={
            **_GEMMA2.layer,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale": "layer_scalar",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": "experts.gate_up_proj",
            "ffn_down_exps": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
        },
        unnamed=frozenset({"layer_output_scale", "ffn_gate_up_exps", "ffn_down_exps"}),
        factors=("rope_freqs",),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        keys=("attention.sliding_window", "rope.scaling.attn_factor"),
        read=_phi3,
        layer=_PRE
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        factors=("rope_factors_long", "rope_factors_short"),
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        keys=("attention.sliding_window", "attention.sliding_window_pattern"),
        read=_olmo,
        layer=_ATTENTION
        | _MLP
        | _QK
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        keys=(
            "attention.temperature_length",
            "attention.temperature_scale",
            "rope.scaling.yarn_log_multiplier",
        ),
        read=_mistral3,
        changes=_HALVES,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        renamed=_WINDOW
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        only={"expert_gating_func": 3},  # A softmax over the chosen ones.
        keys=("attention.sliding_window_pattern",),
        read=_gpt_oss,
        layer=_ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        unnamed=frozenset({"attn_sinks"}),
        experts=_EXPERTS,
        stacked=all_experts,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        renamed={
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        keys=(
            "full_attention_interval",
            "nextn_predict_layers",
            "rope.dimension_sections",
            "ssm.inner_size",
        ),
        read=_qwen35,
        layer=_ATTENTION
        | _MLP
        | _QK
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            "ssm_a": "linear_attn.A_log",
            "ssm_dt": "linear_attn.dt_bias",
        },
        draft={
            "nextn.eh_proj": "fc",
            "nextn.enorm": "pre_fc_norm_embedding",
            "nextn.hnorm": "pre_fc_norm_hidden",
            "nextn.shared_head_norm": "norm",
        },
        changes=_offset(
            "attn_norm",
            "post_attention_norm",
            "attn_q_norm",
            "attn_k_norm",
            "nextn.enorm",
            "nextn.hnorm",
            "nextn.shared_head_norm",
        )
        | {
            "attn_qkv": layouts.behind_keys,
            "attn_gate": layouts.value_heads,
            "ssm_alpha": layouts.value_heads,
            "ssm_beta": layouts.value_heads,
            "ssm_conv1d": layouts.taps,
            "ssm_out": layouts.value_columns,
            "ssm_a": layouts.log_of_negative,
            "ssm_dt": layouts.value_heads,
        },
        unnamed=frozenset({"ssm_a", "ssm_dt"}),
    ),
}
"""The architectures that are read, by llama.cpp's names."""
NOT_TARGETS = {
    "clip": "what a model sees with (mmproj), without a language model; name the other file",
    "gemma4-assistant": "a draft that reads its target's keys and values, in a format that is not "
    "read",
    "eagle3": "a draft without its target, in a format that is not read; take its safetensors "
    "checkpoint",
    "dflash": "a draft without its target, in a format that is not read; take its safetensors "
    "checkpoint",
}
"""Architectures that are not language models, in words."""
