"""What a layer of a target is made of: rotations, windows, experts, recurrences, cached scales."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from longspec_jax.checks import LARGEST_NUMBER, Each, Real, Truth, Whole
from longspec_jax.schema import Checked

MAX_EXPERTS = 4096
"""Most experts of a layer."""
MAX_TAPS = 64
"""Most tokens that the convolution of a recurrent layer sees."""
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6
"""Between them is every factor of a rotary scaling; no soft cap is smaller."""
FACTOR, STRETCH = Real(SMALLEST_FACTOR, LARGEST_FACTOR), Real(1, LARGEST_FACTOR)
"""Any factor, and that of a range that is stretched."""
BASE = Real(1, LARGEST_NUMBER)
"""Of a rotation."""


@dataclass(frozen=True)
class LinearRopeScaling(Checked):
    """Positions divided by a factor: Vicuna-16k, LongChat (and its ``rope_condense_ratio``)."""

    owner: ClassVar[str] = "linear rope scaling: "
    factor: Annotated[float, STRETCH]


@dataclass(frozen=True)
class Llama3RopeScaling(Checked):
    """Llama 3.1's scaling: long wavelengths divided by the factor, short ones kept, a ramp."""

    owner: ClassVar[str] = "llama3 rope scaling: "
    factor: Annotated[float, STRETCH]
    low_freq_factor: Annotated[float, FACTOR]
    high_freq_factor: Annotated[float, FACTOR]
    original_max_positions: Annotated[int, Whole()]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"{self.owner}high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class YarnRopeScaling(Checked):
    """YaRN (arXiv:2309.00071): pairs that turn slowly are divided by a factor, a ramp between."""

    owner: ClassVar[str] = "yarn rope scaling: "
    factor: Annotated[float, STRETCH]
    original_max_positions: Annotated[int, Whole()]
    """The range of the model before it was stretched."""
    attention_factor: Annotated[float, FACTOR]
    """Factor on cosines and sines, so on queries and keys alike."""
    beta_fast: Annotated[float, FACTOR] = 32.0
    """Pairs that make more turns than this over the original range stay as they are."""
    beta_slow: Annotated[float, FACTOR] = 1.0
    """Pairs that make fewer are divided by the whole factor."""
    truncate: Annotated[bool, Truth()] = True
    """Whether the ramp begins and ends at whole pairs."""

    @classmethod
    def usual(cls, factor: float, original_max_positions: int) -> "YarnRopeScaling":
        """With the attention factor of the paper (equation 22), ``0.1 ln(factor) + 1``."""
        return cls(factor, original_max_positions, yarn_magnitude(factor))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """``0.1 scale ln(factor) + 1``, which YaRN multiplies cosines and sines by."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class LongRopeScaling(Checked):
    """LongRoPE (arXiv:2402.13753): every pair is divided by a factor of its own.

    There are two sets of factors. The long one is used where the target's range is beyond the
    original one. The choice is made when a target is loaded: a cache holds keys of one set.
    """

    owner: ClassVar[str] = "longrope rope scaling: "
    short: Annotated[tuple[float, ...], Each(FACTOR)]
    """Factors ``[rotary_width / 2]`` within the original range."""
    long: Annotated[tuple[float, ...], Each(FACTOR)]
    """Factors beyond it."""
    original_max_positions: Annotated[int, Whole()]
    attention_factor: Annotated[float, FACTOR]
    """Factor on cosines and sines."""
    beyond: bool
    """Whether the long set is used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.short) != len(self.long):
            raise ValueError(
                f"{self.owner}{len(self.short)} short factors must be as many as the long ones, "
                f"{len(self.long)}"
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The set that is used."""
        return self.long if self.beyond else self.short


@dataclass(frozen=True)
class ProportionalRopeScaling:
    """Rotates a part of a head, its pairs as fast as if all were rotated (Gemma 4)."""


RopeScaling = (
    LinearRopeScaling
    | Llama3RopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling
    | None
)


@dataclass(frozen=True)
class Rotary(Checked):
    """How the heads of a layer are rotated by position."""

    owner: ClassVar[str] = "rotary_"
    theta: Annotated[float, BASE] = 10000.0
    scaling: RopeScaling = None
    width: Annotated[int | None, Whole(2)] = None
    """Dimensions of a head that are rotated; all of them if absent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta == 1 and isinstance(self.scaling, YarnRopeScaling):
            raise ValueError("rope_theta=1 must be above 1: yarn tells pairs apart by their turns")
        if self.width is not None and self.width % 2:
            raise ValueError(f"rotary_width={self.width} must be even: pairs are rotated")

    @property
    def block(self) -> int | None:
        """Dimensions of a head whose two halves are paired; all of them if absent."""
        return None if isinstance(self.scaling, ProportionalRopeScaling) else self.width

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
class QueryScaling(Checked):
    """Queries times ``1 + beta ln(1 + floor(position / original))`` (Ministral 3)."""

    owner: ClassVar[str] = "query scaling: "
    beta: Annotated[float, Real(0, LARGEST_FACTOR)]
    original_max_positions: Annotated[int, Whole()]


@dataclass(frozen=True)
class ExpertsConfig(Checked):
    """The mixture of experts that is a layer's MLP."""

    owner: ClassVar[str] = "experts: "
    count: Annotated[int, Whole(1, MAX_EXPERTS)]
    """Experts of the layer (``E``)."""
    chosen: Annotated[int, Whole()]
    """Experts that compute a token."""
    width: Annotated[int, Whole()]
    """MLP width of an expert."""
    renormalised: Annotated[bool, Truth()] = True
    """Whether the weights of a token's experts add up to 1; otherwise they are those of a softmax
    over all experts."""
    biases: bool = False
    """Biases on the router and in the experts (gpt-oss)."""
    limit: Annotated[float | None, FACTOR] = None
    """Largest size of gate and up in gpt-oss's gate; None for SiLU."""
    shared: Annotated[int | None, Whole()] = None
    """MLP width of one more expert, which computes every token times a sigmoid of its input."""
    parallel_mlp: bool = False
    """Whether they stand next to the layer's own MLP, with norms of their own and a factor of every
    expert; their router reads the residual stream (Gemma 4)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Whole(1, self.count).read("experts: chosen", self.chosen)
        if self.shared is not None and self.parallel_mlp:
            raise ValueError("experts next to an MLP have no shared one: it is the MLP")


@dataclass(frozen=True)
class RecurrenceConfig(Checked):
    """A Gated DeltaNet (arXiv:2412.06464) in the place of a layer's attention."""

    owner: ClassVar[str] = "recurrence: "
    key_heads: Annotated[int, Whole()]
    """Heads of queries and keys (``J``)."""
    value_heads: Annotated[int, Whole()]
    """Heads of values and of the state; as many share one key head (``P``)."""
    key_width: Annotated[int, Whole()]
    """Of a query or key (``X``)."""
    value_width: Annotated[int, Whole()]
    """Of a value (``Y``)."""
    taps: Annotated[int, Whole(2, MAX_TAPS)] = 4
    """Tokens that the convolution before queries, keys and values sees, itself included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"recurrence: value_heads={self.value_heads} must be a multiple of "
                f"key_heads={self.key_heads}"
            )

    @property
    def shared(self) -> int:
        """Value heads that share one key head (``P``)."""
        return self.value_heads // self.key_heads

    @property
    def inputs_width(self) -> int:
        """Width of the convolution's input for each key head: query, key and values."""
        return 2 * self.key_width + self.shared * self.value_width


@dataclass(frozen=True)
class HeadsConfig(Checked):
    """The key/value heads of a layer and the width of all heads."""

    num_kv_heads: Annotated[int, Whole()]
    head_width: Annotated[int, Whole()]

    def check(self, num_heads: int) -> None:
        """Raise unless a layer of this number of query heads can be computed."""
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width={self.head_width} must be even for the rotary embedding")


@dataclass(frozen=True)
class LayerConfig(Checked):
    """What one kind of layer does of its own; the rest is the same in all layers of a target."""

    rotary: Rotary | None = None
    """The rotation of queries and keys; None for a layer without positions."""
    window: Annotated[int | None, Whole()] = None
    """Tokens that a token sees, itself included: ``p_q - p_k < window``. All before it if
    absent."""
    experts: ExpertsConfig | None = None
    """The MLP's experts, or those next to it; None for one MLP of the target's ``mlp_width``."""
    recurrence: RecurrenceConfig | None = None
    """What takes the place of attention; None for attention."""
    heads: HeadsConfig | None = None
    """Heads of a layer with a window that are not those of its target."""
    keys_are_values: bool = False
    """Whether values are what the keys are made of, before their norm and rotation (Gemma 4)."""
    keys_of: int | None = None
    """The layer whose keys and values it reads; None for its own (Gemma 4 E4B and E2B)."""
    mlp_width: Annotated[int | None, Whole()] = None
    """Of its MLP; the target's if absent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recurrence is not None and (self.window, self.rotary) != (None, None):
            raise ValueError("a layer with a recurrence has no window and no rotation")
        if self.keys_of is not None and (self.recurrence is not None or self.keys_are_values):
            raise ValueError(
                "a layer that reads the keys of another has attention, and no own keys"
            )
        if self.heads is not None and self.window is None:
            raise ValueError(
                "only layers with windows may have heads of their own: drafts read others alike"
            )


@dataclass(frozen=True)
class HeadScales(Checked):
    """Factors of one layer's cached keys and values: what is stored stands for itself times these.

    One number for all key/value heads, or one for each.
    """

    owner: ClassVar[str] = "scales of cached "
    keys: Annotated[tuple[float, ...], Each(FACTOR)]
    values: Annotated[tuple[float, ...], Each(FACTOR)]
