"""Name tables: which stored tensor is which block of which parameter; strict matching with them.

A table is data, written in the axis letters of :mod:`longspec_jax.axes`, and read in both
directions. ``(K G H) D`` is a stored matrix whose rows run over key/value heads, their query groups
and the head width; ``D K * H`` is our parameter, in which the sources are laid side by side along
the starred axis: the groups ``G`` of the queries, then one slot each for key and value.

Every stored tensor must be read or listed as dropped, every parameter must be filled, and all
shapes must agree. All mismatches are reported together: a wrong model is easier to recognise so.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from longspec_jax.config.layers import ExpertsConfig, LayerConfig
from longspec_jax.config.target import TargetConfig
from longspec_jax.sharding import path_name
from longspec_jax.weights.checkpoint import Tensors
from longspec_jax.weights.families import FAMILIES, Names

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
    inner: int = 1
    """The size of the starred axis' second factor, where it is of two of the stored ones."""
    first: int = 0
    """The row of the stored tensor where the block begins, if it holds several."""
    rows: int = 0
    """Rows of the stored tensor that holds several blocks; 0 if it is this one."""
    shuffle: tuple[int, ...] | None = None
    """The stored place of every dimension of a head, where the order differs."""
    heads: int = 0
    """The axis of the parameter along which it does."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        first, *others = (math.prod(group) for group in self.groups)
        return (self.rows or first, *others)


@dataclass(frozen=True)
class Leaf:
    """One of our parameters."""

    path: str
    shape: tuple[int, ...]
    stack: int
    """The starred axis; 0 for a parameter of one part."""
    parts: tuple[Part, ...]
    dtype: str | None = None
    """Of codes and scales; None for the model's."""


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


_QKV_ROWS = "(K G h)", "(K h)", "(K H)"
"""Small ``h`` is a head in the order of the family's rotation, ``H`` one in ours."""
_GATED_ROWS = "(K A h)", "(K h)", "(K h)"
"""The same where a gate is after every query (``A``, twice ``G``). It is in the order of the
queries. So are the values then, and the columns of the output."""


def _qkv(
    names: tuple[str, ...], kind: str, columns: str = "", layout: tuple[str, ...] = _QKV_ROWS
) -> tuple[tuple[str, str], ...]:
    stored = zip(names, layout[: len(names)], strict=True)
    return tuple((f"{name}.{kind}", rows + columns) for name, rows in stored)


def _norm(path: str, name: str) -> Rule:
    return Rule(f"{path}/scale", "D", ((f"{name}.weight", "D"),))


def _mlp(names: Names, width: str = "F") -> tuple[Rule, ...]:
    both = tuple((f"{name}.weight", f"{width} D") for name in names.gate_up)
    return (
        Rule("mlp/gate_up/kernel", f"D * {width}", both),
        Rule("mlp/down/kernel", f"{width} D", ((f"{names.down}.weight", f"D {width}"),)),
    )


def _experts(experts: ExpertsConfig) -> tuple[Rule, ...]:
    """Rules of a mixture of experts, every matrix of which is a tensor of its own."""
    names = [f"mlp.experts.{expert}" for expert in range(experts.count)]
    gate_up = [f"{name}.{part}_proj.weight" for name in names for part in ("gate", "up")]
    down = [f"{name}.down_proj.weight" for name in names]
    both = tuple((f"mlp.shared_expert.{part}_proj.weight", "Q D") for part in ("gate", "up"))
    shared = (
        Rule("mlp/shared/gate_up/kernel", "D * Q", both),
        Rule("mlp/shared/down/kernel", "Q D", (("mlp.shared_expert.down_proj.weight", "D Q"),)),
        Rule("mlp/shared_gate/kernel", "D O", (("mlp.shared_expert_gate.weight", "O D"),)),
    )
    return (
        *shared * (experts.shared is not None),
        Rule("mlp/router/kernel", "D E", (("mlp.gate.weight", "E D"),)),
        Rule("mlp/expert_gate_up", "* F D", tuple((name, "F D") for name in gate_up)),
        Rule("mlp/expert_down", "* D F", tuple((name, "D F") for name in down)),
    )


def _stacked_experts() -> tuple[Rule, ...]:
    """Rules of stacked experts with biases, gate and up by turns (gpt-oss)."""
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return (
        Rule("mlp/router/kernel", "D E", (("mlp.router.weight", "E D"),)),
        Rule("mlp/router/bias", "E", (("mlp.router.bias", "E"),)),
        Rule("mlp/expert_gate_up", "* F D", ((gate_up, "E D (F u)"),)),
        Rule("mlp/expert_gate_up_bias", "* F", ((f"{gate_up}_bias", "E (F u)"),)),
        Rule("mlp/expert_down", "* D F", ((down, "E F D"),)),
        Rule("mlp/expert_down_bias", "* D", ((f"{down}_bias", "E D"),)),
    )


def _parallel_experts(names: Names) -> tuple[Rule, ...]:
    """Rules of an MLP and of stacked experts next to it, gate above up (Gemma 4)."""
    return (
        *_mlp(names, "Q"),
        _norm("mlp_own_norm", "post_feedforward_layernorm_1"),
        _norm("experts_norm", "post_feedforward_layernorm_2"),
        _norm("experts/norm", "pre_feedforward_layernorm_2"),
        Rule("experts/router_norm/scale", "D", (("router.scale", "D"),)),
        Rule("experts/router/kernel", "D E", (("router.proj.weight", "E D"),)),
        Rule("experts/expert_factor", "E", (("router.per_expert_scale", "E"),)),
        Rule("experts/expert_gate_up", "* F D", (("experts.gate_up_proj", "E (u F) D"),)),
        Rule("experts/expert_down", "* D F", (("experts.down_proj", "E D F"),)),
    )


_RECURRENT_NORM = "recurrence/norm/scale"
_FLOAT32 = "recurrence/decay", "recurrence/decay_bias", _RECURRENT_NORM
"""Parameters of a recurrent layer that are float32 whatever the model's dtype."""


def _recurrence(names: Names) -> tuple[Rule, ...]:
    """Rules of a Gated DeltaNet; the letters are those of :func:`layer_sizes`."""
    rows = tuple((f"{names.recurrence}.{name}.weight", rows) for name, rows in names.recurrent_rows)
    rates = tuple((f"{names.recurrence}.{name}.weight", rows) for name, rows in names.rate_rows)
    taps = (f"{names.recurrence}.conv1d.weight", "(J X) O I")
    return (
        Rule("recurrence/inputs/kernel", "D J *", rows),
        Rule("recurrence/rates/kernel", "D J *", rates),
        Rule("recurrence/taps", "J * O I", (taps, taps, (taps[0], "(J Z) O I"))),
        Rule("recurrence/decay", "J P", ((f"{names.recurrence}.A_log", "(J P)"),)),
        Rule("recurrence/decay_bias", "J P", ((f"{names.recurrence}.dt_bias", "(J P)"),)),
        Rule(_RECURRENT_NORM, "Y", ((f"{names.recurrence}.norm.weight", "Y"),)),
        Rule(
            "recurrence/out/kernel", "M Y D", ((f"{names.recurrence}.out_proj.weight", "D (M Y)"),)
        ),
    )


_USUAL, _PLAIN = Names(), LayerConfig()
QKV_KERNEL = _qkv(_USUAL.qkv, "weight", " D")
QKV_BIAS_PARTS = _qkv(_USUAL.qkv, "bias")
MLP = _mlp(_USUAL)
_QK_NORM = (
    Rule("attention/q_norm/scale", "H", (("self_attn.q_norm.weight", "h"),)),
    Rule("attention/k_norm/scale", "H", (("self_attn.k_norm.weight", "h"),)),
)
_WIDE_QK_NORM = (
    Rule("attention/q_norm/scale", "K G H", (("self_attn.q_norm.weight", "(K G h)"),)),
    Rule("attention/k_norm/scale", "K H", (("self_attn.k_norm.weight", "(K h)"),)),
)
_OUT_BIAS = (Rule("attention/out/bias", "D", (("self_attn.o_proj.bias", "D"),)),)
_FACTOR = (Rule("factor", "O", (("layer_scalar", "O"),)),)
_SINKS = (Rule("attention/sinks", "K G", (("self_attn.sinks", "(K G)"),)),)
MARKOV = (
    Rule("markov/embedding", "V R", (("markov_head.markov_w1.weight", "V R"),)),
    Rule("markov/head", "v R", (("markov_head.markov_w2.weight", "v R"),)),
)
"""Of drafts that propose a block (DSpark)."""
MODEL = (
    Rule("embedding", "V D", (("model.embed_tokens.weight", "V D"),)),
    Rule("final_norm/scale", "D", (("model.norm.weight", "D"),)),
)
_LAYER_INPUTS = (
    Rule("input_embedding", "V L", (("model.embed_tokens_per_layer.weight", "V L"),)),
    Rule("input_projection/kernel", "D L", (("model.per_layer_model_projection.weight", "L D"),)),
    Rule("input_norm/scale", "U", (("model.per_layer_projection_norm.weight", "U"),)),
)
_LAYER_INPUT = (
    Rule("input_gate/kernel", "D U", (("per_layer_input_gate.weight", "U D"),)),
    Rule("input_projection/kernel", "U D", (("per_layer_projection.weight", "D U"),)),
    _norm("input_norm", "post_per_layer_input_norm"),
)
HEAD = (Rule("head", "V D", (("lm_head.weight", "V D"),)),)

ROTARY = {r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies follow from the configuration"}
HEADS_BESIDE = {
    r"model\.medusa_layers\..*": "heads of TokenSwift, which are a draft",
    r"model\.mtp_layers\..*": "layers of multi-token prediction, which are a draft",
    r"mtp\..*": "layers that predict several tokens, which are a draft",
}
KEYS = r"self_attn\.[kv]_(proj|norm)\.weight"
"""What published files hold of layers that have no use for it."""
TIED_HEAD = {r"lm_head\.weight": "the LM head is the embedding table"}


def target_table(config: TargetConfig) -> Table:
    """The table of a target: our ``layers_i/...`` from ``model.layers.i....``."""
    width = config.layer_inputs or 0
    inputs = {"U": width, "L": width * config.num_layers}
    sizes = layer_sizes(config) | {"V": config.vocab_size, **inputs}
    family = FAMILIES.get(config.architecture, FAMILIES["LlamaForCausalLM"])
    whole = MODEL + HEAD * (not config.tied_embeddings) + _LAYER_INPUTS * (width > 0)
    leaves = [bind(rule, sizes) for rule in whole]
    for index in range(config.num_layers):
        ours, theirs = f"layers_{index}/", f"model.layers.{index}."
        kind = config.layer(index)
        own, rotary = layer_sizes(config, kind), kind.rotary or config.rotary
        shuffle = head_order(own["H"], rotary.block, family.interleaved)
        leaves += [
            bind(rule, sizes | own, ours, theirs, shuffle)
            for rule in layer_rules(config, family.names, kind)
        ]
    tied = TIED_HEAD if config.tied_embeddings else {}
    reading = "|".join(str(i) for i in range(config.num_layers) if config.source(i) != i)
    unread = {rf"model\.layers\.({reading})\.{KEYS}": "the layer reads the keys of another one"}
    return Table(tuple(leaves), ROTARY | HEADS_BESIDE | tied | (unread if reading else {}))


def layer_rules(
    config: TargetConfig, names: Names = _USUAL, kind: LayerConfig = _PLAIN
) -> tuple[Rule, ...]:
    """The rules of a layer, by its kind, the switches of its target and its family's names."""
    pre = (_norm("attention_norm", names.attention_norm), _norm("mlp_norm", names.mlp_norm))
    post = (
        _norm("attention_post_norm", names.attention_post_norm),
        _norm("mlp_post_norm", names.mlp_post_norm),
    )
    mlp = _mlp(names)
    if kind.experts is not None:
        mlp = _stacked_experts() if names.stacked_experts else _experts(kind.experts)
        mlp = _parallel_experts(names) if kind.experts.parallel_mlp else mlp
    norms = (*pre * config.pre_norms, *post * config.post_norms)
    if kind.recurrence is not None:
        return *norms, *_recurrence(names), *mlp
    bias = (Rule("attention/qkv/fused/bias", "K * H", _qkv(names.qkv, "bias")),)
    own = 0 if kind.keys_of is not None else 2 - kind.keys_are_values
    layout, columns = _QKV_ROWS, "D (N H)"
    if config.gated_attention:
        layout, columns = _GATED_ROWS, "D (N h)"
    qkv = _qkv(names.qkv[: 1 + own], "weight", " D", layout)
    return (
        *norms,
        Rule("attention/qkv/fused/kernel", "D K * H", qkv),
        Rule("attention/out/kernel", "N H D", (("self_attn.o_proj.weight", columns),)),
        *mlp,
        *bias * config.qkv_bias,
        *_OUT_BIAS * config.out_bias,
        *_SINKS * config.attention_sinks,
        *_QK_NORM[: 1 + (own > 0)] * config.qk_norm,
        *_WIDE_QK_NORM * config.wide_qk_norm,
        *_LAYER_INPUT * (config.layer_inputs is not None),
        *_FACTOR * config.layer_factors,
    )


def head_order(width: int, rotated: int | None, interleaved: bool) -> tuple[int, ...] | None:
    """Where a family stores the dimensions of a head, in our order; None if where we have them.

    Ours rotates the pairs ``(i, i + width / 2)``. Families rotate the first dimensions only, or
    pairs of neighbours. Queries and keys are brought into our order alike, which changes no score.

    Args:
      width: of a head.
      rotated: how many dimensions are rotated; all if None.
      interleaved: whether the pairs are ``(2i, 2i + 1)``, and not ``(i, i + rotated / 2)``.
    """
    pairs, half = (rotated or width) // 2, width // 2
    step, second = (2, 1) if interleaved else (1, pairs)
    low, high = ([step * i + at for i in range(pairs)] for at in (0, second))
    still = [*range(2 * pairs, width)]
    order = *low, *still[: half - pairs], *high, *still[half - pairs :]
    return None if order == tuple(range(width)) else order


def layer_sizes(config: Any, kind: LayerConfig = _PLAIN) -> Sizes:
    """Sizes of the letters of a layer, by the fields of a target's or a draft's configuration.

    Args:
      kind: of the layer. Of a recurrence there are ``J`` key heads of width ``X``, ``P`` of the
        ``M`` value heads of width ``Y`` for each of them, ``Z`` the widths of these together, and
        ``I`` taps; ``W`` and ``C`` are what a key head's inputs and rates take together. ``Q`` is
        the width of a shared expert, or of the MLP next to experts.
    """
    own: Sizes = {}
    kv_heads, width = config.num_kv_heads, config.head_width
    if kind.heads is not None:
        kv_heads, width = kind.heads.num_kv_heads, kind.heads.head_width
    if (experts := kind.experts) is not None:
        own |= {
            "E": experts.count,
            "F": experts.width,
            "Q": experts.shared or kind.mlp_width or config.mlp_width,
        }
    if (r := kind.recurrence) is not None:
        own |= {"J": r.key_heads, "M": r.value_heads, "P": r.shared, "X": r.key_width}
        own |= {"Y": r.value_width, "Z": r.shared * r.value_width, "I": r.taps}
        own |= {"W": r.inputs_width + r.shared * r.value_width, "C": 2 * r.shared}
    return {
        "D": config.model_width,
        "F": kind.mlp_width or config.mlp_width,
        "N": config.num_heads,
        "K": kv_heads,
        "G": config.num_heads // kv_heads,
        "H": width,
        "A": 2 * config.num_heads // kv_heads,
        "O": 1,
        "u": 2,
        "*": 1,
        **own,
    }


def bind(
    rule: Rule,
    sizes: Sizes,
    ours: str = "",
    theirs: str = "",
    shuffle: tuple[int, ...] | None = None,
) -> Leaf:
    """Give a rule its sizes and its full names.

    A name that comes several times is one tensor, whose rows are the sources one after the other.

    Args:
      shuffle: the stored place of every dimension of a rotated head; ours if absent.
    """
    axes = rule.axes.split()
    stack = axes.index("*") if "*" in axes else 0
    parts, start, rows = [], 0, Counter()
    times = Counter(name for name, _ in rule.sources)
    for name, stored in rule.sources:
        order_of = shuffle if "h" in stored else None
        groups = _groups(stored.replace("h", "H"))
        letters = [letter for group in groups for letter in group]
        # Letters the parameter lacks run along the starred axis, the first slowest; without one the
        # block is a single slot there, written as a last factor of 1.
        along = [letter for letter in letters if letter not in axes] or ["*"]
        if "*" in axes and along == ["*"]:
            groups[0] = [*groups[0], "*"]
            letters = [letter for group in groups for letter in group]
        order = tuple(
            letters.index(letter) for axis in axes for letter in (along if axis == "*" else [axis])
        )
        depth = math.prod(sizes[letter] for letter in along) if "*" in axes else sizes[axes[0]]
        inner = math.prod(sizes[letter] for letter in along[1:])
        factors = tuple(tuple(sizes[letter] for letter in group) for group in groups)
        heads = axes.index("H") if order_of else 0
        part = Part(
            theirs + name,
            factors,
            order,
            start=start,
            depth=depth,
            inner=inner,
            first=rows[name],
            shuffle=order_of,
            heads=heads,
        )
        rows[name] += math.prod(factors[0])
        parts.append((part, name if times[name] > 1 else None))
        start += depth
    shape = tuple(start if axis == stack else sizes[letter] for axis, letter in enumerate(axes))
    whole = (replace(part, rows=rows[name]) if name else part for part, name in parts)
    dtype = "float32" if rule.path in _FLOAT32 else None
    return Leaf(ours + rule.path, shape, stack, tuple(whole), dtype)


def _groups(stored: str) -> list[list[str]]:
    """``(K G H) D`` as ``[[K, G, H], [D]]``."""
    return [(several or one).split() for several, one in re.findall(r"\(([^)]*)\)|(\S+)", stored)]


def stored_shape(stored: str, sizes: Sizes) -> tuple[int, ...]:
    """Shape of a stored tensor."""
    return tuple(math.prod(sizes[letter] for letter in group) for group in _groups(stored))


FLOATING = ("bfloat16", "float16", "float32", "float64")
MOST_REPORTED = 8
"""Problems of one kind that are spelled out; the others are counted."""


def check_layers(config: TargetConfig, tensors: Tensors, origin: str) -> None:
    """Raise if a configuration has more layers than files could hold, before they are listed."""
    if config.num_layers > len(tensors):
        layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
        raise ValueError(
            f"{origin}: num_hidden_layers={config.num_layers}, but the weights next to it hold "
            f"{len(tensors)} tensors of {len(layers)} layers; use the file that was saved with them"
        )


def check_tensors(table: Table, tensors: Tensors, origin: str, dtype: str | None = None) -> None:
    """Raise unless the tensors are exactly those of the table.

    Args:
      table: the table of the model that its configuration describes.
      tensors: the stored tensors, prefix removed.
      origin: where they come from, for the message.
      dtype: what they must be stored in; any floating dtype if absent.
    """
    parts = {part.source: part for leaf in table.leaves if not leaf.dtype for part in leaf.parts}
    shapes = {name: part.shape for name, part in table.parts.items()} | table.dead
    missing = [f"missing {name} {shapes[name]}" for name in sorted(set(table.parts) - set(tensors))]
    unexpected, wrong = [], []
    for name, tensor in sorted(tensors.items()):
        if name not in shapes:
            if not table.drops(name):
                unexpected.append(f"unexpected {name} {tensor.shape}")
        elif tensor.shape != shapes[name]:
            wrong.append(f"{name} is {tensor.shape}, must be {shapes[name]}")
        elif name in parts and tensor.dtype not in FLOATING:
            wrong.append(f"{name} is stored as {tensor.dtype}, must be floating point")
        elif name in parts and dtype is not None and tensor.dtype != dtype:
            wrong.append(f"{name} is {tensor.dtype}, config.json says {dtype}: pass dtype=")
    _report(
        (missing, unexpected, wrong),
        f"the tensors of {origin} are not those its config.json describes",
        "The files belong to another model, are incomplete, or are not of a supported family",
    )


def check_params(table: Table, params: PyTree, dtype: str) -> dict[str, jax.Array]:
    """The parameters by path; raises unless they are exactly those of the table."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    found = {path_name(path): leaf for path, leaf in paths}
    if any(path.endswith("/kernel/codes") for path in found):
        raise ValueError("the target is quantised; copy the folder it was loaded from instead")
    shapes = {leaf.path: leaf.shape for leaf in table.leaves}
    dtypes = {leaf.path: leaf.dtype for leaf in table.leaves}
    missing = [f"missing {path} {shapes[path]}" for path in sorted(set(shapes) - set(found))]
    unexpected, wrong = [], []
    for path, leaf in sorted(found.items()):
        if path not in shapes:
            unexpected.append(f"unexpected {path} {leaf.shape}")
        elif leaf.shape != shapes[path]:
            wrong.append(f"{path} is {leaf.shape}, must be {shapes[path]}")
        elif leaf.dtype != jnp.dtype(dtypes[path] or dtype):
            wrong.append(f"{path} is {leaf.dtype}, the configuration says {dtypes[path] or dtype}")
    _report(
        (missing, unexpected, wrong),
        "the parameters do not fit their configuration",
        "Save them with the configuration they were made with, and cast them to its dtype",
    )
    return found


def _report(kinds: tuple[list[str], ...], what: str, remedy: str) -> None:
    """Raise one error for all problems, the first few of every kind spelled out."""
    lines = []
    for problems in kinds:
        lines += problems[:MOST_REPORTED]
        if len(problems) > MOST_REPORTED:
            lines.append(f"and {len(problems) - MOST_REPORTED} more like these")
    if lines:
        raise ValueError(f"{what}:\n  " + "\n  ".join(lines) + f"\n{remedy}.")
