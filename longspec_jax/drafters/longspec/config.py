"""Shape of the LongSpec draft: frozen and hashable, a legal static argument of ``jax.jit``."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from longspec_jax.checks import whole_number
from longspec_jax.config.layers import RopeScaling, Rotary
from longspec_jax.config.target import TargetConfig, check_layer


def check_vocab_size(vocab_size: int, target: TargetConfig) -> None:
    """Raise ValueError unless a draft was made for a target of as many tokens."""
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft was made for vocab_size={vocab_size}, the target has "
            f"{target.vocab_size}. A draft shares its target's vocabulary: load the draft that "
            "belongs to this target"
        )


@dataclass(frozen=True)
class DraftConfig:
    """Shape of the one-layer LongSpec draft; all but the window follows the target."""

    model_width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    rope_theta: float
    rope_scaling: RopeScaling
    norm_eps: float
    dtype: str
    rotary_width: int | None = None
    """Dimensions of a head that are rotated, as of the target's layer that it reads."""
    embedding_factor: float = 1.0
    """Factor on the target's embeddings, as of the target."""
    logits_divisor: float = 1.0
    """What the logits are divided by, as of the target."""
    logit_cap: float | None = None
    """Bounds the logits softly after the division, as of the target."""
    window: int = 512
    """A node sees the tokens at most this many positions behind it, and itself (LongSpec 3.1)."""

    def __post_init__(self) -> None:
        whole_number("window", self.window)
        check_layer(self)

    @classmethod
    def for_target(cls, target: TargetConfig, **overrides: Any) -> "DraftConfig":
        """The draft that fits a target: same widths and heads, same rotary embedding."""
        target.check_read("a LongSpec draft")
        shared = {field.name for field in dataclasses.fields(cls)} - {"window"}
        values = {name: getattr(target, name) for name in shared}
        return cls(**{**values, **overrides})

    @property
    def rotary(self) -> Rotary:
        """The rotation of its heads, which is that of the keys it reads."""
        return Rotary(self.rope_theta, self.rope_scaling, self.rotary_width)

    def check_fits(self, target: TargetConfig) -> None:
        """Raise unless this draft can read the target's embedding, head and keys and values."""
        target.check_read("a LongSpec draft")
        heads = "model_width", "num_kv_heads", "head_width"
        for name in (*heads, "rope_theta", "rope_scaling", "rotary_width"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ValueError(
                    f"the draft has {name}={ours} but the target {name}={theirs}. A draft reads "
                    "its target's embeddings and keys, so it works only with the target "
                    "it was trained for; load the draft that belongs to this target, or train one."
                )
