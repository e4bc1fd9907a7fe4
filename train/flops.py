"""Floating-point operations that a training step needs, and how many a device can do.

Needed is what no implementation can leave out: the target's forward pass as far as the draft reads
it, which is the keys and values of its last layer, the draft's forward and backward pass (a
target's own, where the target is trained), the head once forward and once for the gradient of its
input. Distillation needs the rest of the last layer and the head once more, for the target's own
distribution. What is done twice to save memory, and the target's loss, which is a diagnostic, do
not count. A multiplication with an addition counts as two operations, attention
counts the keys that a causal query sees, and norms, rotations and softmax count nothing.
"""

from collections.abc import Sequence
from typing import Any

from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig

from .objectives import DraftObjective, TargetObjective

_FORWARD_AND_BACKWARD = 3
"""Each product has two in the backward pass: for its input and for its weights."""
_DENSE_PEAKS = {"H100": 990e12, "H200": 990e12, "A100": 312e12}
"""Operations a second in 16 bits, without sparsity, as the vendor states them."""
_SLOWER = ("PCIe", "NVL")
"""Boards of the same names with other clocks, but for A100."""


def flops_per_token(objective: Any, length: int) -> float:
    """Needed operations of one token of a row of this length; 0 for objectives not known here."""
    match objective:
        case DraftObjective():
            target, draft = objective.target, objective.draft
            head = _product(target.model_width, target.vocab_size)
            levels = max(1, objective.settings.rollout)
            learned = _FORWARD_AND_BACKWARD * _draft(draft, length) + 2 * head
            read = _target(target, length) - _after_last_keys(target, length)
            imitated = head + _after_last_keys(target, length)
            return read + levels * learned + (imitated if objective.settings.distillation else 0.0)
        case TargetObjective():
            target = objective.config
            head = _product(target.model_width, target.vocab_size)
            return _FORWARD_AND_BACKWARD * (_target(target, length) + head)
    return 0.0


def peak_tokens_per_second(
    objective: Any, length: int, dtype: str, devices: Sequence[Any]
) -> float | None:
    """Tokens a second if the devices did what a step needs at their peak; None if it is unknown."""
    peak, flops = _peak(devices[0].device_kind), flops_per_token(objective, length)
    if peak is None or not flops or dtype == "float32":
        return None
    return len(devices) * peak / flops


def _peak(kind: str) -> float | None:
    for name, peak in _DENSE_PEAKS.items():
        if name in kind and not (name != "A100" and any(word in kind for word in _SLOWER)):
            return peak
    return None


def _target(config: TargetConfig, length: int) -> float:
    """All layers, forward."""
    layer = _projections(config) + _mlp(config) + _attention(config, (length + 1) / 2)
    return config.num_layers * layer


def _after_last_keys(config: TargetConfig, length: int) -> float:
    """Of the last layer, all but its keys and values."""
    keys_values = _product(config.model_width, 2 * config.num_kv_heads * config.head_width)
    return _target(config, length) / config.num_layers - keys_values


def _draft(config: DraftConfig, length: int) -> float:
    """Self-attention in its window, cross-attention with queries alone, and the MLP, forward."""
    window = min(config.window + 1, length)
    seen = window - window * (window - 1) / (2 * length)  # On average: early tokens see fewer.
    cross = 2 * _product(config.model_width, config.num_heads * config.head_width)
    attention = _attention(config, seen) + _attention(config, (length + 1) / 2)
    return _projections(config) + cross + _mlp(config) + attention


def _projections(config: TargetConfig | DraftConfig) -> float:
    """Queries, keys, values and output."""
    heads = 2 * (config.num_heads + config.num_kv_heads)
    return _product(config.model_width, heads * config.head_width)


def _mlp(config: TargetConfig | DraftConfig) -> float:
    return 3 * _product(config.model_width, config.mlp_width)


def _attention(config: TargetConfig | DraftConfig, keys: float) -> float:
    """Scores and weighted values of a query that sees so many keys."""
    return 2 * _product(config.num_heads * config.head_width, 1) * keys


def _product(inputs: int, outputs: int) -> float:
    return 2.0 * inputs * outputs
