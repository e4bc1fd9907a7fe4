"""The rotary embedding of a Hugging Face ``config.json``, in both dialects.

transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 one ``rope_parameters``,
and the old LongChat files ``rope_condense_ratio``, which is linear scaling under another name.
"""

from typing import Any

from longspec_jax.checks import shown
from longspec_jax.config import (
    LARGEST_FACTOR,
    SMALLEST_FACTOR,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
)
from longspec_jax.weights.json_files import JsonObject

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rope_condense_ratio")
"""Every key that says something about the rotary embedding."""

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
