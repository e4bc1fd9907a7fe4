"""Layers with windows in a target's ``config.json``, and back.

``sliding_window`` says how many tokens a layer sees, ``layer_types`` which layers do. Files without
the latter follow their family's pattern. Such layers may rotate by positions of their own: the
scaling of a long context is not for them.
"""

from collections.abc import Mapping
from typing import Any

from longspec_jax.checks import shown
from longspec_jax.config.layers import HeadsConfig, LayerConfig, Rotary
from longspec_jax.config.target import TargetConfig
from longspec_jax.weights.families import Family
from longspec_jax.weights.json_files import JsonObject
from longspec_jax.weights.rope import (
    FULL,
    OF_ALL_TYPES,
    SLIDING,
    check_used,
    layer_types,
    raw_rope,
    rotary_of,
    sliding_types,
)

SWITCH = "sliding_window"
"""The window, and the key that turns it on where a family has no other."""


def without_windows(raw: JsonObject, family: Family) -> JsonObject:
    """The file with the heads and the rotation of only the layers without a window.

    Raises:
      ValueError: if it says more of its layers than is computed, or gives a base twice.
    """
    heads = {key: raw.values[own] for key, own in family.full_heads.items() if raw.has(own)}
    raw, local_theta = JsonObject({**raw.values, **heads}, raw.origin), family.local_theta
    if local_theta is None:
        return raw
    parts = raw.part("rope_parameters")
    if not parts.has(FULL) and not parts.has(SLIDING):
        return raw
    check_used(parts, (FULL, SLIDING), "rotary embeddings by types of layers")
    near = parts.part(SLIDING)
    check_used(near, ("rope_type", "type", "rope_theta"), "layers with a window")
    base = near.values.get("rope_theta")
    given_twice = local_theta != "rope_theta" and base is not None and raw.has(local_theta)
    if given_twice and raw.values[local_theta] != base:
        rule = f"is not the rope_theta={shown(base)} of {near.origin}"
        raise raw.error(local_theta, rule, "remove the one that the model was not trained with")
    return JsonObject({**raw.values, "rope_parameters": parts.values.get(FULL)}, raw.origin)


def window_kinds(raw: JsonObject, family: Family, known: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers and their pattern; nothing where no window hides a token.

    Args:
      raw: the whole file.
      family: of the target.
      known: fields of its :class:`TargetConfig`.
    """
    window = _window(raw, family)
    if window is None:
        return {}
    layers = range(known["num_layers"])
    usual = [SLIDING if family.windows(raw, index) else FULL for index in layers]
    types = layer_types(raw, usual, SLIDING)
    if SLIDING not in types:
        return {}
    far = rotary_of(known)
    near = far if family.local_theta is None else _local(raw, family.local_theta, far)
    heads = _local_heads(raw, family, known)
    if window >= known["max_positions"] and near == far and heads is None:
        return {}
    kinds = (LayerConfig(near, window, heads=heads), LayerConfig(far))[: len({*types})]
    return {"kinds": kinds, "pattern": tuple(int(each == FULL) for each in types)}


def _window(raw: JsonObject, family: Family) -> int | None:
    """Tokens that a layer with a window sees; None where no layer has one."""
    switch = family.window_switch
    if switch is None or (switch != SWITCH and not raw.flag(switch, False)):
        return None
    # Null means that there is no window, and absent the family's own.
    default = None if SWITCH in raw.values else family.default_window
    return raw.whole(SWITCH) if default is None and raw.has(SWITCH) else default


def _local(raw: JsonObject, key: str, far: Rotary) -> Rotary:
    """The rotation of layers with a window: a base of their own, and no scaling."""
    part = raw.part("rope_parameters").part(SLIDING)
    if (kind := part.text("rope_type", "default")) != "default":
        raise part.error("rope_type", f"{kind} is not supported in layers with a window")
    theta = part.number("rope_theta", raw.number(key, far.theta, least=1), least=1)
    return Rotary(theta)


def _local_heads(raw: JsonObject, family: Family, known: Mapping[str, Any]) -> HeadsConfig | None:
    """The heads of layers with a window; None if they are those of the others."""
    if not family.full_heads:
        return None
    heads = HeadsConfig(raw.whole("num_key_value_heads"), raw.whole("head_dim"))
    return None if heads == HeadsConfig(known["num_kv_heads"], known["head_width"]) else heads


def raw_windows(config: TargetConfig, family: Family) -> dict[str, Any]:
    """The inverse, which transformers 4 and 5 read."""
    if family.window_switch is None:
        return {}
    near = next((layer for layer in config.layers if layer.window is not None), None)
    if near is None:
        # Absent, transformers may assume a window.
        return {SWITCH: None} if family.window_switch == SWITCH else {}
    raw: dict[str, Any] = {family.window_switch: True, SWITCH: near.window}
    if FULL in (types := sliding_types(config)):
        raw["layer_types"] = types
    if family.local_theta is not None and near.rotary is not None:
        far = raw_rope(config.rotary, config.head_width)
        given = far.get("rope_scaling") or far.get("rope_parameters")
        scaling = given or {"rope_type": "default"}
        kind = scaling.get("rope_type", scaling.get("type"))
        both = {key: far[key] for key in OF_ALL_TYPES if key in far}
        raw["rope_parameters"] = {
            FULL: {**scaling, "rope_type": kind, **both},
            SLIDING: {"rope_type": "default", "rope_theta": near.rotary.theta},
        }
        if family.local_theta not in far:
            raw[family.local_theta] = near.rotary.theta
    return raw
