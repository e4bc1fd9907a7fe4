"""Layers that are not plain in a ``config.json``: mixtures of experts, and recurrences.

Of Qwen's sparse families a layer has experts unless ``mlp_only_layers`` names it or
``decoder_sparse_step`` leaves it out. Of gpt-oss all layers have them. In Qwen's hybrids
``layer_types`` names the recurrent layers; files without it have a layer of attention every
``full_attention_interval``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longspec_jax.checks import is_whole
from longspec_jax.config.layers import ExpertsConfig, LayerConfig, RecurrenceConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.json_files import JsonObject, Keys, as_raw
from longspec_jax.weights.rope import FULL, LINEAR, layer_types, rotary_of, sliding_types

SWISH = 1.702
"""The slope of gpt-oss's gate, the only one that is computed."""
_SHARED = "shared_expert_intermediate_size"
_COUNT = "num_experts"
EXPERTS: Keys = {
    "count": (_COUNT, 128),
    "chosen": ("num_experts_per_tok", 8),
    "width": ("moe_intermediate_size", 768),
    "renormalised": ("norm_topk_prob", False),
}
_GPT_OSS: Keys = {
    "count": ("num_local_experts", 128),
    "chosen": ("num_experts_per_tok", 4),
    "width": "intermediate_size",
    "limit": ("swiglu_limit", 7.0),
}
_RECURRENCE: Keys = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_width": ("linear_key_head_dim", 128),
    "value_width": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}


def read_experts(raw: JsonObject, known: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers; none for a model without a sparse layer.

    Args:
      raw: the file.
      known: fields of its :class:`TargetConfig`, with the rotation of all layers.

    Returns:
      Further fields.
    """
    experts = layer_experts(raw, known["num_layers"])
    if not any(experts):
        return {}
    return described([LayerConfig(rotary_of(known), experts=each) for each in experts])


def described(layers: Sequence[LayerConfig]) -> dict[str, Any]:
    """The fields of a :class:`TargetConfig` that describe its layers."""
    kinds = tuple(dict.fromkeys(layers))
    return {"kinds": kinds, "pattern": tuple(map(kinds.index, layers))}


def layer_experts(raw: JsonObject, layers: int) -> list[ExpertsConfig | None]:
    """The experts of every layer; None for a dense one."""
    step = raw.whole("decoder_sparse_step", 1)
    dense = raw.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(is_whole(index) and index >= 0 for index in dense):
        raise raw.error("mlp_only_layers", "must be a list of layers")
    # transformers 5 may write the number under the name that other families use.
    named = "num_local_experts" if raw.has("num_local_experts") else _COUNT
    count = raw.whole(named, 128, 0)
    sparse = [
        count > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers)
    ]
    if not any(sparse):
        return [None] * layers
    experts = raw.made(ExpertsConfig, {**EXPERTS, "count": (named, 128)})
    return [experts if each else None for each in sparse]


def raw_experts(config: TargetConfig) -> dict[str, Any]:
    """The inverse."""
    layers = [config.layer(index).experts for index in range(config.num_layers)]
    experts = next(filter(None, layers), None)
    if experts is None:
        return {_COUNT: 0}
    return {
        **as_raw(experts, EXPERTS),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, each in enumerate(layers) if each is None],
    }


def read_gpt_oss(raw: JsonObject, known: Mapping[str, Any]) -> dict[str, Any]:
    """gpt-oss: all layers have experts, with biases and a bounded gate; attention may have biases.

    Args:
      known: ``mlp_width``, the rotation of all layers, and the kinds of those with windows.
    """
    if raw.number("swiglu_alpha", SWISH) != SWISH:
        raise raw.error("swiglu_alpha", f"is not supported, only {SWISH}", "load another model")
    experts = raw.made(ExpertsConfig, _GPT_OSS, {"biases": True})
    kinds = known.get("kinds", (LayerConfig(rotary_of(known)),))
    return {
        "kinds": tuple(replace(kind, experts=experts) for kind in kinds),
        "pattern": known.get("pattern", (0,) * known["num_layers"]),
        "out_bias": known["qkv_bias"],
    }


def raw_gpt_oss(config: TargetConfig) -> dict[str, Any]:
    """The inverse."""
    experts = next((layer.experts for layer in config.layers if layer.experts), None)
    if experts is None:
        return {}  # Which reads as other layers, and is refused.
    return {**as_raw(experts, _GPT_OSS), "layer_types": sliding_types(config)}


def read_recurrences(
    raw: JsonObject, known: Mapping[str, Any], *, sparse: bool = False
) -> dict[str, Any]:
    """The kinds of layers of a hybrid; ``sparse`` if they may have experts. Else as of experts."""
    layers, every = known["num_layers"], raw.whole("full_attention_interval", 4)
    usual = [LINEAR if (index + 1) % every else FULL for index in range(layers)]
    types = layer_types(raw, usual, LINEAR)
    if FULL not in types:
        raise raw.error("layer_types", f"must be {FULL} somewhere")
    experts: list[ExpertsConfig | None] = [None] * layers
    if sparse:
        shared = raw.whole(_SHARED)
        experts = [each and replace(each, shared=shared) for each in layer_experts(raw, layers)]
    kinds = {FULL: LayerConfig(rotary_of(known))}
    if LINEAR in types:
        kinds[LINEAR] = LayerConfig(recurrence=raw.made(RecurrenceConfig, _RECURRENCE))
    pairs = zip(types, experts, strict=True)
    return described([replace(kinds[kind], experts=own) for kind, own in pairs])


def raw_recurrences(config: TargetConfig) -> dict[str, Any]:
    """The inverse of a hybrid without experts."""
    types = [FULL if kind.recurrence is None else LINEAR for kind in config.layers]
    sizes = next(iter(config.recurrent_layers.values()), None)
    return {"layer_types": types, **({} if sizes is None else as_raw(sizes, _RECURRENCE))}


def raw_sparse_recurrences(config: TargetConfig) -> dict[str, Any]:
    """The same of a family whose layers may have experts."""
    experts = next((kind.experts for kind in config.kinds if kind.experts is not None), None)
    shared = {} if experts is None else {_SHARED: experts.shared}
    return raw_recurrences(config) | raw_experts(config) | shared
