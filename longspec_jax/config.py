"""Frozen, hashable configurations of target and tree, and the one table of known targets.

A configuration is a legal static argument of ``jax.jit``. Fields are declared once, here; reading
them from a Hugging Face ``config.json`` is :mod:`longspec_jax.weights.hf_config`'s work. A draft's
configuration lies beside the draft, such as :mod:`longspec_jax.drafters.longspec.config`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspec_jax.checks import finite_number, is_number, is_whole, shown, whole_number

ATTENTION = ("pallas", "mosaic", "triton", "xla", "reference", "interpret")
"""Names of the implementations in :mod:`longspec_jax.ops.attention.dispatch`, which imports jax."""
KV_DTYPES = ("fp8",)
"""Names of the dtypes in :mod:`longspec_jax.ops.attention.float8`, which imports jax."""
MESH_AXES = ("data", "fsdp", "tp")
"""Axes of the mesh that :mod:`longspec_jax.sharding` makes, which imports jax."""
BATCH_AXES = ("data", "fsdp")
"""Those over both of which batch rows are spread."""
MAX_LAYERS = 1024
"""Most layers of a target: every layer is a part of its own of the compiled program."""
MAX_EXPERTS = 4096
"""Most experts of a layer."""
SMALLEST_EPS = 1e-30
"""Least epsilon of a norm that float32 can still add and divide by."""
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6
"""Between them is every factor of a rotary scaling; no soft cap is smaller."""


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a factor: Vicuna-16k, LongChat (and its ``rope_condense_ratio``)."""

    factor: float

    def __post_init__(self) -> None:
        finite_number("linear rope scaling: factor", self.factor, 1, LARGEST_FACTOR)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        who = "llama3 rope scaling: "
        finite_number(f"{who}factor", self.factor, 1, LARGEST_FACTOR)
        finite_number(
            f"{who}low_freq_factor", self.low_freq_factor, SMALLEST_FACTOR, LARGEST_FACTOR
        )
        finite_number(
            f"{who}high_freq_factor", self.high_freq_factor, SMALLEST_FACTOR, LARGEST_FACTOR
        )
        whole_number(f"{who}original_max_positions", self.original_max_positions)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"{who}high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv:2309.00071): pairs that turn slowly are divided by a factor, a ramp between."""

    factor: float
    original_max_positions: int
    """The range of the model before it was stretched."""
    attention_factor: float
    """Factor on cosines and sines, so on queries and keys alike."""
    beta_fast: float = 32.0
    """Pairs that make more turns than this over the original range stay as they are."""
    beta_slow: float = 1.0
    """Pairs that make fewer are divided by the whole factor."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""

    def __post_init__(self) -> None:
        who = "yarn rope scaling: "
        finite_number(f"{who}factor", self.factor, 1, LARGEST_FACTOR)
        whole_number(f"{who}original_max_positions", self.original_max_positions)
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            finite_number(who + name, getattr(self, name), SMALLEST_FACTOR, LARGEST_FACTOR)

    @classmethod
    def usual(cls, factor: float, original_max_positions: int) -> "YarnRopeScaling":
        """With the attention factor of the paper (equation 22), ``0.1 ln(factor) + 1``."""
        return cls(factor, original_max_positions, yarn_magnitude(factor))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """``0.1 scale ln(factor) + 1``, which YaRN multiplies cosines and sines by."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): every pair is divided by a factor of its own.

    There are two sets of factors. The long one is used where the target's range is beyond the
    original one. The choice is made when a target is loaded: a cache holds keys of one set.
    """

    short: tuple[float, ...]
    """Factors ``[rotary_width / 2]`` within the original range."""
    long: tuple[float, ...]
    """Factors beyond it."""
    original_max_positions: int
    attention_factor: float
    """Factor on cosines and sines."""
    beyond: bool
    """Whether the long set is used."""

    def __post_init__(self) -> None:
        who = "longrope rope scaling: "
        whole_number(f"{who}original_max_positions", self.original_max_positions)
        for factor in (*self.short, *self.long, self.attention_factor):
            finite_number(f"{who}a factor", factor, SMALLEST_FACTOR, LARGEST_FACTOR)
        if len(self.short) != len(self.long):
            raise ValueError(
                f"{who}{len(self.short)} short factors must be as many as the long ones, "
                f"{len(self.long)}"
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The set that is used."""
        return self.long if self.beyond else self.short


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | None


@dataclass(frozen=True)
class Rotary:
    """How the heads of a layer are rotated by position."""

    theta: float = 10000.0
    scaling: RopeScaling = None
    width: int | None = None
    """Dimensions of a head that are rotated; all of them if absent."""

    def __post_init__(self) -> None:
        finite_number("rope_theta", self.theta, 1)
        if self.theta == 1 and isinstance(self.scaling, YarnRopeScaling):
            raise ValueError("rope_theta=1 must be above 1: yarn tells pairs apart by their turns")
        if self.width is not None:
            whole_number("rotary_width", self.width, 2)
            if self.width % 2:
                raise ValueError(f"rotary_width={self.width} must be even: pairs are rotated")

    def check_fits(self, head_width: int) -> None:
        """Raise unless heads of a width can be rotated so."""
        width = self.width or head_width
        if width > head_width:
            raise ValueError(f"rotary_width={width} must be at most head_width={head_width}")
        scaling = self.scaling
        if isinstance(scaling, LongRopeScaling) and len(scaling.short) != width // 2:
            raise ValueError(
                f"longrope rope scaling: {len(scaling.short)} factors must be one for each of the "
                f"{width // 2} rotated pairs"
            )


@dataclass(frozen=True)
class QueryScaling:
    """Queries times ``1 + beta ln(1 + floor(position / original))`` (Ministral 3)."""

    beta: float
    original_max_positions: int

    def __post_init__(self) -> None:
        finite_number("query scaling: beta", self.beta, 0, LARGEST_FACTOR)
        whole_number("query scaling: original_max_positions", self.original_max_positions)


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that is a layer's MLP."""

    count: int
    """Experts of the layer (``E``)."""
    chosen: int
    """Experts that compute a token."""
    width: int
    """MLP width of an expert."""
    renormalised: bool = True
    """Whether the weights of a token's experts add up to 1; otherwise they are those of a softmax
    over all experts."""
    biases: bool = False
    """Biases on the router and in the experts (gpt-oss)."""
    limit: float | None = None
    """Largest size of gate and up in gpt-oss's gate; None for SiLU."""

    def __post_init__(self) -> None:
        for name, most in (("count", MAX_EXPERTS), ("chosen", self.count), ("width", None)):
            limits = {} if most is None else {"most": most}
            whole_number(f"experts: {name}", getattr(self, name), **limits)
        if self.limit is not None:
            finite_number("experts: limit", self.limit, SMALLEST_FACTOR, LARGEST_FACTOR)


@dataclass(frozen=True)
class LayerConfig:
    """What one kind of layer does of its own; the rest is the same in all layers of a target."""

    rotary: Rotary | None = None
    """The rotation of queries and keys; None for a layer without positions."""
    window: int | None = None
    """Tokens that a token sees, itself included: ``p_q - p_k < window``. All before it if
    absent."""
    experts: ExpertsConfig | None = None
    """The MLP's experts; None for one MLP of the target's ``mlp_width``."""

    def __post_init__(self) -> None:
        if self.window is not None:
            whole_number("window", self.window)


@dataclass(frozen=True)
class HeadScales:
    """Factors of one layer's cached keys and values: what is stored stands for itself times these.

    One number for all key/value heads, or one for each.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            for scale in getattr(self, name):
                finite_number(f"scale of cached {name}", scale, SMALLEST_FACTOR, LARGEST_FACTOR)


@dataclass(frozen=True)
class TargetConfig:
    """Shape and conventions of a target: a list of layers, described by data."""

    architecture: str
    """Hugging Face class name, such as ``LlamaForCausalLM``: what an export declares itself to
    be."""
    vocab_size: int
    model_width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    max_positions: int
    """Positions the model was made for; prompts and generation stay below."""
    rope_theta: float = 10000.0
    """With the next two the rotation of :attr:`read_layer`, which a draft follows, and of all
    layers where ``kinds`` are absent."""
    rope_scaling: RopeScaling = None
    rotary_width: int | None = None
    """Dimensions of a head that are rotated; all of them if absent."""
    kinds: tuple[LayerConfig, ...] = ()
    """The kinds of layers; if absent, all have full attention and the rotation above."""
    pattern: tuple[int, ...] = ()
    """The kind of each layer, as an index of ``kinds``; empty without them."""
    attention_cap: float | None = None
    """Bounds the scores of attention softly: ``cap * tanh(score / cap)`` (Gemma 2)."""
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    out_bias: bool = False
    """A bias on what leaves attention (gpt-oss)."""
    attention_sinks: bool = False
    """A learnt score of every head in its softmax's denominator (gpt-oss)."""
    qk_norm: bool = False
    """RMS normalisation of every query and key head before the rotation (Qwen3)."""
    wide_qk_norm: bool = False
    """RMS normalisation of all query heads together, and of all key heads (OLMo 2)."""
    pre_norms: bool = True
    """A norm on what enters attention and MLP."""
    post_norms: bool = False
    """A norm on what leaves them (OLMo 2, GLM-4)."""
    offset_norms: bool = False
    """Norms multiply by ``1 + scale`` (Gemma)."""
    gelu: bool = False
    """The MLP's gate is a GELU by its tanh formula, not a SiLU (Gemma)."""
    query_scaling: QueryScaling | None = None
    """A factor on queries that grows with their position."""
    attention_scale: float | None = None
    """Factor on attention scores; ``head_width ** -0.5`` if absent."""
    embedding_factor: float = 1.0
    """Factor on embeddings."""
    residual_factor: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logits_divisor: float = 1.0
    """Logits are divided by it."""
    logit_cap: float | None = None
    """Logits are ``cap * tanh(logits / cap)``, after the division."""
    tied_embeddings: bool = False
    """The LM head is the embedding table."""
    dtype: str = "bfloat16"
    """Parameters and activations; norms, softmax, angles, loss and acceptance are float32."""
    kv_dtype: str | None = None
    """What keys and values are rounded to before anything attends to them, and cached as: one of
    :data:`KV_DTYPES`. ``dtype`` if absent."""
    kv_scales: tuple[HeadScales | None, ...] = ()
    """Of every layer, what keys and values are divided by before they are rounded to ``kv_dtype``;
    None for 1. Empty if all are 1."""

    def __post_init__(self) -> None:
        whole_number("vocab_size", self.vocab_size)
        whole_number("max_positions", self.max_positions)
        whole_number("num_layers", self.num_layers, most=MAX_LAYERS)
        check_layer(self)
        if self.attention_cap is not None:
            finite_number("attention_cap", self.attention_cap, SMALLEST_FACTOR)
        for rotary in (self.rotary, *(kind.rotary for kind in self.kinds)):
            if rotary is not None:
                rotary.check_fits(self.head_width)
        if not (self.pre_norms or self.post_norms):
            raise ValueError("a layer needs norms: pre_norms or post_norms must be True")
        factors = "embedding_factor", "residual_factor", "logits_divisor"
        for name in (*factors, "attention_scale", "logit_cap"):
            if getattr(self, name) is not None:
                finite_number(name, getattr(self, name), SMALLEST_FACTOR, LARGEST_FACTOR)
        if self.kinds or self.pattern:
            self._check_kinds()
        self._check_cached()

    def _check_cached(self) -> None:
        """Raise unless keys and values are cached in a known dtype, with scales for it."""
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_dtype={shown(self.kv_dtype)} must be one of {', '.join(KV_DTYPES)}, or left "
                "out to cache keys and values as they are computed"
            )
        if self.kv_scales and (self.kv_dtype is None or len(self.kv_scales) != self.num_layers):
            raise ValueError(
                f"kv_scales has {len(self.kv_scales)} entries and needs one for each of the "
                f"{self.num_layers} layers, and a kv_dtype"
            )
        for index, scales in enumerate(self.kv_scales):
            for each in () if scales is None else (scales.keys, scales.values):
                if len(each) not in (1, self.num_kv_heads):
                    raise ValueError(
                        f"kv_scales: layer {index} has {len(each)} scales; it needs 1, or one for "
                        f"each of {self.num_kv_heads} heads"
                    )

    def scales(self, index: int) -> HeadScales | None:
        """The scales of a layer's cached keys and values; None if all are 1."""
        return self.kv_scales[index] if self.kv_scales else None

    def _check_kinds(self) -> None:
        """Raise unless every layer has a kind, and the read layer's rotation is the target's."""
        if len(self.pattern) != self.num_layers or {*self.pattern} != {*range(len(self.kinds))}:
            raise ValueError(
                f"pattern={shown(self.pattern)} must name one of the {len(self.kinds)} kinds for "
                f"each of the {self.num_layers} layers, and every kind must be used"
            )
        rotary = self.layer(self.read_layer).rotary
        if rotary not in (None, self.rotary):
            raise ValueError(
                f"layer {self.read_layer}, which drafts read, has {rotary}; rope_theta, "
                "rope_scaling and rotary_width must be those of this layer"
            )

    @property
    def rotary(self) -> Rotary:
        """The rotation of the layer that drafts read."""
        return Rotary(self.rope_theta, self.rope_scaling, self.rotary_width)

    def layer(self, index: int) -> LayerConfig:
        """The description of a layer."""
        return self.kinds[self.pattern[index]] if self.kinds else LayerConfig(self.rotary)

    @property
    def is_sparse(self) -> bool:
        """Whether any layer has experts."""
        return any(kind.experts is not None for kind in self.kinds)

    @property
    def read_layer(self) -> int:
        """The layer whose keys and values drafts read.

        The last one that sees the whole context, and of these one with positions if there is any:
        a draft that reads keys without positions cannot tell near tokens from far ones. The last
        layer if all have windows.
        """
        full = self.full_layers
        rotated = [index for index in full if self.layer(index).rotary is not None]
        return (rotated or full or [self.num_layers - 1])[-1]

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that see the whole context: those without a window."""
        return tuple(i for i in range(self.num_layers) if self.layer(i).window is None)

    def check_read(self, reader: str) -> None:
        """Raise ValueError unless some layer sees the whole context, which the reader needs."""
        if not self.full_layers:
            raise ValueError(
                f"{reader} reads a layer that sees the whole context, and all layers of this "
                "target have a window; use a draft that reads none, such as ngram"
            )

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head (``G``)."""
        return self.num_heads // self.num_kv_heads


def check_layer(config: Any) -> None:
    """Raise unless a layer of these sizes can be computed: of a target, or of a draft like it."""
    for name in ("model_width", "mlp_width", "num_heads", "num_kv_heads", "head_width"):
        whole_number(name, getattr(config, name))
    finite_number("rope_theta", config.rope_theta, 1)
    finite_number("norm_eps", config.norm_eps, SMALLEST_EPS, 1)
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} must be a multiple of num_kv_heads={config.num_kv_heads}"
        )
    if config.head_width % 2:
        raise ValueError(f"head_width={config.head_width} must be even for the rotary embedding")


@dataclass(frozen=True)
class TreeConfig:
    """Widths of the draft tree by level; a level's nodes are the last one's best continuations.

    ``(4, 16, 16, 16, 16)`` is the paper's tree, ``(1, 1, 1, 1)`` a chain of four, and ``()`` the
    empty tree: plain decoding. :meth:`parse` reads what ``str`` writes, such as
    ``4,16,16,16,16@64``. OPT-Tree (arXiv:2406.17276) is a budget with a threshold:
    ``16x10@50+0.7``.
    """

    widths: tuple[int, ...] = (4, 16, 16, 16, 16)
    budget: int | None = None
    """Nodes that are verified, the root included: the best of those grown by the draft's cumulative
    log-probability, chosen in every row and round. All of them if absent."""
    threshold: float | None = None
    """Growth ends, in every row and round for itself, with the level that raises the expected
    number of accepted tokens by no more than this; what is not grown costs no draft pass where no
    row grows it. All levels are grown if absent."""
    chain: int | None = None
    """How many of the first levels are a chain with the tree of the others at its end, as partial
    verification proposes it (``chain:16/4,8``, :mod:`longspec_jax.drafters.retrieval.hierarchy`).
    Where a row's chain is shorter, its tree begins higher. None for a tree that is grown as one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", _tree_widths(self.widths))
        if self.chain is not None:
            self._check_chain(self.chain)
            if self.chain == self.num_levels:
                object.__setattr__(self, "chain", None)  # A chain with nothing at its end.
        if self.num_grown > MAX_TREE_NODES:
            raise ValueError(
                f"tree {shown(self.widths)} has {self.num_grown} nodes with its root; the "
                f"attention kernels take at most {MAX_TREE_NODES}"
            )
        if self.num_levels > MAX_TREE_LEVELS:
            raise ValueError(
                f"a tree of {self.num_levels} levels is too deep: every level is compiled and run "
                f"on its own, and the largest number that is taken is {MAX_TREE_LEVELS}"
            )
        if self.budget is not None and not (is_whole(self.budget) and self.budget >= 1):
            raise ValueError(
                "a tree budget counts the root and must be whole and at least 1 node, got "
                f"{shown(self.budget)}; leave it out to verify all {self.num_grown} nodes"
            )
        if self.threshold is not None and not (
            is_number(self.threshold) and SMALLEST_GAIN <= self.threshold <= 1
        ):
            raise ValueError(
                "a tree threshold is the gain in expected tokens that a further level must be "
                f"worth, from {SMALLEST_GAIN} to 1, got {shown(self.threshold)}; leave it out to "
                f"grow all {self.num_levels} levels"
            )
        if self.widths and self.num_nodes == 1:
            raise ValueError(
                f"the tree {self} verifies the root alone, which the target knows already; use "
                "the tree none for plain decoding, or a budget of at least 2"
            )

    def _check_chain(self, chain: Any) -> None:
        """Refuse a chain that the widths or the budget do not hold."""
        if not is_whole(chain) or not 0 <= chain <= self.num_levels or {*self.widths[:chain]} - {1}:
            raise ValueError(
                f"chain={shown(chain)} must be a number of first levels of width 1 in the tree "
                f"{shown(self.widths)}; chain:4/2,3 has four of them before its 2,3"
            )
        least = min(chain + 2, self.num_grown)
        if self.budget is not None and is_whole(self.budget) and self.budget < least:
            raise ValueError(
                f"a tree budget of {self.budget} leaves no node for the tree at the end of a chain "
                f"of {chain}: the root and the chain are always verified; allow at least "
                f"{least}"
            )

    @classmethod
    def parse(cls, text: str) -> "TreeConfig":
        """The tree of a text: ``none``, ``chain:4`` or ``4,16,16``, which is ``4,16x2``.

        ``@24`` behind it adds a budget, and ``+0.7`` a threshold; ``chain:16/`` before it puts it
        at the end of a chain.

        Raises:
          ValueError: for a text that names no tree, or one that there cannot be.
        """
        found = _TREE_TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{shown(text)} must be the widths of a tree such as 4,16,16,16,16, or chain:4 for "
                "a single branch, or none; @64 behind it verifies the best 64 nodes alone, +0.7 "
                "ends it with the level that adds no more than 0.7 expected tokens, and chain:16/ "
                "before it puts it at the end of a chain"
            )
        chain = int(found["chain"]) if found["chain"] else None
        widths = [1] * ((chain or 0) + int(found["links"] or 0))
        for piece in (found["widths"] or "").split(",") if found["widths"] else ():
            width, _, times = piece.partition("x")
            widths += [int(width)] * int(times or 1)
        return cls(
            tuple(widths),
            int(found["budget"]) if found["budget"] else None,
            float(found["threshold"]) if found["threshold"] else None,
            chain,
        )

    def __str__(self) -> str:
        """The tree as :meth:`parse` reads it."""
        widths = self.widths[self.chain or 0 :]
        shape = ",".join(map(str, widths)) or "none"
        if set(widths) == {1}:
            shape = f"chain:{len(widths)}"
        if self.chain is not None:
            shape = f"chain:{self.chain}/{shape}"
        budget = "" if self.budget is None else f"@{self.budget}"
        threshold = "" if self.threshold is None else f"+{self.threshold:g}"
        return shape + budget + threshold

    @property
    def num_levels(self) -> int:
        """Draft levels, the root not counted: the most tokens one round can accept."""
        return len(self.widths)

    @property
    def num_grown(self) -> int:
        """Nodes the drafter grows, the root included."""
        return 1 + sum(self.widths)

    @property
    def num_nodes(self) -> int:
        """Nodes with the root: the query tokens of one verification."""
        return self.num_grown if self.budget is None else min(self.budget, self.num_grown)

    @property
    def selective(self) -> bool:
        """Whether the budget leaves out nodes."""
        return self.num_nodes < self.num_grown

    @property
    def varies(self) -> bool:
        """Whether depths differ from row to row: nodes are left out, or a chain is shorter."""
        return self.selective or bool(self.chain)

    @property
    def end(self) -> "TreeConfig":
        """The tree at the end of the chain, whose last token is its root."""
        chain = self.chain or 0
        budget = None if self.budget is None else self.budget - chain
        return TreeConfig(self.widths[chain:], budget, self.threshold)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of every grown node, where it does not vary; the root has depth 0."""
        return (0, *(level + 1 for level, width in enumerate(self.widths) for _ in range(width)))


def _tree_widths(widths: Any) -> tuple[int, ...]:
    """The widths as a tuple, from any sequence of whole numbers."""
    ordered = isinstance(widths, Sequence) and not isinstance(widths, str | bytes)
    if not ordered or not all(is_whole(width) for width in widths):
        raise ValueError(
            "tree widths must be whole numbers, one per level, such as (4, 16, 16), got "
            f"{shown(widths)}"
        )
    found = tuple(int(width) for width in widths)
    if any(width < 1 for width in found):
        raise ValueError(
            f"tree widths must be positive, got {shown(found)}; use fewer levels for a shallower "
            "tree"
        )
    return found


_WIDTH = "-?[0-9]{1,9}(x[1-9][0-9]{0,2})?"
_TREE_TEXT = re.compile(
    r"(chain:(?P<chain>0|[1-9][0-9]{0,3})/)?"
    r"(none|chain:(?P<links>[1-9][0-9]{0,3})|(?P<widths>{W}(,{W})*))"
    r"(@(?P<budget>[0-9]{1,9}))?"
    r"(\+(?P<threshold>[0-9]{1,3}(\.[0-9]{1,6})?))?".replace("{W}", _WIDTH)
)
SMALLEST_GAIN = 0.001
"""Least threshold of a tree; below it no level is left out."""
MAX_TREE_NODES = 256
"""Most query tokens of one verification."""
MAX_TREE_LEVELS = 32
"""Most levels: 200 of them compile for minutes."""
PLAIN = TreeConfig(())
DEFAULT_TREE = TreeConfig(budget=64)
"""The usual tree of a large target on a GPU, where :mod:`longspec_jax.generation.autotune` chooses
for calls that name none: the paper's, of which the best 64 of 69 nodes are verified. They fill
whole tiles of query rows, so that a round takes 4 to 9 % less time on a GPU (Vicuna-7B at 32k and
4k), for at most 1 % fewer tokens (README)."""


def _shape(
    family: str, vocab_size: int, widths: tuple[int, int], layers: int, heads: tuple[int, int]
) -> dict[str, Any]:
    """Sizes that several targets share: widths of model and MLP, heads and key/value heads."""
    model_width, mlp_width = widths
    num_heads, num_kv_heads = heads
    return dict(
        architecture=f"{family}ForCausalLM",
        vocab_size=vocab_size,
        model_width=model_width,
        mlp_width=mlp_width,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=128,
    )


_SEVEN_B = _shape("Llama", 32000, (4096, 11008), 32, (32, 32))
_THIRTEEN_B = _shape("Llama", 32000, (5120, 13824), 40, (40, 40))
_EIGHT_B = _shape("Llama", 128256, (4096, 14336), 32, (32, 8))
_QWQ: dict[str, Any] = _shape("Qwen2", 152064, (5120, 27648), 64, (40, 8)) | {
    "rope_theta": 1e6,
    "qkv_bias": True,
}
_QWEN3: dict[str, Any] = dict(max_positions=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)
_GPT_OSS_ROTARY = Rotary(
    150000.0, YarnRopeScaling(32.0, 4096, yarn_magnitude(32.0), truncate=False)
)
_GPT_OSS_EXPERTS = ExpertsConfig(32, 4, 2880, biases=True, limit=7.0)
_GPT_OSS: dict[str, Any] = _shape("GptOss", 201088, (2880, 2880), 24, (64, 8)) | dict(
    head_width=64,
    max_positions=131072,
    rope_theta=_GPT_OSS_ROTARY.theta,
    rope_scaling=_GPT_OSS_ROTARY.scaling,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    kinds=(
        LayerConfig(_GPT_OSS_ROTARY, 128, _GPT_OSS_EXPERTS),
        LayerConfig(_GPT_OSS_ROTARY, None, _GPT_OSS_EXPERTS),
    ),
    pattern=(0, 1) * 12,
)


@dataclass(frozen=True)
class KnownTarget:
    """A target that comes up by name."""

    repository: str
    """On the Hugging Face hub."""
    config: TargetConfig


TARGETS: dict[str, KnownTarget] = {
    "vicuna7b": KnownTarget(
        "lmsys/vicuna-7b-v1.5-16k",
        TargetConfig(max_positions=16384, rope_scaling=LinearRopeScaling(4.0), **_SEVEN_B),
    ),
    "vicuna13b": KnownTarget(
        "lmsys/vicuna-13b-v1.5-16k",
        TargetConfig(max_positions=16384, rope_scaling=LinearRopeScaling(4.0), **_THIRTEEN_B),
    ),
    "longchat7b": KnownTarget(
        "lmsys/longchat-7b-v1.5-32k",
        TargetConfig(max_positions=32768, rope_scaling=LinearRopeScaling(8.0), **_SEVEN_B),
    ),
    "longchat13b": KnownTarget(
        "lmsys/longchat-13b-16k",
        TargetConfig(
            max_positions=16384, rope_scaling=LinearRopeScaling(8.0), norm_eps=1e-6, **_THIRTEEN_B
        ),
    ),
    "llama3-8b": KnownTarget(
        "gradientai/Llama-3-8B-Instruct-262k",
        TargetConfig(max_positions=262144, rope_theta=283461213.0, **_EIGHT_B),
    ),
    "llama31-8b": KnownTarget(
        "meta-llama/Llama-3.1-8B-Instruct",
        TargetConfig(
            max_positions=131072,
            rope_theta=5e5,
            rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
            **_EIGHT_B,
        ),
    ),
    "qwq32b-preview": KnownTarget(
        "Qwen/QwQ-32B-Preview", TargetConfig(max_positions=32768, **_QWQ)
    ),
    "qwq32b": KnownTarget("Qwen/QwQ-32B", TargetConfig(max_positions=131072, **_QWQ)),
    "qwen3-8b": KnownTarget(
        "Qwen/Qwen3-8B",
        TargetConfig(**_shape("Qwen3", 151936, (4096, 12288), 36, (32, 8)), **_QWEN3),
    ),
    "qwen3-4b": KnownTarget(
        "Qwen/Qwen3-4B",
        TargetConfig(
            tied_embeddings=True, **_shape("Qwen3", 151936, (2560, 9728), 36, (32, 8)), **_QWEN3
        ),
    ),
    "qwen3-30b-a3b": KnownTarget(
        "Qwen/Qwen3-30B-A3B",
        TargetConfig(
            kinds=(LayerConfig(Rotary(1e6), experts=ExpertsConfig(128, 8, 768)),),
            pattern=(0,) * 48,
            **_shape("Qwen3Moe", 151936, (2048, 6144), 48, (32, 4)),
            **_QWEN3,
        ),
    ),
    "gpt-oss-20b": KnownTarget("openai/gpt-oss-20b", TargetConfig(**_GPT_OSS)),
}
"""The paper's and the release's targets, three of Qwen3 and gpt-oss, by the names that the commands
take."""
PRESETS: dict[str, TargetConfig] = {
    known.repository.split("/")[1].lower(): known.config for known in TARGETS.values()
}
"""Their shapes by the names of their repositories, for planning and benchmarks without weights."""
TINY = TargetConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    model_width=64,
    mlp_width=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    max_positions=4096,
    dtype="float32",
)
"""A target of two layers, which shows that something runs."""
