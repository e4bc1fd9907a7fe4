"""The rotary embedding of a Hugging Face ``config.json``, in both dialects.

transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one ``rope_parameters``, and
the old LongChat files ``rope_condense_ratio``, which is linear scaling under another name.
"""

from longspec_jax.config import LinearRopeScaling, Llama3RopeScaling, RopeScaling
from longspec_jax.weights.raw import RawConfig, check_keys, value

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_condense_ratio")
"""Every key that says something about the rotary embedding."""

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rope_theta(raw: RawConfig) -> float:
    """The rotary base."""
    parameters = value(raw, "rope_parameters", {})
    return float(value(parameters, "rope_theta", value(raw, "rope_theta", 10000.0)))


def rope_scaling(raw: RawConfig) -> RopeScaling:
    """The rotary scaling.

    Raises:
      ValueError: if it is of a type this library does not compute, or a number is missing.
    """
    entry = value(raw, "rope_parameters", value(raw, "rope_scaling", {}))
    kind = entry.get("rope_type", entry.get("type", "default"))
    condense = float(value(raw, "rope_condense_ratio", 1.0))
    whole = value(entry, "partial_rotary_factor", 1.0) == 1.0
    # Values that are dictionaries are one embedding a layer type, which no supported family has.
    if not whole or any(isinstance(part, dict) for part in entry.values()):
        kind = "partial or nested"
    if kind == "default":
        return None if condense == 1 else LinearRopeScaling(condense)
    if kind == "linear":
        check_keys(entry, ("factor",), "linear rope scaling")
        if condense in (1.0, entry["factor"]):
            return LinearRopeScaling(float(entry["factor"]))
    if kind == "llama3" and condense == 1:
        check_keys(entry, _LLAMA3_KEYS, "llama3 rope scaling")
        factor, low, high, original = (entry[key] for key in _LLAMA3_KEYS)
        return Llama3RopeScaling(float(factor), float(low), float(high), int(original))
    raise ValueError(
        f"rope scaling {entry} with rope_condense_ratio={condense:g} is not supported; supported are "
        "the types default, linear and llama3, alone. A model whose scaling is optional, as Qwen's "
        "yarn, runs within its original context once the entry is removed from config.json"
    )


def raw_rope(theta: float, scaling: RopeScaling) -> RawConfig:
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
