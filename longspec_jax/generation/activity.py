"""What a call is doing while no text comes, for a display of its progress.

A call reports its activities to ``on_activity`` in the order in which they begin. A long one is
reported again as it advances.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.chooser import Measurement


@dataclass(frozen=True)
class TreeTiming:
    """What rounds of one drafter with one tree did."""

    drafter: str
    """Its name."""
    tree: TreeConfig
    """Its shape; without levels, plain decoding."""
    seconds: float
    """Of one round."""
    tokens: float
    """Emitted in one round by a row."""
    rounds: int = 0
    """How many rounds the tokens are a mean of."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one row."""
        return self.tokens / self.seconds

    def corrected(self, seen: Measurement, most: float) -> "TreeTiming":
        """The timing after more rounds of the same tree.

        Args:
          seen: what they did.
          most: earlier rounds that count, at most.
        """
        share = seen.rounds / (min(self.rounds, most) + seen.rounds)
        # Equal means stay as they are: plain rounds emit one token exactly.
        return replace(
            self,
            seconds=self.seconds + share * (seen.seconds / seen.rounds - self.seconds),
            tokens=self.tokens + share * (seen.tokens / seen.row_rounds - self.tokens),
            rounds=self.rounds + seen.rounds,
        )


@dataclass(frozen=True)
class Compiling:
    """Programs of a new shape are compiled and tried out."""


@dataclass(frozen=True)
class Prefilling:
    """The prompts are run through the target."""

    done: int
    """Tokens of the longest prompt so far."""
    total: int
    """Its tokens."""


@dataclass(frozen=True)
class DecodingPlainly:
    """A comparison decodes once more, without speculation."""

    done: int
    """Tokens emitted so far, all rows together."""
    total: int
    """Most tokens it will emit."""


@dataclass(frozen=True)
class Tuned:
    """What a call that names no tree expects to begin with.

    Seconds of its warm-up may speak against it, and it runs another tree where that is faster.
    """

    drafter: str
    """The name of the drafter; ``plain`` for plain decoding."""
    tree: TreeConfig
    """Its tree; without levels, plain decoding."""
    timings: tuple[TreeTiming, ...]
    """What earlier calls of its kind have shown; empty for the tree that is usual on such a
    machine."""


Activity: TypeAlias = Compiling | Tuned | Prefilling | DecodingPlainly
OnActivity: TypeAlias = Callable[[Activity], None]
