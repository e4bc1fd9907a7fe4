"""The rotary embedding in a ``config.json``, of a target's or a draft's, and back.

Two dialects are read. transformers 4 has ``rope_theta`` and ``rope_scaling``, transformers 5 has
``rope_parameters``. Either entry may hold the base and the rotated share itself. A key that nothing
here uses is refused by name: passed over, it gives wrong logits in silence. The older dialect is
written, because both versions read it.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from longspec_jax.checks import shown
from longspec_jax.config.layers import (
    LARGEST_FACTOR,
    SMALLEST_FACTOR,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    Rotary,
    YarnRopeScaling,
    yarn_magnitude,
)
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.json_files import JsonObject, Keys, as_raw, keys_of

ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_condense_ratio",
    "partial_rotary_factor",
)
"""All keys about the rotary embedding that every reader uses."""
INTERLEAVED = "rope_interleaved", "rope_interleave", "rope_traditional"
"""What files call a rotation of neighbours; a family says whether it has one."""

_ORIGINAL = "original_max_position_embeddings"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""The types of layers; the first two are the keys of their parts of ``rope_parameters``."""
OF_ALL_TYPES = "rope_theta", "partial_rotary_factor"
"""Keys that stand in the entry of the scaling or next to it."""
SCALINGS: Mapping[str, tuple[type[Any], Keys]] = {
    "linear": (LinearRopeScaling, {"factor": "factor"}),
    "llama3": (
        Llama3RopeScaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_positions": _ORIGINAL,
        },
    ),
    "yarn": (
        YarnRopeScaling,
        {
            "factor": "factor",
            "original_max_positions": _ORIGINAL,
            "attention_factor": "attention_factor",
            "beta_fast": ("beta_fast", 32.0),
            "beta_slow": ("beta_slow", 1.0),
            "truncate": ("truncate", True),
        },
    ),
    "longrope": (
        LongRopeScaling,
        {
            "short": "short_factor",
            "long": "long_factor",
            "original_max_positions": _ORIGINAL,
            "attention_factor": "attention_factor",
        },
    ),
    "proportional": (ProportionalRopeScaling, {}),
}
"""The types that are computed, and where an entry has their numbers."""
_BESIDE = {"yarn": ("mscale", "mscale_all_dim"), "longrope": ("factor",)}
"""Keys that make one of these numbers where it is absent."""
_OF_PICTURES = "mrope_section", "mrope_interleaved"
"""Keys of an entry that change nothing for text: its three positions are one."""
_ROTARY = re.compile("rope|rotary|ntk|yarn")
"""Found in the names of all keys about the rotary embedding, known or not."""
_OTHER = "load another model"
_UNUSED = "remove the entry if the model is computed without it, or load another model"


def layer_types(raw: JsonObject, usual: Sequence[str], other: str) -> list[str]:
    """The type of every layer.

    Args:
      raw: the file, which may have ``layer_types``.
      usual: of a file that has none.
      other: what a layer may be besides one of full attention.
    """
    types = raw.texts("layer_types") or [*usual]
    if len(types) != len(usual) or {*types} - {FULL, other}:
        rule = f"must be {FULL} or {other} for each of the {len(usual)} layers"
        raise raw.error("layer_types", rule)
    return types


def sliding_types(config: TargetConfig) -> list[str]:
    """The inverse, for layers some of which have a window."""
    return [FULL if kind.window is None else SLIDING for kind in config.layers]


def rotary_of(known: Mapping[str, Any]) -> Rotary:
    """The rotation that fields of a :class:`TargetConfig` describe."""
    return Rotary(known["rope_theta"], known["rope_scaling"], known["rotary_width"])


def rope_theta(raw: JsonObject) -> float:
    """The rotary base."""
    return hoisted(raw).number("rope_theta", 10000.0, least=1)


def rotary_width(raw: JsonObject, head_width: int) -> int | None:
    """Dimensions of a head that are rotated; None for all of them."""
    raw = hoisted(raw)
    share = raw.number("partial_rotary_factor", 1.0, SMALLEST_FACTOR, 1)
    if share == 1:
        return None
    width = int(head_width * share)  # As transformers rounds it.
    if width < 2 or width % 2:
        rule = f"of a head of {head_width} dimensions must be a number of pairs"
        raise raw.error("partial_rotary_factor", rule)
    return width


def hoisted(raw: JsonObject) -> JsonObject:
    """The file with the base and the rotated share that its scaling holds, besides the other keys.

    Raises:
      ValueError: if it gives one of them twice, and not alike. The readers of such files do not
        agree.
    """
    entry = rope_entry(raw)
    for key in OF_ALL_TYPES:
        if raw.has(key) and entry.has(key) and raw.values[key] != entry.values[key]:
            rule = f"is not the {key}={shown(entry.values[key])} of {entry.origin}"
            raise raw.error(key, rule, "remove the one that the model was not trained with")
    own = {key: entry.values[key] for key in OF_ALL_TYPES if entry.has(key)}
    return JsonObject({**raw.values, **own}, raw.origin)


def rope_scaling(raw: JsonObject, accepted: Collection[str] = ()) -> RopeScaling:
    """The rotary scaling.

    Args:
      raw: the file.
      accepted: keys that the family computes, as :func:`scaling_entry` takes them.

    Raises:
      ValueError: if it is of a type this library does not compute, a number is missing, or one
        would not be used.
    """
    kind, entry = scaling_entry(raw, accepted)
    condense = raw.number("rope_condense_ratio", 1.0, 1, LARGEST_FACTOR)
    if kind == "default":
        return None if condense == 1 else LinearRopeScaling(condense)
    if kind in SCALINGS:
        scaling = _scaling(kind, raw, entry)
        if condense == 1 or scaling == LinearRopeScaling(condense):
            return scaling
    raise ValueError(
        f"{entry.origin}: the type {kind!r} in {shown(dict(entry.values))} with "
        f"rope_condense_ratio={condense:g} is not supported; supported are the types default, "
        "linear, llama3, yarn, longrope and proportional, alone. A model whose scaling is optional "
        "runs within its original context once the entry is removed from config.json"
    )


def scaling_entry(raw: JsonObject, accepted: Collection[str] = ()) -> tuple[str, JsonObject]:
    """The type of the scaling, and the object that holds its numbers.

    Args:
      raw: the file.
      accepted: keys about the rotary embedding that its family computes, and others do not.

    Raises:
      ValueError: for a key about the rotary embedding that nothing here uses.
    """
    entry = rope_entry(raw)
    kind = entry.text("rope_type", entry.text("type", "default"))
    if entry.text("type", kind) != kind:
        raise entry.error("type", f"is not its rope_type={kind!r}")
    # Old files of Phi-3 call it su or yarn.
    if kind in ("su", "yarn") and entry.has("long_factor"):
        kind = "longrope"
    partial = "partial_rotary_factor"
    if partial not in accepted and (all_numbers := hoisted(raw)).number(partial, 1.0) != 1:
        holder = entry if entry.has(partial) else all_numbers
        raise holder.error(partial, "is not supported: heads are rotated whole", _OTHER)
    for key, part in entry.values.items():
        if isinstance(part, dict):
            raise entry.error(key, "is not supported: all layers rotate alike, by numbers", _OTHER)
    if kind == "default" or kind in SCALINGS:
        own = (*keys_of(SCALINGS[kind][1]), *_BESIDE.get(kind, ())) if kind in SCALINGS else ()
        used = {"rope_type", "type", *OF_ALL_TYPES, *own, *_OF_PICTURES, *accepted}
        check_used(entry, used, f"a rotary embedding of rope_type {kind!r}")
    check_rotary_keys(raw, (*ROPE_KEYS, *accepted), "the rotary embedding of this model")
    return kind, entry


def check_rotary_keys(raw: JsonObject, used: Collection[str], what: str) -> None:
    """Refuse a key that is about a rotary embedding by its name, and is not among those used."""
    named = {
        key: value
        for key, value in raw.values.items()
        if _ROTARY.search(key) and not (key in INTERLEAVED and value is False)
    }
    check_used(JsonObject(named, raw.origin), used, what)


def inner_layers(raw: JsonObject, key: str) -> JsonObject:
    """The object inside a file that describes its layers; only it states how they rotate."""
    check_rotary_keys(raw, (), f"a file whose layers are in {key}")
    return raw.part(key)


def check_used(raw: JsonObject, used: Collection[str], what: str) -> None:
    """Refuse a key that says something and is not among those that are used."""
    for key, value in raw.values.items():
        if key not in used and value is not None:
            raise raw.error(key, f"is not used by {what}", _UNUSED)


def rope_entry(raw: JsonObject) -> JsonObject:
    """The object that holds the scaling.

    Raises:
      ValueError: if both dialects are given and differ. The readers of such files do not agree.
    """
    five, four = raw.part("rope_parameters"), raw.part("rope_scaling")
    if not five.values:
        return four
    said = {"rope_type" if key == "type" else key: value for key, value in four.values.items()}
    if any(five.values.get(key) != value for key, value in said.items()):
        remedy = "move its numbers into rope_parameters, and remove it"
        raise raw.error("rope_scaling", "is not what rope_parameters says", remedy)
    return five


def _scaling(kind: str, raw: JsonObject, entry: JsonObject) -> RopeScaling:
    """A scaling of a type that is computed."""
    entry, (made, keys) = _with_original(raw, entry), SCALINGS[kind]
    beyond: dict[str, bool] = {}
    if kind in _BESIDE:
        entry = _as_transformers(kind, raw, entry)
    if kind == "longrope":
        original = entry.whole(_ORIGINAL)
        beyond["beyond"] = raw.whole("max_position_embeddings", original) > original
    return entry.made(made, keys, beyond, f"{kind} rope scaling")


def _with_original(raw: JsonObject, entry: JsonObject) -> JsonObject:
    """An entry with the range before scaling, which may stand next to it."""
    if not raw.has(_ORIGINAL):
        return entry
    if entry.has(_ORIGINAL) and entry.values[_ORIGINAL] != raw.values[_ORIGINAL]:
        rule = f"is not the {_ORIGINAL}={shown(entry.values[_ORIGINAL])} of {entry.origin}"
        raise raw.error(_ORIGINAL, rule, "remove the one that the model was not trained with")
    return entry.assuming({_ORIGINAL: raw.values[_ORIGINAL]})


def _as_transformers(kind: str, raw: JsonObject, entry: JsonObject) -> JsonObject:
    """An entry of YaRN or LongRoPE with what transformers takes for its absent numbers.

    The range before scaling is the model's then, the factor that of the two ranges, and a number of
    turns that is zero is absent.
    """
    most = "max_position_embeddings"
    original = entry.whole(_ORIGINAL, least=2) if entry.has(_ORIGINAL) else raw.whole(most, least=2)
    ranges = 1.0 if entry.has("factor") else raw.whole(most, original) / original
    factor = entry.number("factor", max(1.0, ranges), 1, LARGEST_FACTOR)
    if kind == "longrope":
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    else:
        magnitude = yarn_magnitude(factor)
        scales = [entry.number(key, 0.0) for key in _BESIDE["yarn"]]
        if all(scales):
            over, under = (yarn_magnitude(factor, scale) for scale in scales)
            magnitude = over / under
        elif scales[0] not in (0, 1) and not entry.has("attention_factor"):
            rule = "is not used without mscale_all_dim, and 1 is meant then"
            raise entry.error("mscale", rule, "give attention_factor, the factor itself, instead")
    turns = "beta_fast", "beta_slow"
    said = {key: one for key, one in entry.values.items() if key not in turns or one != 0}
    return JsonObject(said, entry.origin).assuming(
        {_ORIGINAL: original, "factor": factor, "attention_factor": magnitude}
    )


def raw_rope(rotary: Rotary, head_width: int) -> dict[str, Any]:
    """The inverse, in transformers 4's dialect, which transformers 5 reads too."""
    raw: dict[str, Any] = {"rope_theta": rotary.theta}
    if rotary.width is not None:
        share = rotary.width / head_width
        exact = int(head_width * share) == rotary.width
        raw["partial_rotary_factor"] = share if exact else math.nextafter(share, 1)
    scaling = rotary.scaling
    if scaling is None:
        return raw | {"rope_scaling": None}
    kind = next(name for name, (made, _) in SCALINGS.items() if type(scaling) is made)
    entry = as_raw(scaling, SCALINGS[kind][1])
    if kind == "linear":
        # Exactly these two keys: transformers before 4.43 accepts no others.
        return raw | {"rope_scaling": {"type": kind, **entry}}
    if kind == "longrope":
        raw[_ORIGINAL] = entry.pop(_ORIGINAL)
    if kind == "proportional":
        # transformers 4 does not know it: there is only the newer dialect.
        return raw | {"rope_parameters": {"rope_type": kind, **raw}}
    return raw | {"rope_scaling": {"rope_type": kind, **entry}}
