"""Shape of an EAGLE-3 draft, and its rotary embedding, which may be scaled by YaRN."""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp

from longspec_jax.axes import Array
from longspec_jax.checks import whole_number
from longspec_jax.config.layers import RopeScaling, Rotary, YarnRopeScaling
from longspec_jax.config.target import TargetConfig, check_layer
from longspec_jax.drafters.tables import check_fits
from longspec_jax.models.layers import rotary_frequencies


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
    rope_scaling: RopeScaling = None
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
        if not isinstance(self.rope_scaling, YarnRopeScaling):
            return None
        return self.rope_scaling.attention_factor**2 * self.head_width**-0.5

    def stretched(self, factor: float) -> "Eagle3Config":
        """The same draft with YaRN over its trained range."""
        yarn = YarnRopeScaling.usual(factor, self.max_positions)
        return dataclasses.replace(
            self, rope_scaling=yarn, max_positions=int(factor * self.max_positions)
        )

    def angles(self, positions: Array) -> tuple[Array, Array]:
        """Cosines and sines at positions ``[B, T]``, float32 ``[B, T, H / 2]``.

        Without the factor of YaRN, which :attr:`attention_scale` has: so rotations can be added.
        """
        rotary = Rotary(self.rope_theta, self.rope_scaling)
        frequencies = jnp.asarray(rotary_frequencies(self.head_width, rotary))
        turned = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(turned), jnp.sin(turned)
