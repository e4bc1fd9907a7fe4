"""Mixtures of experts in a ``config.json``: which layers have them, and of what size.

Of Qwen's sparse families a layer has experts unless ``mlp_only_layers`` names it or
``decoder_sparse_step`` leaves it out. Of gpt-oss all layers have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longspec_jax.checks import is_whole
from longspec_jax.config.layers import (
    LARGEST_FACTOR,
    SMALLEST_FACTOR,
    ExpertsConfig,
    LayerConfig,
    Rotary,
)
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.json_files import JsonObject

SWISH = 1.702
"""The slope of gpt-oss's gate, the only one that is computed."""


def read_experts(raw: JsonObject, known: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers, given the file and the fields that are known.

    Args:
      known: ``num_layers`` and the rotation of all layers.

    Returns:
      Fields of a :class:`TargetConfig`; none for a model without a sparse layer.
    """
    rotary = Rotary(known["rope_theta"], known["rope_scaling"], known["rotary_width"])
    layers = layer_experts(raw, known["num_layers"])
    if not any(layers):
        return {}
    return described([LayerConfig(rotary, experts=each) for each in layers])


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
    count = raw.whole(
        "num_local_experts" if raw.has("num_local_experts") else "num_experts", 128, 0
    )
    sparse = [
        count > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers)
    ]
    if not any(sparse):
        return [None] * layers
    experts = ExpertsConfig(
        count,
        raw.whole("num_experts_per_tok", 8, most=count),
        raw.whole("moe_intermediate_size", 768),
        raw.flag("norm_topk_prob", False),
    )
    return [experts if each else None for each in sparse]


def raw_experts(config: TargetConfig) -> dict[str, Any]:
    """The inverse."""
    layers = [config.layer(index).experts for index in range(config.num_layers)]
    experts = next(filter(None, layers), None)
    if experts is None:
        return {"num_experts": 0}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.renormalised,
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
    count = raw.whole("num_local_experts", 128)
    experts = ExpertsConfig(
        count,
        raw.whole("num_experts_per_tok", 4, most=count),
        known["mlp_width"],
        biases=True,
        limit=raw.number("swiglu_limit", 7.0, SMALLEST_FACTOR, LARGEST_FACTOR),
    )
    rotary = Rotary(known["rope_theta"], known["rope_scaling"], known["rotary_width"])
    kinds = known.get("kinds", (LayerConfig(rotary),))
    biased = raw.flag("attention_bias", True)
    return {
        "kinds": tuple(replace(kind, experts=experts) for kind in kinds),
        "pattern": known.get("pattern", (0,) * known["num_layers"]),
        "qkv_bias": biased,
        "out_bias": biased,
    }


def raw_gpt_oss(config: TargetConfig) -> dict[str, Any]:
    """The inverse."""
    layers = [config.layer(index) for index in range(config.num_layers)]
    experts = next((layer.experts for layer in layers if layer.experts), None)
    if experts is None:
        return {}  # Which reads as other layers, and is refused.
    return {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "intermediate_size": experts.width,
        "swiglu_limit": experts.limit,
        "attention_bias": config.qkv_bias,
        "layer_types": [f"{'sliding' if layer.window else 'full'}_attention" for layer in layers],
    }
