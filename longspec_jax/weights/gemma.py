"""Gemma 2, 3 and 4 in a ``config.json``, and back.

All scale their embeddings and may bound scores and logits softly. Of Gemma 4 layers with a window
have heads of another width and number than the others. Published files name the heads of the
others by keys of their own, and transformers 5 writes them layer by layer.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longspec_jax.config.layers import ExpertsConfig, LayerConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.json_files import JsonObject, Keys, as_raw
from longspec_jax.weights.layer_kinds import described
from longspec_jax.weights.rope import FULL, SLIDING

_GELU = "gelu_pytorch_tanh"
CAPS: Keys = {
    "attention_cap": ("attn_logit_softcapping", None),
    "logit_cap": ("final_logit_softcapping", None),
}
GLOBAL_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""The keys of all layers' heads, and those of only the layers without a window (Gemma 4)."""


def _embedding(raw: JsonObject, known: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings times the root of their width.

    Hugging Face rounds the root to the dtype of the weights before it multiplies.
    """
    activation = raw.text("hidden_activation", _GELU)
    if activation != _GELU:
        raise raw.error("hidden_activation", f"is not supported, only {_GELU}")
    # Late: ``--help`` of the commands does without.
    import jax.numpy as jnp

    root = jnp.dtype(known["dtype"]).type(math.sqrt(known["model_width"]))
    return {"embedding_factor": float(root)}


def read_gemma(raw: JsonObject, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the files of Gemma 2 and 3 say beyond those of Llama."""
    if raw.flag("use_bidirectional_attention", False):
        raise raw.error("use_bidirectional_attention", "is not supported: text has one direction")
    scale = raw.whole("query_pre_attn_scalar", 256) ** -0.5
    return _embedding(raw, known) | {"attention_scale": scale}


def gemma2_dialect(raw: JsonObject) -> JsonObject:
    """Null means no cap, and absent means a cap of 50 on scores and of 30 on logits."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return JsonObject({**caps, **raw.values}, raw.origin)


def raw_gemma(config: TargetConfig) -> dict[str, Any]:
    """The inverse."""
    scale = config.attention_scale or config.head_width**-0.5
    return {
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": round(scale**-2),
    }


_EXPERTS: Keys = {
    "count": "num_experts",
    "chosen": "top_k_experts",
    "width": "moe_intermediate_size",
}
_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def gemma4_dialect(raw: JsonObject) -> JsonObject:
    """A file of Gemma 4 as the published ones are, with what transformers assumes.

    Raises:
      ValueError: if it says of layers one by one what is not the same of all that have no window.
    """
    raw = raw.assuming({"rope_parameters": _ROPE})
    layers, types = raw.part("per_layer_config"), raw.texts("layer_types")
    if not layers.values:
        raw = raw.assuming({"global_head_dim": 512})
        if raw.flag("attention_k_eq_v", False):
            return raw
        return JsonObject({**raw.values, GLOBAL_HEADS["num_key_value_heads"]: None}, raw.origin)
    full = [index for index, each in enumerate(types) if each == FULL]
    said = {int(key): values for key, values in layers.values.items() if key.isdecimal()}
    alike = said.get(full[0]) if full else None
    if (
        not isinstance(alike, dict)
        or {*alike} - {*GLOBAL_HEADS}
        or said != dict.fromkeys(full, alike)
    ):
        rule = (
            f"must hold {' and '.join(GLOBAL_HEADS)} of each layer of {FULL}, the same of all, and "
            "of no other"
        )
        raise raw.error("per_layer_config", rule)
    return JsonObject(
        {**raw.values, **{GLOBAL_HEADS[key]: alike[key] for key in alike}}, raw.origin
    )


def read_gemma4(raw: JsonObject, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the files of Gemma 4 say of its layers."""
    if raw.text("use_bidirectional_attention", "vision") != "vision":
        rule = "is not supported: text has one direction"
        raise raw.error("use_bidirectional_attention", rule)
    layers = [known["kinds"][kind] for kind in known.get("pattern", ())]
    if not layers or layers[-1].window is not None:
        rule = f"must name layers of {SLIDING}, and end with one of {FULL}"
        raise raw.error("layer_types", rule)
    if raw.flag("attention_k_eq_v", False):
        layers = [replace(each, keys_are_values=each.window is None) for each in layers]
    if raw.flag("enable_moe_block", False):
        experts = raw.made(ExpertsConfig, _EXPERTS, {"parallel_mlp": True})
        layers = [replace(each, experts=experts) for each in layers]
    inputs = raw.whole("hidden_size_per_layer_input", 0, 0) or None
    if inputs and raw.whole("vocab_size_per_layer_input", 262144) != known["vocab_size"]:
        raise raw.error("vocab_size_per_layer_input", "must be vocab_size")
    layers = _reading_others(raw, layers, known["mlp_width"])
    own = {"attention_scale": 1.0, "layer_inputs": inputs}
    return _embedding(raw, known) | described(layers) | own


def _reading_others(raw: JsonObject, layers: list[LayerConfig], width: int) -> list[LayerConfig]:
    """The layers, the last of which read the keys of the last one before them that is alike."""
    first = len(layers) - raw.whole("num_kv_shared_layers", 0, 0, len(layers))
    wide = 2 * width if raw.flag("use_double_wide_mlp", False) else None
    before = {each.window: index for index, each in enumerate(layers[:first])}
    if any(each.window not in before for each in layers):
        rule = f"must leave a layer of {SLIDING} and one of {FULL} with keys of their own"
        raise raw.error("num_kv_shared_layers", rule)
    others = [
        replace(each, keys_are_values=False, keys_of=before[each.window], mlp_width=wide)
        for each in layers[first:]
    ]
    return layers[:first] + others


def raw_gemma4(config: TargetConfig) -> dict[str, Any]:
    """The inverse of :func:`read_gemma4`, in the form of the published files."""
    near, full = (config.layer(index) for index in (0, config.read_layer))
    own, others, experts = config.heads(near), config.heads(full), near.experts
    return {
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "head_dim": own.head_width,
        "num_key_value_heads": own.num_kv_heads,
        "global_head_dim": others.head_width,
        "num_global_key_value_heads": others.num_kv_heads,
        "attention_k_eq_v": full.keys_are_values,
        "enable_moe_block": experts is not None,
        **({} if experts is None else as_raw(experts, _EXPERTS)),
        "hidden_size_per_layer_input": config.layer_inputs or 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": sum(each.keys_of is not None for each in config.layers),
        "use_double_wide_mlp": any(each.mlp_width is not None for each in config.layers),
    }
