"""What a call is doing while no text comes, for a display of its progress.

A call reports its activities to ``on_activity`` in the order in which they begin. A long one is
reported again as it advances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding.chooser import TreeTiming


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
