"""The name tables: which Hugging Face tensor is which block of which of our parameters.

A table is data, written in the axis letters of :mod:`longspec_jax.axes`, and read in both
directions. ``(K G H) D`` is a stored matrix whose rows run over key/value heads, their query groups
and the head width; ``D K * H`` is our parameter, in which the sources are laid side by side along
the starred axis: the groups ``G`` of the queries, then one slot each for key and value.
"""

import math
import re
from dataclasses import dataclass, field
from typing import TypeAlias

from longspec_jax.config import TargetConfig
from longspec_jax.drafters.longspec.config import DraftConfig

Sizes: TypeAlias = dict[str, int]
"""Size of every axis letter."""


@dataclass(frozen=True)
class Rule:
    """One of our parameters in axis letters, and the tensors it is made of."""

    path: str
    axes: str
    sources: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Part:
    """One stored tensor as a block of a parameter."""

    source: str
    groups: tuple[tuple[int, ...], ...]
    """Factors of every stored axis, the slowest first."""
    order: tuple[int, ...]
    """The factor that becomes each axis of the parameter."""
    start: int
    """Where the block begins on the starred axis."""
    depth: int
    """How far it reaches there."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        return tuple(math.prod(group) for group in self.groups)


@dataclass(frozen=True)
class Leaf:
    """One of our parameters."""

    path: str
    shape: tuple[int, ...]
    stack: int
    """The starred axis; 0 for a parameter of one part."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Table:
    """Everything a checkpoint may hold: our parameters, and what is left out on purpose."""

    leaves: tuple[Leaf, ...]
    dropped: dict[str, str]
    """Pattern of a stored name to the reason it is not needed."""
    dead: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Stored tensors that nothing reads: dropped on load, zeros on export."""

    @property
    def parts(self) -> dict[str, Part]:
        """Every stored tensor that is read, by name."""
        return {part.source: part for leaf in self.leaves for part in leaf.parts}

    def drops(self, name: str) -> bool:
        """Whether a stored tensor is left out on purpose."""
        return name in self.dead or any(re.fullmatch(p, name) for p in self.dropped)


_QKV = ("self_attn.q_proj", "(K G H)"), ("self_attn.k_proj", "(K H)"), ("self_attn.v_proj", "(K H)")
_QKV_KERNEL = tuple((f"{name}.weight", f"{rows} D") for name, rows in _QKV)
_QKV_BIAS = tuple((f"{name}.bias", rows) for name, rows in _QKV)
_GATE_UP = (("mlp.gate_proj.weight", "F D"), ("mlp.up_proj.weight", "F D"))
_MLP = (
    Rule("mlp/gate_up/kernel", "D * F", _GATE_UP),
    Rule("mlp/down/kernel", "F D", (("mlp.down_proj.weight", "D F"),)),
)

LAYER = (
    Rule("attention_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("attention/qkv/fused/kernel", "D K * H", _QKV_KERNEL),
    Rule("attention/out/kernel", "N H D", (("self_attn.o_proj.weight", "D (N H)"),)),
    Rule("mlp_norm/scale", "D", (("post_attention_layernorm.weight", "D"),)),
    *_MLP,
)
QKV_BIAS = (Rule("attention/qkv/fused/bias", "K * H", _QKV_BIAS),)
QK_NORM = (
    Rule("attention/q_norm/scale", "H", (("self_attn.q_norm.weight", "H"),)),
    Rule("attention/k_norm/scale", "H", (("self_attn.k_norm.weight", "H"),)),
)
MODEL = (
    Rule("embedding", "V D", (("model.embed_tokens.weight", "V D"),)),
    Rule("final_norm/scale", "D", (("model.norm.weight", "D"),)),
)
HEAD = (Rule("head", "V D", (("lm_head.weight", "V D"),)),)

DRAFT = (
    Rule("self_norm/scale", "D", (("input_layernorm.weight", "D"),)),
    Rule("self_qkv/fused/kernel", "D K * H", _QKV_KERNEL),
    Rule("self_qkv/fused/bias", "K * H", _QKV_BIAS),
    Rule("self_out/kernel", "N H D", (("self_attn.o_proj.weight", "D (N H)"),)),
    Rule("cross_norm/scale", "D", (("post_self_attention_layernorm.weight", "D"),)),
    Rule("cross_q/kernel", "D N H", (("cross_attn.q_proj.weight", "(N H) D"),)),
    Rule("cross_q/bias", "N H", (("cross_attn.q_proj.bias", "(N H)"),)),
    Rule("cross_out/kernel", "N H D", (("cross_attn.o_proj.weight", "D (N H)"),)),
    Rule("mlp_norm/scale", "D", (("post_cross_attention_layernorm.weight", "D"),)),
    *_MLP,
)
DRAFT_DEAD = (
    ("cross_attn.k_proj.weight", "(K H) D"),
    ("cross_attn.k_proj.bias", "(K H)"),
    ("cross_attn.v_proj.weight", "(K H) D"),
    ("cross_attn.v_proj.bias", "(K H)"),
)
"""Stored by the release and read by nobody: cross-attention reads the target's keys and values."""
DRAFT_PREFIXES = ("", "glide.", "draft_model.", "model.")
"""What the classes of the release put before the draft's names."""

ROTARY = {r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies follow from the configuration"}
TIED_HEAD = {r"lm_head\.weight": "the LM head is the embedding table"}


def target_table(config: TargetConfig) -> Table:
    """The table of a target: our ``layers_i/...`` from ``model.layers.i....``."""
    sizes = _sizes(config) | {"V": config.vocab_size}
    layer = LAYER + QKV_BIAS * config.qkv_bias + QK_NORM * config.qk_norm
    leaves = [_bind(rule, sizes) for rule in MODEL + HEAD * (not config.tied_embeddings)]
    for index in range(config.num_layers):
        ours, theirs = f"layers_{index}/", f"model.layers.{index}."
        leaves += [_bind(rule, sizes, ours, theirs) for rule in layer]
    return Table(tuple(leaves), ROTARY | (TIED_HEAD if config.tied_embeddings else {}))


def draft_table(config: DraftConfig) -> Table:
    """The table of a draft: the 20 tensors of the released format, without a prefix."""
    sizes = _sizes(config)
    dead = {name: _shape(axes, sizes) for name, axes in DRAFT_DEAD}
    return Table(tuple(_bind(rule, sizes) for rule in DRAFT), ROTARY, dead)


def _sizes(config: TargetConfig | DraftConfig) -> Sizes:
    """Sizes of the letters that target and draft share."""
    return {
        "D": config.model_width,
        "F": config.mlp_width,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "G": config.num_heads // config.num_kv_heads,
        "H": config.head_width,
        "*": 1,
    }


def _bind(rule: Rule, sizes: Sizes, ours: str = "", theirs: str = "") -> Leaf:
    """Give a rule its sizes and its full names."""
    axes = rule.axes.split()
    stack = axes.index("*") if "*" in axes else 0
    parts, start = [], 0
    for name, stored in rule.sources:
        groups = _groups(stored)
        letters = [letter for group in groups for letter in group]
        # A letter the parameter lacks runs along the starred axis; without one the block is a
        # single slot there, written as a last factor of 1.
        along = next((letter for letter in letters if letter not in axes), "*")
        if "*" in axes and along == "*":
            groups[0] = [*groups[0], "*"]
            letters = [letter for group in groups for letter in group]
        order = tuple(letters.index(along if axis == "*" else axis) for axis in axes)
        depth = sizes[along] if "*" in axes else sizes[axes[0]]
        factors = tuple(tuple(sizes[letter] for letter in group) for group in groups)
        parts.append(Part(theirs + name, factors, order, start, depth))
        start += depth
    shape = tuple(start if axis == stack else sizes[letter] for axis, letter in enumerate(axes))
    return Leaf(ours + rule.path, shape, stack, tuple(parts))


def _groups(stored: str) -> list[list[str]]:
    """``(K G H) D`` as ``[[K, G, H], [D]]``."""
    return [(several or one).split() for several, one in re.findall(r"\(([^)]*)\)|(\S+)", stored)]


def _shape(stored: str, sizes: Sizes) -> tuple[int, ...]:
    """Shape of a stored tensor."""
    return tuple(math.prod(sizes[letter] for letter in group) for group in _groups(stored))
