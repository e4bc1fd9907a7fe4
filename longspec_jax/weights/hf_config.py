"""Hugging Face ``config.json`` to our configurations and back.

Two dialects are read: transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and
transformers 5 (``rope_parameters``, ``dtype``). The older one is written, because both versions read
it. A model that this library would compute differently from its authors is refused, never
approximated: each refusal names the values, the rule and what to do.
"""

from dataclasses import dataclass

from longspec_jax.config import DraftConfig, LinearRopeScaling, RopeScaling, TargetConfig
from longspec_jax.weights.hf_rope import KEYS as ROPE_KEYS
from longspec_jax.weights.hf_rope import raw_rope, rope_scaling, rope_theta
from longspec_jax.weights.raw import RawConfig, check_keys, value

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Family:
    """What a Hugging Face class fixes beyond the numbers in its ``config.json``."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_width: int | None = None
    """Head width where ``head_dim`` is absent; ``None`` divides the model width by the heads."""
    window_switch: str | None = None
    """The key that turns ``sliding_window`` on; ``None`` where the family has no windows."""
    default_window: int | None = None
    """``sliding_window`` where the key is absent; null means none."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window_switch="sliding_window", default_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window_switch="use_sliding_window"),
    "Qwen3ForCausalLM": Family(
        "qwen3", qk_norm=True, head_width=128, window_switch="use_sliding_window"
    ),
}
"""The supported architectures."""

_WIDTHS = {
    "vocab_size": "vocab_size",
    "model_width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Our field to the key that must be in every ``config.json``."""


def target_config(raw: RawConfig, dtype: str | None = None) -> TargetConfig:
    """The target that a ``config.json`` describes.

    Args:
      raw: the parsed file.
      dtype: of parameters and activations; the file's own if absent.

    Raises:
      ValueError: if the model is not of a supported family, or does something this library does not.
    """
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    check_keys(raw, (*_WIDTHS.values(), "max_position_embeddings"), architecture)
    _check_refused(raw, _REFUSED_TARGET, architecture)
    scaling = rope_scaling(raw)
    max_positions = _max_positions(raw, scaling)
    _check_window(raw, family, max_positions)
    heads, width = raw["num_attention_heads"], raw["hidden_size"]
    return TargetConfig(
        architecture=architecture,
        **{field: raw[key] for field, key in _WIDTHS.items()},
        num_kv_heads=value(raw, "num_key_value_heads", heads),
        head_width=value(raw, "head_dim", family.head_width or width // heads),
        max_positions=max_positions,
        rope_theta=rope_theta(raw),
        rope_scaling=scaling,
        norm_eps=value(raw, "rms_norm_eps", 1e-6),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=value(raw, "tie_word_embeddings", False),
        dtype=_dtype(raw, dtype),
    )


def hf_config(config: TargetConfig, stop_tokens: tuple[int, ...] = ()) -> RawConfig:
    """A ``config.json`` that transformers 4 and 5 and :func:`target_config` read as ``config``."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ValueError(_unsupported(config.architecture))
    if (config.qkv_bias, config.qk_norm) != (family.qkv_bias, family.qk_norm):
        raise ValueError(
            f"{config.architecture} always has qkv_bias={family.qkv_bias} and "
            f"qk_norm={family.qk_norm}, this configuration has qkv_bias={config.qkv_bias} and "
            f"qk_norm={config.qk_norm}; name the architecture it belongs to"
        )
    raw: RawConfig = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        **{key: getattr(config, field) for field, key in _WIDTHS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        # Explicit, because transformers' own defaults (1 and 2) mean something else elsewhere.
        "bos_token_id": None,
        "eos_token_id": list(stop_tokens) or None,
        **raw_rope(config.rope_theta, config.rope_scaling),
        **_raw_positions(config),
    }
    if family.model_type == "mistral":  # Absent, transformers would assume a window of 4096.
        raw["sliding_window"] = None
    return raw


def draft_config(raw: RawConfig, target: TargetConfig, dtype: str | None = None) -> DraftConfig:
    """The draft that a ``config.json`` describes; what the file leaves out follows the target.

    Args:
      raw: the parsed file, in the dialect of a target's.
      target: the target the draft will work with.
      dtype: of parameters and activations; the target's if absent, whatever the file says, because
        the draft computes on the target's embeddings and keys.

    Raises:
      ValueError: if the file describes a draft for another vocabulary, or an unknown rotary scaling.
    """
    vocab_size = value(raw, "vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft was made for vocab_size={vocab_size}, the target has {target.vocab_size}. A "
            "draft shares its target's vocabulary: load the draft that belongs to this target"
        )
    # The release's drafts have biases whatever their file says about the target's.
    _check_refused(raw, _REFUSED, "the draft")
    width = value(raw, "hidden_size", target.model_width)
    heads = value(raw, "num_attention_heads", target.num_heads)
    # The published drafts divide width by heads; ours may name a head width, as Qwen3 needs.
    inherited = target.head_width if "hidden_size" not in raw else width // heads
    has_rope = any(value(raw, key, None) for key in ROPE_KEYS)
    return DraftConfig.for_target(
        target,
        model_width=width,
        mlp_width=value(raw, "intermediate_size", target.mlp_width),
        num_heads=heads,
        num_kv_heads=value(raw, "num_key_value_heads", target.num_kv_heads),
        head_width=value(raw, "head_dim", inherited),
        rope_theta=rope_theta(raw) if has_rope else target.rope_theta,
        rope_scaling=rope_scaling(raw) if has_rope else target.rope_scaling,
        norm_eps=value(raw, "rms_norm_eps", target.norm_eps),
        dtype=check_dtype(dtype or target.dtype),
        window=value(raw, "longspec_window", 512),
    )


def hf_draft_config(config: DraftConfig, target: TargetConfig | None = None) -> RawConfig:
    """A ``config.json`` for an exported draft, readable as a Llama or Qwen2 configuration.

    Args:
      config: the draft.
      target: its target, if known: records the vocabulary, so that a wrong pairing is noticed.
    """
    family = FAMILIES.get(target.architecture) if target else None
    return {
        "architectures": ["LongSpecDraft"],
        "model_type": family.model_type if family else "llama",
        **({"vocab_size": target.vocab_size} if target else {}),
        **({"max_position_embeddings": target.max_positions} if target else {}),
        "hidden_size": config.model_width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "torch_dtype": config.dtype,
        "longspec_window": config.window,
        **raw_rope(config.rope_theta, config.rope_scaling),
    }


def stop_tokens(raw: RawConfig, generation: RawConfig | None = None) -> tuple[int, ...]:
    """Tokens that end a generation: ``generation_config.json``'s if it names any, else the model's."""
    for source in (generation or {}, raw):
        found = source.get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def declared_dtype(raw: RawConfig) -> str | None:
    """The dtype a ``config.json`` names, in either dialect."""
    found = value(raw, "dtype", value(raw, "torch_dtype", None))
    return None if found is None else str(found).removeprefix("torch.")


def check_dtype(dtype: str) -> str:
    """The dtype itself, if models can be computed in it."""
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype {dtype!r} is not supported; parameters are one of {', '.join(DTYPES)}: pass "
            "dtype= to choose one"
        )
    return dtype


def _max_positions(raw: RawConfig, scaling: RopeScaling) -> int:
    """Positions the model was made for.

    With linear scaling ``max_position_embeddings`` is the length before scaling, as transformers
    documents it; the Vicuna and LongChat files add the scaled length as ``max_sequence_length``.
    """
    base = raw["max_position_embeddings"]
    if not isinstance(scaling, LinearRopeScaling):
        return base
    scaled = value(raw, "max_sequence_length", 0)
    return scaled if scaled > base else int(base * scaling.factor)


def _raw_positions(config: TargetConfig) -> RawConfig:
    """The inverse of :func:`_max_positions`."""
    if not isinstance(config.rope_scaling, LinearRopeScaling) or config.rope_scaling.factor == 1:
        return {"max_position_embeddings": config.max_positions}
    base = int(config.max_positions / config.rope_scaling.factor)
    return {"max_position_embeddings": base, "max_sequence_length": config.max_positions}


def _architecture(raw: RawConfig) -> str:
    """The Hugging Face class, by name or by ``model_type``."""
    names = value(raw, "architectures", [])
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = names[0] if names else by_type.get(raw.get("model_type", ""), raw.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(_unsupported(name))
    return name


def _unsupported(name: str | None) -> str:
    return (
        f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}. A model of "
        "another class with the same layers can be loaded after its config.json names one of these"
    )


_REMEDY = "load a model without it"
_REFUSED = {
    "hidden_act": ("silu", "another activation than silu is not supported", _REMEDY),
    "partial_rotary_factor": (1.0, "rotating a part of the head is not supported", _REMEDY),
    "quantization_config": (None, "quantised weights are not", "load the unquantised checkpoint"),
}
_REFUSED_TARGET = _REFUSED | {
    "attention_bias": (False, "a bias on the attention output is not supported", _REMEDY),
    "mlp_bias": (False, "biases in the MLP are not supported", _REMEDY),
}
"""Keys that change the arithmetic: the supported value, what another means, what to do."""


def _check_refused(raw: RawConfig, refused: dict, who: str) -> None:
    """Refuse what would change the arithmetic."""
    for key, (supported, meaning, remedy) in refused.items():
        found = value(raw, key, supported)
        if found != supported:
            raise ValueError(
                f"{who} has {key}={found!r}: {meaning}, only {key}={supported!r}; {remedy}"
            )


def _check_window(raw: RawConfig, family: Family, max_positions: int) -> None:
    """Refuse a sliding window that would hide tokens the full attention here sees."""
    windows = {"sliding_window": family.default_window} | raw
    window = windows["sliding_window"]
    active = family.window_switch is not None and windows.get(family.window_switch)
    if active and window is not None and window < max_positions:
        raise ValueError(
            f"sliding_window={window} is below the {max_positions} positions of the model: attention "
            "windows are not supported. To use the model where its window hides nothing, set "
            f"max_position_embeddings to {window} in config.json; or load a model without a window"
        )


def _dtype(raw: RawConfig, dtype: str | None) -> str:
    """The requested dtype, or the file's."""
    dtype = dtype or declared_dtype(raw)
    if dtype is None:
        raise ValueError("config.json names no dtype; pass dtype=, one of " + ", ".join(DTYPES))
    return check_dtype(dtype)
