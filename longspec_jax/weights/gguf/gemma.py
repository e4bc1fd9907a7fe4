"""Gemma 2, 3 and 4 in GGUF files: their keys as those of a ``config.json``.

What these mean, :mod:`longspec_jax.weights.gemma` says.
"""

from longspec_jax.weights.gguf.metadata import Metadata, Raw, by_kind, window_pattern

_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
"""Those of Gemma whose scores are scaled by the width of all heads, not of one: by the number of
layers, as llama.cpp tells them."""


def _gemma(metadata: Metadata, known: Raw) -> Raw:
    architecture = metadata.prefix.removesuffix(".")
    heads, width = known["num_attention_heads"], known["hidden_size"]
    is_27b = known["num_hidden_layers"] == _LAYERS_27B[architecture]
    return {"query_pre_attn_scalar": width // heads if is_27b else known["head_dim"]}


def read_gemma2(metadata: Metadata, known: Raw) -> Raw:
    """A soft cap that the file lacks is off."""
    names = (f"{name}_logit_softcapping" for name in ("attn", "final"))
    caps = {name: metadata.number(name) if metadata.has(name) else None for name in names}
    return _gemma(metadata, known) | caps


def read_gemma3(metadata: Metadata, known: Raw) -> Raw:
    """The local base and the pattern of layers are not in older files."""
    raw = _gemma(metadata, known)
    raw["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    return raw | window_pattern(metadata, known["num_hidden_layers"])


def read_gemma4(metadata: Metadata, known: Raw) -> Raw:
    """Layers with a window have heads of another width and number, and another base.

    What the rotary frequencies are divided by says which share of a head rotates: 1 there, and 1e30
    for the rest.
    """
    pattern = window_pattern(metadata, known["num_hidden_layers"])
    if "layer_types" not in pattern:
        rule = "must be true or false for each layer"
        raise metadata.error("attention.sliding_window_pattern", rule)
    near = [kind == "sliding_attention" for kind in pattern["layer_types"]]
    shared = metadata.whole("attention.shared_kv_layers", 0)
    width, full_width = metadata.whole("attention.key_length_swa", least=1), known["head_dim"]
    metadata.only("attention.value_length_swa", width)
    metadata.only("rope.dimension_count_swa", width)
    factors = metadata.factors.get("rope_freqs")
    turning = 0 if factors is None else int((factors == 1).sum())
    if factors is None or {*factors[:turning]} != {1.0} or (factors[turning:] < 1e30).any():
        raise ValueError(
            f"{metadata.file.origin}: rope_freqs.weight must be numbers of 1, and then of 1e30, by "
            "which layers without a window divide their frequencies; load another file"
        )
    kv_heads = by_kind(metadata, "attention.head_count_kv", near)
    last = [index >= len(near) - shared for index in range(len(near))]
    mlps = by_kind(metadata, "feed_forward_length", last)
    if mlps[True] not in (mlps[False], 2 * mlps[False]):
        rule = "must be the same of all layers, or twice as much of those that share keys"
        raise metadata.error("feed_forward_length", rule)
    own = (
        f"blk.{index}.attn_v.weight"
        for index in range(len(near))
        if not (near[index] or last[index])
    )
    raw = pattern | {
        "head_dim": width,
        "num_key_value_heads": kv_heads[True],
        "global_head_dim": full_width,
        "num_global_key_value_heads": kv_heads[False],
        "attention_k_eq_v": not any(name in metadata.tensors for name in own),
        "intermediate_size": mlps[False],
        "use_double_wide_mlp": mlps[True] != mlps[False],
        "num_kv_shared_layers": shared,
        "sliding_window": metadata.whole("attention.sliding_window", least=1),
        "hidden_size_per_layer_input": metadata.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": known["vocab_size"],
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base"),
                "partial_rotary_factor": turning / len(factors),
            },
        },
    }
    if metadata.has("final_logit_softcapping"):
        raw["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    if metadata.whole("expert_count", 0):
        raw |= {
            "enable_moe_block": True,
            "num_experts": metadata.whole("expert_count"),
            "top_k_experts": metadata.whole("expert_used_count", least=1),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length", least=1),
        }
    return raw
