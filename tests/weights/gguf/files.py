"""GGUF files of tiny models, written by llama.cpp's rules: an independent inverse of the reader.

The package ``gguf`` writes the bytes and quantises; names, layouts and keys follow llama.cpp's
converter, which has a class for every architecture, and not the tables of the library.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the package that writes GGUF files")

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3moe",
    "Ministral3": "mistral3",
    "Phi3": "phi3",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
    "Gemma2": "gemma2",
    "Gemma3Text": "gemma3",
    "Gemma4Text": "gemma4",
    "GptOss": "gpt-oss",
    "Qwen3_5Text": "qwen35",
}
"""What llama.cpp calls the classes of transformers."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_DRAFT = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}
_AFTER = {"gemma2", "gemma3", "gemma4", "olmo2", "gpt-oss", "qwen35"}
"""Where the norm after attention has a name of its own."""


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of halves as rows of pairs, as llama.cpp's ``LlamaModel.permute`` does."""
    rows = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return rows.swapaxes(1, 2).reshape(weights.shape)


def _tiled(weights: np.ndarray, config: Any, width: int, axis: int = 0) -> np.ndarray:
    """Value heads from key head by key head to all first ones, all second ones, and so on."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    moved = np.moveaxis(weights, axis, 0)
    heads = moved.reshape(keys, values // keys, width, *moved.shape[1:]).swapaxes(0, 1)
    return np.moveaxis(heads.reshape(moved.shape), 0, axis)


def _recurrent(name: str, weights: np.ndarray, config: Any) -> np.ndarray:
    """A tensor of Qwen3.5's recurrent layers."""
    width, still = config.linear_value_head_dim, 2 * config.linear_num_key_heads
    still *= config.linear_key_head_dim
    if "in_proj_qkv" in name or "conv1d" in name:
        weights = weights.squeeze(1) if "conv1d" in name else weights
        return np.concatenate([weights[:still], _tiled(weights[still:], config, width)])
    if "in_proj_z" in name:
        return _tiled(weights, config, width)
    if "out_proj" in name:
        return _tiled(weights, config, width, axis=1)
    if "norm" in name:
        return weights
    weights = _tiled(weights, config, 1)
    return -np.exp(weights) if "A_log" in name else weights


def tensors_of(model: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a transformers model as llama.cpp names and lays them out."""
    config = model.config
    found = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    experts: dict[str, np.ndarray] = {}
    for full, weights in found.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", full)
        prefix, name = ("", full) if match is None else (f"blk.{match[1]}.", match[2])
        stem, _, kind = name.rpartition(".")
        if "mlp.experts" in name:
            experts[prefix + name] = weights
            continue
        if kind not in ("weight", "bias"):
            stem, kind = name, ""
        if stem == "post_attention_layernorm" and architecture in _AFTER:
            ours = "post_attention_norm"
        else:
            ours = _NAMES[stem]
        if architecture in ("llama", "mistral3") and ours in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
            weights = permuted(weights, heads)
        if "linear_attn" in stem:
            weights = _recurrent(stem, weights, config)
        elif architecture in ("gemma2", "gemma3", "qwen35") and stem.endswith("norm"):
            weights = weights + np.float32(1)
        yield f"{prefix}{ours}" + f".{kind}" * bool(kind), weights
    for layer in range(config.num_hidden_layers):
        yield from _experts(experts, f"blk.{layer}.", architecture)


def with_draft(tensors: Mapping[str, np.ndarray], layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the MTP layer of a Qwen3.5, a block after the others."""
    for name, weights in tensors.items():
        stem = name.removesuffix(".weight")
        inner = stem.removeprefix("mtp.layers.0.")
        ours = f"nextn.{_DRAFT[stem]}" if stem in _DRAFT else _NAMES[inner]
        ours = "post_attention_norm" if inner == "post_attention_layernorm" else ours
        yield f"blk.{layers}.{ours}.weight", weights + np.float32(weights.ndim == 1)


def _experts(
    found: dict[str, np.ndarray], prefix: str, architecture: str
) -> Iterator[tuple[str, np.ndarray]]:
    both = found.get(f"{prefix}mlp.experts.gate_up_proj")
    if both is None:
        return
    down = found[f"{prefix}mlp.experts.down_proj"]
    if architecture == "gpt-oss":  # [E, in, out], gate and up by turns, with biases.
        gate, up = (both[..., start::2].swapaxes(1, 2) for start in (0, 1))
        down = down.swapaxes(1, 2)
        bias = found[f"{prefix}mlp.experts.gate_up_proj_bias"]
        yield f"{prefix}ffn_gate_exps.bias", bias[:, ::2]
        yield f"{prefix}ffn_up_exps.bias", bias[:, 1::2]
        yield f"{prefix}ffn_down_exps.bias", found[f"{prefix}mlp.experts.down_proj_bias"]
    else:  # [E, out, in], gate before up.
        gate, up = np.split(both, 2, axis=1)
    yield f"{prefix}ffn_gate_exps.weight", gate
    yield f"{prefix}ffn_up_exps.weight", up
    yield f"{prefix}ffn_down_exps.weight", down


def keys_of(config: Any, architecture: str) -> dict[str, Any]:
    """The keys of a model, without the architecture's name in front."""
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    rope = dict(config.rope_parameters)
    if "sliding_attention" in rope:
        keys["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    keys["rope.freq_base"] = rope["rope_theta"]
    keys["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if (kind := rope["rope_type"]) in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if (factor := rope.get("attention_factor")) is not None:
            keys["rope.scaling.yarn_attn_factor"] = factor
    window = getattr(config, "sliding_window", None)
    types = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    match architecture:
        case "mistral3":
            keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
            keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        case "gemma2":
            keys["attention.sliding_window"] = window
            keys["attn_logit_softcapping"] = config.attn_logit_softcapping
            keys["final_logit_softcapping"] = config.final_logit_softcapping
            del keys["rope.freq_base"]  # Its converter leaves the base out.
        case "gemma3":
            keys |= {"attention.sliding_window": window, "attention.sliding_window_pattern": types}
        case "gemma4":
            full = next(iter(config.to_dict()["per_layer_config"].values()))
            width, others = full["head_dim"], full.get("num_key_value_heads")
            shared = config.num_kv_shared_layers
            keys |= {"attention.key_length": width, "attention.key_length_swa": head}
            keys |= {"attention.value_length": width, "attention.value_length_swa": head}
            keys |= {"rope.dimension_count": width, "rope.dimension_count_swa": head}
            keys |= {"attention.sliding_window": window, "attention.sliding_window_pattern": types}
            keys["attention.shared_kv_layers"] = shared
            keys["embedding_length_per_layer_input"] = config.hidden_size_per_layer_input
            keys["final_logit_softcapping"] = config.final_logit_softcapping
            if others is not None:
                own = config.num_key_value_heads
                keys["attention.head_count_kv"] = [own if kind else others for kind in types]
            if config.use_double_wide_mlp:
                mlp = config.intermediate_size
                wide = [mlp] * (len(types) - shared) + [2 * mlp] * shared
                keys["feed_forward_length"] = wide
            if config.enable_moe_block:
                keys["expert_count"] = config.num_experts
                keys["expert_used_count"] = config.top_k_experts
                keys["expert_feed_forward_length"] = config.moe_intermediate_size
        case "olmo2" if any(types):
            keys |= {"attention.sliding_window": window, "attention.sliding_window_pattern": types}
            keys.pop("rope.freq_base_swa", None)
        case "phi3":
            keys["attention.sliding_window"] = window or 0
            keys["rope.scaling.original_context_length"] = rope.get(
                "original_max_position_embeddings", config.max_position_embeddings
            )
        case "gpt-oss":
            keys["attention.sliding_window"] = window
            keys["expert_count"] = config.num_local_experts
            keys["expert_used_count"] = config.num_experts_per_tok
            keys["expert_feed_forward_length"] = config.intermediate_size
        case "qwen3moe":
            keys["expert_count"] = config.num_experts
            keys["expert_used_count"] = config.num_experts_per_tok
            keys["expert_feed_forward_length"] = config.moe_intermediate_size
        case "qwen35":
            keys["full_attention_interval"] = 4
            keys["rope.dimension_sections"] = [1, 1, 0, 0]
            keys["ssm.conv_kernel"] = config.linear_conv_kernel_dim
            keys["ssm.state_size"] = config.linear_key_head_dim
            keys["ssm.group_count"] = config.linear_num_key_heads
            keys["ssm.time_step_rank"] = config.linear_num_value_heads
            keys["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    return keys


def factors_of(config: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors that divide the frequencies of the rotation."""
    rope = config.rope_parameters
    if architecture == "phi3" and rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.asarray(rope[f"{kind}_factor"], np.float32)
    if architecture == "gemma4":
        full = next(iter(config.to_dict()["per_layer_config"].values()))["head_dim"]
        turning = int(full * rope["full_attention"]["partial_rotary_factor"] / 2)
        still = full // 2 - turning
        yield "rope_freqs.weight", np.asarray([1.0] * turning + [1e30] * still, np.float32)
    if architecture == "llama" and rope.get("rope_type") == "llama3":
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequencies = 1 / rope["rope_theta"] ** (np.arange(0, head, 2) / head)
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        found = []
        for length in 2 * np.pi / frequencies:
            if length < original / high:
                found.append(1.0)
            elif length > original / low:
                found.append(factor)
            else:
                smooth = (original / length - low) / (high - low)
                found.append(1 / ((1 - smooth) / factor + smooth))
        yield "rope_freqs.weight", np.asarray(found, np.float32)


Types = Callable[[str, np.ndarray], str]
"""The type that a tensor is stored in, by its name."""


def floats(name: str, weights: np.ndarray) -> str:
    """Nothing is quantised."""
    return "F32"


_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
"""Where the blocks that ``gguf`` cannot make have numbers in 16 bits."""


def _stored(weights: np.ndarray, kind: Any) -> np.ndarray:
    """The blocks of weights; of types that ``gguf`` only reads, blocks of random codes."""
    if kind.name == "F64":  # Which the library does not read.
        return weights.astype(np.float64)
    if kind.name not in _SCALES:
        return gguf.quants.quantize(weights, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (weights.size // elements, size), np.uint8)
    for at in _SCALES[kind.name]:
        scales = draw.uniform(-0.01, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(*weights.shape[:-1], -1)


def write_gguf(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: Iterator[tuple[str, np.ndarray]],
    types: Types = floats,
    tokenizer: dict[str, Any] | None = None,
) -> None:
    """Write a file; keys are the architecture's, those of the tokenizer are whole."""
    writer = gguf.GGUFWriter(path, architecture)
    whole = {f"{architecture}.{key}": value for key, value in keys.items()}
    for key, value in (whole | (tokenizer or {})).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, weights in tensors:
        kind = gguf.GGMLQuantizationType[types(name, weights)]
        writer.add_tensor(
            name, _stored(np.ascontiguousarray(weights, np.float32), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, model: Any, case: str, types: Types = floats, **tokenizer: Any) -> None:
    """Write a transformers model; ``case`` is the name of its class without the ending."""
    architecture = ARCHITECTURES[case]
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # Of Gemma 4's layers with a window.
    tensors = [*factors_of(config, architecture), *tensors_of(model, architecture)]
    write_gguf(
        path, architecture, keys_of(config, architecture), iter(tensors), types, tokenizer or None
    )
