"""Hugging Face ``config.json`` to our configurations and back.

Two dialects are read. transformers 4 has ``rope_theta``, ``rope_scaling`` and ``torch_dtype``;
transformers 5 has ``rope_parameters`` and ``dtype``. The older one is written, because both
versions read it. Old LongChat files have ``rope_condense_ratio``, which is linear scaling. A model
that this library would compute differently from its authors is refused, never approximated: each
refusal names the values, the rule and what to do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from longspec_jax.checks import LARGEST_WHOLE, shown, whole_number
from longspec_jax.config import (
    LARGEST_FACTOR,
    MAX_LAYERS,
    SMALLEST_EPS,
    SMALLEST_FACTOR,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    TargetConfig,
)
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.quantised.formats import quantisation

C = TypeVar("C")

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


def target_config(raw: JsonObject, dtype: str | None = None) -> TargetConfig:
    """The target that a ``config.json`` describes.

    Args:
      dtype: of parameters and activations; the file's own if absent.

    Raises:
      ValueError: if the model is not of a supported family, or does something this library does
        not.
    """
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw.require((*_WIDTHS.values(), "max_position_embeddings"), architecture)
    check_refused(raw, REFUSED_TARGET)
    quantisation(raw)  # Refuses formats that are not read.
    _check_model_type(raw, architecture)
    scaling = rope_scaling(raw)
    max_positions = _max_positions(raw, scaling)
    _check_window(raw, family, max_positions)
    limits = {"num_hidden_layers": MAX_LAYERS}
    sizes = {
        field: raw.whole(key, most=limits.get(key, LARGEST_WHOLE)) for field, key in _WIDTHS.items()
    }
    width, heads = sizes["model_width"], sizes["num_heads"]
    return build(
        raw,
        TargetConfig,
        architecture=architecture,
        **sizes,
        num_kv_heads=raw.whole("num_key_value_heads", heads),
        head_width=head_width(raw, width, heads, family.head_width),
        max_positions=max_positions,
        rope_theta=rope_theta(raw),
        rope_scaling=scaling,
        norm_eps=norm_eps(raw, 1e-6),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        dtype=_dtype(raw, dtype),
    )


def hf_config(config: TargetConfig, stop_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
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
    end = [whole_number("stop_tokens", token, 0, config.vocab_size - 1) for token in stop_tokens]
    raw: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        **raw_layer(config),
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        # Explicit, because transformers' own defaults (1 and 2) mean something else elsewhere.
        "bos_token_id": None,
        "eos_token_id": end or None,
        **raw_rope(config.rope_theta, config.rope_scaling),
        **_raw_positions(config),
    }
    if family.model_type == "mistral":  # Absent, transformers would assume a window of 4096.
        raw["sliding_window"] = None
    return raw


def raw_layer(config: Any) -> dict[str, Any]:
    """What a ``config.json`` says of a layer, of a target's configuration or of a draft's."""
    return {
        "hidden_size": config.model_width,
        "intermediate_size": config.mlp_width,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
    }


def stop_tokens(raw: JsonObject, generation: JsonObject | None = None) -> tuple[int, ...]:
    """Tokens that end a generation: ``generation_config.json``'s if any, else the model's."""
    vocab_size = raw.whole("vocab_size", LARGEST_WHOLE)
    named = generation.tokens("eos_token_id", vocab_size) if generation else ()
    return named or raw.tokens("eos_token_id", vocab_size)


def check_dtype(dtype: str) -> str:
    """The dtype itself, if models can be computed in it."""
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype {dtype!r} is not supported; parameters are one of {', '.join(DTYPES)}: pass "
            "dtype= to choose one"
        )
    return dtype


def _max_positions(raw: JsonObject, scaling: RopeScaling) -> int:
    """Positions the model was made for.

    With linear scaling ``max_position_embeddings`` is the length before scaling, as transformers
    documents it; the Vicuna and LongChat files add the scaled length as ``max_sequence_length``.
    """
    base = raw.whole("max_position_embeddings")
    if not isinstance(scaling, LinearRopeScaling):
        return base
    named, scaled = raw.whole("max_sequence_length", base), int(base * scaling.factor)
    if scaled > LARGEST_WHOLE:
        rule = (
            f"times the factor {scaling.factor:g} of the rope scaling must be at most "
            f"{LARGEST_WHOLE}"
        )
        raise raw.error("max_position_embeddings", rule)
    return named if named > base else scaled


def head_width(raw: JsonObject, width: int, heads: int, default: int | None) -> int:
    """The head width that the file names, or the default, or model width / heads."""
    if not raw.has("head_dim") and default is None and width % heads:
        rule = f"must divide hidden_size={width} where head_dim is not given"
        raise raw.error("num_attention_heads", rule)
    return raw.whole("head_dim", default or width // heads)


def norm_eps(raw: JsonObject, default: float) -> float:
    """The epsilon of the norms."""
    return raw.number("rms_norm_eps", default, SMALLEST_EPS, 1)


def _raw_positions(config: TargetConfig) -> dict[str, int]:
    """The inverse of :func:`_max_positions`."""
    if not isinstance(config.rope_scaling, LinearRopeScaling) or config.rope_scaling.factor == 1:
        return {"max_position_embeddings": config.max_positions}
    base = int(config.max_positions / config.rope_scaling.factor)
    return {"max_position_embeddings": base, "max_sequence_length": config.max_positions}


def _architecture(raw: JsonObject) -> str:
    """The Hugging Face class, by name or by ``model_type``."""
    names = raw.texts("architectures")
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    kind = raw.text("model_type", "")
    name = names[0] if names else by_type.get(kind, kind)
    if name not in FAMILIES:
        key = "architectures" if names else "model_type"
        raise ValueError(f"{raw.origin}, {key}: {_unsupported(name or None)}")
    return name


def _check_model_type(raw: JsonObject, architecture: str) -> None:
    """Refuse a ``model_type`` of another family: other libraries choose the class by it."""
    family = FAMILIES[architecture]
    if raw.text("model_type", family.model_type) != family.model_type:
        rule = f"contradicts architectures, {architecture}: its model_type is {family.model_type!r}"
        raise raw.error("model_type", rule, "correct the one that is wrong")


def _unsupported(name: str | None) -> str:
    return (
        f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}. A model of "
        "another class with the same layers can be loaded after its config.json names one of these "
        "and its model_type"
    )


REMEDY = "load a model without it"
REFUSED = {
    "hidden_act": ("silu", "no other activation is computed", REMEDY),
    "partial_rotary_factor": (1.0, "heads are rotated whole", REMEDY),
    "quantization_config": (
        None,
        "quantised weights are not read",
        "load the unquantised checkpoint",
    ),
}
REFUSED_TARGET = {key: REFUSED[key] for key in ("hidden_act", "partial_rotary_factor")} | {
    "attention_bias": (False, "no bias is added to the attention output", REMEDY),
    "mlp_bias": (False, "no biases are added in the MLP", REMEDY),
    "auto_map": (
        None,
        "code that comes with a model is never run, and may compute something else",
        "remove the entry if the layers are those of the architecture, or load a model without it",
    ),
}
"""Keys that change the arithmetic: the supported value, what holds here, what to do."""


def check_refused(raw: JsonObject, refused: dict[str, tuple[Any, str, str]]) -> None:
    """Refuse what would change the arithmetic."""
    for key, (supported, rule, remedy) in refused.items():
        if raw.has(key) and raw.values[key] != supported:
            raise raw.error(key, f"is not supported, only {key}={supported!r}: {rule}", remedy)


def build(raw: JsonObject, make: Callable[..., C], **fields: Any) -> C:
    """A configuration; where it refuses how its fields fit together, file and keys are named."""
    try:
        return make(**fields)
    except ValueError as error:
        raise ValueError(
            f"{raw.origin}: {error}; heads are num_attention_heads and num_key_value_heads, and "
            "head_width is head_dim or hidden_size / num_attention_heads"
        ) from error


def _check_window(raw: JsonObject, family: Family, max_positions: int) -> None:
    """Refuse a sliding window that would hide tokens the full attention here sees."""
    switch = family.window_switch
    if switch is None or (switch != "sliding_window" and not raw.flag(switch, False)):
        return
    # Null means that there is no window, and absent the family's own.
    default = None if "sliding_window" in raw.values else family.default_window
    window = raw.whole("sliding_window", default or LARGEST_WHOLE)
    if window < max_positions:
        raise ValueError(
            f"{raw.origin}: sliding_window={window} is below the {max_positions} positions of the "
            "model: attention windows are not supported. To use the model where its window hides "
            f"nothing, set max_position_embeddings to {window} in config.json; or load a model "
            "without a window"
        )


def _dtype(raw: JsonObject, dtype: str | None) -> str:
    """The requested dtype, or the file's."""
    if dtype is not None:
        return check_dtype(dtype)
    key = "dtype" if raw.has("dtype") else "torch_dtype"
    if not raw.has(key):
        named = ", ".join(DTYPES)
        raise ValueError(f"{raw.origin}: no dtype or torch_dtype; pass dtype=, one of {named}")
    named = raw.text(key, "").removeprefix("torch.")
    if named not in DTYPES:
        rule = f"is not supported; parameters are one of {', '.join(DTYPES)}"
        raise raw.error(key, rule, "pass dtype= to choose one")
    return named


ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_condense_ratio")
"""All keys about the rotary embedding."""

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_OTHER = "load another model"


def rope_theta(raw: JsonObject) -> float:
    """The rotary base."""
    parameters = raw.part("rope_parameters")
    named = parameters if parameters.has("rope_theta") else raw
    return named.number("rope_theta", 10000.0, least=1)


def rope_scaling(raw: JsonObject) -> RopeScaling:
    """The rotary scaling.

    Raises:
      ValueError: if it is of a type this library does not compute, or a number is missing.
    """
    entry = raw.part("rope_parameters" if raw.has("rope_parameters") else "rope_scaling")
    kind = entry.text("rope_type", entry.text("type", "default"))
    condense = raw.number("rope_condense_ratio", 1.0, 1, LARGEST_FACTOR)
    if entry.number("partial_rotary_factor", 1.0) != 1:
        raise entry.error(
            "partial_rotary_factor", "is not supported: heads are rotated whole", _OTHER
        )
    for key, part in entry.values.items():
        if isinstance(part, dict):
            raise entry.error(key, "is not supported: all layers rotate alike, by numbers", _OTHER)
    if kind == "default":
        return None if condense == 1 else LinearRopeScaling(condense)
    if kind == "linear":
        entry.require(("factor",), "linear rope scaling")
        factor = entry.number("factor", least=1, most=LARGEST_FACTOR)
        if condense in (1, factor):
            return LinearRopeScaling(factor)
    if kind == "llama3" and condense == 1:
        return _llama3(entry)
    raise ValueError(
        f"{entry.origin}: the type {kind!r} in {shown(dict(entry.values))} with "
        f"rope_condense_ratio={condense:g} is not supported; supported are the types default, "
        "linear and llama3, alone. A model whose scaling is optional, as Qwen's yarn, runs within "
        "its original context once the entry is removed from config.json"
    )


def _llama3(entry: JsonObject) -> Llama3RopeScaling:
    """Llama 3.1's scaling."""
    entry.require(_LLAMA3_KEYS, "llama3 rope scaling")
    factor, low, high, original = _LLAMA3_KEYS
    slow = entry.number(low, least=SMALLEST_FACTOR, most=LARGEST_FACTOR)
    fast = entry.number(high, least=SMALLEST_FACTOR, most=LARGEST_FACTOR)
    if fast <= slow:
        raise entry.error(high, f"must be above {low}={slow:g}")
    stretch = entry.number(factor, least=1, most=LARGEST_FACTOR)
    return Llama3RopeScaling(stretch, slow, fast, entry.whole(original))


def raw_rope(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """The inverse, in transformers 4's dialect, which transformers 5 reads too."""
    match scaling:
        case None:
            entry = None
        case LinearRopeScaling(factor):
            # Exactly these two keys: transformers before 4.43 accepts no others.
            entry = {"type": "linear", "factor": factor}
        case Llama3RopeScaling():
            numbers = (
                scaling.factor,
                scaling.low_freq_factor,
                scaling.high_freq_factor,
                scaling.original_max_positions,
            )
            entry = {"rope_type": "llama3", **dict(zip(_LLAMA3_KEYS, numbers, strict=True))}
    return {"rope_theta": theta, "rope_scaling": entry}
