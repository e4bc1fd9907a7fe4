"""Which of a row's committed tokens a partial pass of the target sees.

A selection is a few spans of cache slots, read where they lie. The attention sinks and the recent
window of StreamingLLM are two of them.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct
from jaxtyping import Int

from longspec_jax.axes import Array, Leaf, Lengths


@struct.dataclass
class Selection:
    """Spans of cache slots that do not overlap; an empty one starts where it ends."""

    start: Leaf[Int[Array, "B n"]]
    """First slot of every span."""
    stop: Leaf[Int[Array, "B n"]]
    """Slot behind its last one."""

    @property
    def spans(self) -> int:
        """How many there are."""
        return self.start.shape[1]


@dataclass(frozen=True)
class SinksAndRecent:
    """The first tokens of a row, which attention falls back on, and the last (StreamingLLM)."""

    sinks: int = 32
    recent: int = 1024

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(
                f"sinks={self.sinks} must be at least 0 and recent={self.recent} at least 1: a "
                "draft that sees no recent token has nothing to go on"
            )

    def __call__(self, length: Lengths) -> Selection:
        """The spans in rows of ``length[b]`` committed tokens."""
        sinks = jnp.minimum(length, self.sinks)
        recent = jnp.maximum(sinks, length - self.recent)
        start = jnp.stack([jnp.zeros_like(sinks), recent], axis=1)
        return Selection(start, jnp.stack([sinks, length], axis=1))
