"""What a call is doing while no text comes, for a display of its progress.

A call reports its activities to ``on_activity`` in the order in which they begin. A long one is
reported again as it advances. Without ``on_activity`` nothing is reported and nothing is spent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from longspec_jax.config import TreeConfig
from longspec_jax.generation.timings import TreeTiming


@dataclass(frozen=True)
class Compiling:
    """Programs of a new shape are compiled and tried out."""


@dataclass(frozen=True)
class _OfTree:
    drafter: str
    """The name of the drafter; ``plain`` for plain decoding."""
    tree: TreeConfig
    """Its tree; without levels, plain decoding."""


@dataclass(frozen=True)
class Tuning(_OfTree):
    """A tree is timed, once for calls of this kind on this machine, to choose what they run."""


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
class Tuned(_OfTree):
    """The call has chosen what it runs."""

    timings: tuple[TreeTiming, ...]
    """What was timed now or before; empty if nothing could be, and the tree is the default one."""


@dataclass(frozen=True)
class Slower(_OfTree):
    """The call was slower than plain decoding; the next one of its kind times all trees again."""

    speed: float
    """Over plain decoding's, as it was timed."""


Activity: TypeAlias = Compiling | Tuning | Tuned | Prefilling | DecodingPlainly | Slower
OnActivity: TypeAlias = Callable[[Activity], None]
