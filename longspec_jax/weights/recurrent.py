"""Recurrent layers in a ``config.json``: which layers they are, and of what sizes.

The keys are those of Qwen's hybrids. ``layer_types`` names the layers; files without it have a
layer of attention every ``full_attention_interval``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longspec_jax.config.layers import (
    MAX_TAPS,
    ExpertsConfig,
    LayerConfig,
    RecurrenceConfig,
    Rotary,
)
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.sparse import described, layer_experts, raw_experts

SHARED = "shared_expert_intermediate_size"
FULL, LINEAR = "full_attention", "linear_attention"
"""The types of layers."""
_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_width": ("linear_key_head_dim", 128),
    "value_width": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
"""Our field to the key, and what Hugging Face assumes where it is absent."""


def read_recurrences(
    raw: JsonObject, known: Mapping[str, Any], *, sparse: bool = False
) -> dict[str, Any]:
    """The kinds of layers, given the file and the fields that are known.

    Args:
      known: ``num_layers`` and the rotation of the layers of attention.
      sparse: whether layers may have experts.

    Returns:
      Fields of a :class:`TargetConfig`.
    """
    layers, types = known["num_layers"], raw.texts("layer_types")
    if not types:
        every = raw.whole("full_attention_interval", 4)
        types = [FULL if (index + 1) % every == 0 else LINEAR for index in range(layers)]
    if len(types) != layers or {*types} - {FULL, LINEAR} or FULL not in types:
        rule = f"must be {FULL} or {LINEAR} for each of the {layers} layers, and {FULL} somewhere"
        raise raw.error("layer_types", rule)
    rotary = Rotary(known["rope_theta"], known["rope_scaling"], known["rotary_width"])
    experts: list[ExpertsConfig | None] = [None] * layers
    if sparse:
        shared = raw.whole(SHARED)
        experts = [each and replace(each, shared=shared) for each in layer_experts(raw, layers)]
    if LINEAR not in types:
        return described([LayerConfig(rotary, experts=each) for each in experts])
    sizes = {field: raw.whole(key, default) for field, (key, default) in _SIZES.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        raise raw.error("linear_num_value_heads", "must be a multiple of linear_num_key_heads")
    if not 2 <= sizes["taps"] <= MAX_TAPS:
        raise raw.error("linear_conv_kernel_dim", f"must be 2 to {MAX_TAPS}")
    recurrence = RecurrenceConfig(
        key_heads=sizes["key_heads"],
        value_heads=sizes["value_heads"],
        key_width=sizes["key_width"],
        value_width=sizes["value_width"],
        taps=sizes["taps"],
    )
    own = {FULL: {"rotary": rotary}, LINEAR: {"recurrence": recurrence}}
    each = zip(types, experts, strict=True)
    return described([LayerConfig(**own[kind], experts=some) for kind, some in each])


def raw_recurrences(config: TargetConfig) -> dict[str, Any]:
    """The inverse."""
    recurrent = config.recurrent_layers
    types = [LINEAR if index in recurrent else FULL for index in range(config.num_layers)]
    sizes = next(iter(recurrent.values()), None)
    found = {key: getattr(sizes, field, default) for field, (key, default) in _SIZES.items()}
    return {"layer_types": types, **found}


def raw_sparse_recurrences(config: TargetConfig) -> dict[str, Any]:
    """The same of a family whose layers may have experts."""
    experts = next((kind.experts for kind in config.kinds if kind.experts is not None), None)
    shared = {} if experts is None else {SHARED: experts.shared}
    return raw_recurrences(config) | raw_experts(config) | shared
