"""Shape of an EAGLE-3 draft, and its rotary embedding, which may be scaled by YaRN."""

import dataclasses
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.checks import finite_number, whole_number
from longspec_jax.config import LARGEST_FACTOR, RopeScaling, Rotary, TargetConfig, check_layer
from longspec_jax.drafters.tables import check_fits
from longspec_jax.models.layers import rotary_frequencies


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): pairs that turn slowly are divided by a factor, a ramp between."""

    factor: float
    original_max_positions: int
    """The range of the model before it was stretched."""
    beta_fast: float = 32.0
    """Pairs that make more turns than this over the original range stay as they are."""
    beta_slow: float = 1.0
    """Pairs that make fewer are divided by the whole factor."""
    magnitude: float | None = None
    """Factor on the cosines and the sines; ``0.1 ln(factor) + 1`` if absent."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""

    def __post_init__(self) -> None:
        finite_number("yarn rope scaling: factor", self.factor, 1, LARGEST_FACTOR)
        whole_number("yarn rope scaling: original_max_positions", self.original_max_positions)

    @property
    def score_factor(self) -> float:
        """Factor on the attention scores: that of queries times that of keys."""
        usual = 0.1 * math.log(self.factor) + 1
        return (usual if self.magnitude is None else self.magnitude) ** 2

    def ramp(self, head_width: int, theta: float) -> np.ndarray:
        """How much every pair is scaled, ``[H / 2]`` from 0 (not at all) to 1."""
        low, high = (
            head_width
            * math.log(self.original_max_positions / (2 * math.pi * turns))
            / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_width - 1)
        high += 0.001 if low == high else 0
        return np.clip((np.arange(head_width // 2) - low) / (high - low), 0, 1)


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of the one-layer EAGLE-3 draft."""

    model_width: int
    target_width: int
    """Width of the target's hidden states."""
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    vocab_size: int
    """Tokens of the target."""
    proposable: int
    """Tokens that the draft's LM head knows."""
    features: tuple[int, ...]
    """Layers of the target after which the draft takes the hidden states; -1 is the embedding."""
    max_positions: int
    """Positions it was made for."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | Yarn = None
    norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    window: int | None = None
    """Tokens that it saw of each text in training, its own included; all of them if absent."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    """Whether the residual stream of the layer is the normed feature (EAGLE-3.1)."""
    norm_before_fuse: bool = False
    """Whether one norm over all features precedes their fusion."""
    feature_norms: bool = False
    """Whether each feature has a norm of its own before their fusion (EAGLE-3.1)."""
    normed_feedback: bool = False
    """Whether the next level takes the normed output of this one (EAGLE-3.1)."""
    normed_head: bool = True
    """Whether the LM head reads the normed output."""

    def __post_init__(self) -> None:
        for name in ("target_width", "vocab_size", "proposable", "max_positions"):
            whole_number(name, getattr(self, name))
        if self.window is not None:
            whole_number("window", self.window, 2)
        if self.proposable > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.proposable} is above vocab_size={self.vocab_size}: a "
                "draft proposes some of its target's tokens"
            )
        check_layer(self)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise ValueError unless this draft can read the target's features and tokens."""
        check_fits(self, target)

    @property
    def attention_scale(self) -> float | None:
        """Factor on the attention scores; None for the usual one, ``H ** -0.5``."""
        if not isinstance(self.rope_scaling, Yarn):
            return None
        return self.rope_scaling.score_factor * self.head_width**-0.5

    def stretched(self, factor: float) -> "Eagle3Config":
        """The same draft with YaRN over its trained range."""
        yarn = Yarn(factor, self.max_positions)
        return dataclasses.replace(
            self, rope_scaling=yarn, max_positions=int(factor * self.max_positions)
        )

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """Cosines and sines at positions ``[B, T]``, float32 ``[B, T, H / 2]``.

        Without the factor of YaRN, which :attr:`attention_scale` has: so rotations can be added.
        """
        frequencies = self._frequencies().astype(np.float32)
        turned = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
        return jnp.cos(turned), jnp.sin(turned)

    def _frequencies(self) -> np.ndarray:
        """Radians per position of every pair."""
        scaling = self.rope_scaling
        if not isinstance(scaling, Yarn):
            return rotary_frequencies(self.head_width, Rotary(self.rope_theta, scaling))
        plain = rotary_frequencies(self.head_width, Rotary(self.rope_theta)).astype(np.float64)
        ramp = scaling.ramp(self.head_width, self.rope_theta)
        return plain * (1 - ramp + ramp / scaling.factor)
