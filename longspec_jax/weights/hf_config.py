"""Hugging Face ``config.json`` to our configurations and back.

Two dialects are read: transformers 4 has ``torch_dtype``, transformers 5 ``dtype``, and both write
the rotary embedding (:mod:`longspec_jax.weights.rope`) in their own way. The older one is written,
because both versions read it. What a class fixes beyond its file is an entry of
:mod:`longspec_jax.weights.families`. A model that this library would compute differently from its
authors is refused, never approximated: each refusal names the values, the rule and what to do.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from longspec_jax.checks import LARGEST_WHOLE, whole_number
from longspec_jax.config.layers import LinearRopeScaling, RopeScaling, YarnRopeScaling
from longspec_jax.config.target import SMALLEST_EPS, TargetConfig
from longspec_jax.weights.families import FAMILIES, NOT_COMPUTED, WRAPPERS
from longspec_jax.weights.json_files import QUANTISATION, JsonObject, Keys, as_raw
from longspec_jax.weights.rope import (
    INTERLEAVED,
    hoisted,
    inner_layers,
    raw_rope,
    rope_scaling,
    rope_theta,
    rotary_width,
)
from longspec_jax.weights.windows import raw_windows, window_kinds, without_windows

DTYPES = ("bfloat16", "float16", "float32")
_WHOLE: Keys = {"vocab_size": "vocab_size", "num_layers": "num_hidden_layers"}
LAYER: Keys = {
    "model_width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "norm_eps": "rms_norm_eps",
}
"""The sizes of a layer, of a target or of a draft like it, and where every file has them."""


def target_config(raw: JsonObject, dtype: str | None = None) -> TargetConfig:
    """The target that a ``config.json`` describes.

    Args:
      dtype: of parameters and activations; the file's own if absent.

    Raises:
      ValueError: if the model is not of a supported family, or does something this library does
        not.
    """
    raw = text_part(raw)
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = family.dialect(raw)
    # Of the newer dialect a file has all of its scaling.
    said = {"rope_scaling"} if raw.has("rope_parameters") else set()
    assumed = {key: value for key, value in family.defaults.items() if key not in said}
    whole, raw = raw.assuming(assumed), hoisted(without_windows(raw, family)).assuming(assumed)
    sizes = "hidden_size", "num_hidden_layers", "num_attention_heads", family.mlp_width
    raw.require(("vocab_size", *sizes, "max_position_embeddings"), architecture)
    check_refused(raw, REFUSED_TARGET, family.accepts)
    paired = family.interleaved, "a family has one pairing of the dimensions it rotates", REMEDY
    check_refused(raw, dict.fromkeys(INTERLEAVED, paired))
    if any(map(raw.has, QUANTISATION)):
        # Late: it imports numpy, which ``--help`` does without.
        from longspec_jax.weights.quantised.formats import REMEDY as OTHER_FORMAT
        from longspec_jax.weights.quantised.formats import quantisation

        quantised = quantisation(raw)  # Refuses formats that are not read.
        if quantised is not None and quantised.experts and not family.names.stacked_experts:
            rule = "has quant_method 'mxfp4', which is read only for gpt-oss"
            raise raw.error("quantization_config", rule, OTHER_FORMAT)
    _check_model_type(raw, architecture)
    scaling = rope_scaling(raw, (*family.accepts, *INTERLEAVED))
    known = raw.fields(TargetConfig, _WHOLE) | layer_fields(raw, mlp_width=family.mlp_width)
    known |= raw.fields(TargetConfig, family.keys) | dict(
        architecture=architecture,
        max_positions=_max_positions(raw, scaling),
        rope_theta=rope_theta(raw),
        rope_scaling=scaling,
        rotary_width=rotary_width(raw, known["head_width"]),
        tied_embeddings=raw.flag("tie_word_embeddings", False),
        dtype=_dtype(raw, dtype),
    )
    windows = window_kinds(whole, family, known)
    own = family.read(raw, known | windows)
    if windows and _windows(own, windows) != _windows(windows):
        raise raw.error("sliding_window", "is not supported next to layers without positions")
    return raw.build(TargetConfig, {**known, **family.fixed, **windows, **own}, LAYER)


def _windows(fields: Mapping[str, Any], others: Mapping[str, Any] = {}) -> list[int | None]:
    """The window of every layer, of kinds among some fields, or else among others."""
    given = fields if "kinds" in fields else others
    return [given["kinds"][kind].window for kind in given["pattern"]]


def text_part(raw: JsonObject) -> JsonObject:
    """The file of a target, which a model that also sees holds as ``text_config``."""
    if not wrapped(raw):
        return raw
    part = inner_layers(raw, "text_config")
    above = "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "eos_token_id"
    shared = {key: raw.values[key] for key in above if raw.has(key)}
    return part.assuming(shared)


def wrapped(raw: JsonObject) -> tuple[str, ...]:
    """Patterns of the tensors besides those of the target; empty if there is only a target."""
    names = raw.texts("architectures")
    return WRAPPERS.get(names[0], ()) if names else ()


def hf_config(config: TargetConfig, stop_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
    """A ``config.json`` that transformers 4 and 5 and :func:`target_config` read as ``config``.

    Raises:
      ValueError: if a file of its architecture cannot describe the configuration.
    """
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ValueError(_unsupported(config.architecture))
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
        "pad_token_id": None,
        "eos_token_id": end or None,
        **raw_rope(config.rotary, config.head_width),
        **_raw_positions(config),
        **raw_windows(config, family),
        **as_raw(config, family.keys),
        **family.write(config),
    }
    _check_written(raw, config)
    return raw


def _check_written(raw: dict[str, Any], config: TargetConfig) -> None:
    """Refuse to write a file that means another model."""
    read = target_config(JsonObject(raw))
    other = [each.name for each in fields(config) if _differs(each.name, config, read)]
    if other:
        theirs = " and ".join(f"{name}={getattr(read, name)}" for name in other)
        ours = " and ".join(f"{name}={getattr(config, name)}" for name in other)
        raise ValueError(
            f"{config.architecture} always has {theirs}, this configuration has {ours}; name the "
            "architecture it belongs to"
        )


def _differs(name: str, one: TargetConfig, other: TargetConfig) -> bool:
    if name in ("kinds", "pattern"):  # One list of layers may be described in several ways.
        return any(one.layer(i) != other.layer(i) for i in range(one.num_layers))
    return getattr(one, name) != getattr(other, name)


def raw_layer(config: Any) -> dict[str, Any]:
    """What a ``config.json`` says of a layer, of a target's configuration or of a draft's."""
    return as_raw(config, LAYER) | {"hidden_act": "silu"}


def stop_tokens(raw: JsonObject, generation: JsonObject | None = None) -> tuple[int, ...]:
    """Tokens that end a generation: ``generation_config.json``'s if any, else the model's."""
    raw = text_part(raw)
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
    With YaRN it may be either, because users add only the scaling, as Qwen tells them.
    """
    base = raw.whole("max_position_embeddings")
    if isinstance(scaling, YarnRopeScaling):
        return max(base, int(scaling.factor * scaling.original_max_positions))
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


def layer_fields(
    raw: JsonObject, like: TargetConfig | None = None, mlp_width: str = "intermediate_size"
) -> dict[str, Any]:
    """The fields of :data:`LAYER`.

    Args:
      raw: the file.
      like: what keys that are absent follow, of a draft that has the shape of its target.
      mlp_width: the key of the MLP's width.
    """
    usual = {} if like is None else {name: getattr(like, name) for name in LAYER}
    width = raw.whole("hidden_size", usual.get("model_width"))
    heads = raw.whole("num_attention_heads", usual.get("num_heads"))
    head = None if raw.has("hidden_size") else usual.get("head_width")
    if not raw.has("head_dim") and head is None and width % heads:
        rule = f"must divide hidden_size={width} where head_dim is not given"
        raise raw.error("num_attention_heads", rule)
    return {
        "model_width": width,
        "mlp_width": raw.whole(mlp_width, usual.get("mlp_width")),
        "num_heads": heads,
        "num_kv_heads": raw.whole("num_key_value_heads", usual.get("num_kv_heads", heads)),
        "head_width": raw.whole("head_dim", head or width // heads),
        "norm_eps": raw.number("rms_norm_eps", usual.get("norm_eps", 1e-6), SMALLEST_EPS, 1),
    }


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
    plain = (name or "").replace("_", "").lower()
    for start, beyond in NOT_COMPUTED.items():
        if plain.startswith(start):
            return (
                f"architecture {name!r} is not supported: it has {beyond}, which are not computed; "
                "load a model of docs/guides/targets.md"
            )
    return (
        f"architecture {name!r} is not supported; supported are {', '.join(FAMILIES)}. A model of "
        "another class with the same layers can be loaded after its config.json names one of these "
        "and its model_type"
    )


PARTIAL = "partial_rotary_factor"
REMEDY = "load a model without it"
REFUSED = {
    "hidden_act": ("silu", "no other activation is computed", REMEDY),
    PARTIAL: (1.0, "heads are rotated whole", REMEDY),
    "quantization_config": (
        None,
        "quantised weights are not read",
        "load the unquantised checkpoint",
    ),
}
REFUSED_TARGET = {key: REFUSED[key] for key in ("hidden_act", PARTIAL)} | {
    "attention_bias": (False, "no bias is added to the attention output", REMEDY),
    "mlp_bias": (False, "no biases are added in the MLP", REMEDY),
    "auto_map": (
        None,
        "code that comes with a model is never run, and may compute something else",
        "remove the entry if the layers are those of the architecture, or load a model without it",
    ),
}
"""Keys that change the arithmetic: the supported value, what holds here, what to do."""


def check_refused(
    raw: JsonObject, refused: dict[str, tuple[Any, str, str]], accepted: Collection[str] = ()
) -> None:
    """Refuse what would change the arithmetic, but for what is accepted."""
    for key, (supported, rule, remedy) in refused.items():
        if key not in accepted and raw.has(key) and raw.values[key] != supported:
            raise raw.error(key, f"is not supported, only {key}={supported!r}: {rule}", remedy)


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
