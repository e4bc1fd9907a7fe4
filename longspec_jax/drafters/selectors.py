"""Who chooses what a partial pass of the target sees.

A selector may keep state, which learns of committed tokens as a drafter's does, and is asked once a
proposal. The simplest keeps none: the first and the last tokens of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from longspec_jax.axes import Lengths
from longspec_jax.drafters.base import NOTHING, Committed, Needs, View
from longspec_jax.drafters.selection import Selection, Spans, end_to_end, everything
from longspec_jax.ops.selection.blocks import BlockBudget, BlockTable


@runtime_checkable
class Selector(Protocol):
    """Pure functions of a state; the object itself is static and hashable."""

    @property
    def needs(self) -> Needs:
        """What it wants to learn of committed tokens."""
        ...

    def begin(self, batch: int, capacity: int) -> Any:
        """The state of rows without a token, every leaf ``[B, ...]``."""
        ...

    def extend(self, state: Any, committed: Committed) -> Any:
        """The state after more tokens were committed: a chunk of a prompt, or an accepted path."""
        ...

    def before_round(self, state: Any, view: View) -> Any:
        """The state after a look at the cache, before every full pass and what leads to it."""
        ...

    def choose(self, state: Any, view: View) -> Selection:
        """What partial passes see of the ``view.length[b]`` tokens in the cache."""
        ...

    def gathers(self, capacity: int) -> int:
        """Slots of a cache of so many that are copied for it; 0 where they are read in place."""
        ...


@runtime_checkable
class Retriever(Selector, Protocol):
    """A selector that chooses blocks."""

    @property
    def budget(self) -> BlockBudget:
        """How many."""
        ...

    @property
    def choosing(self) -> tuple[int, ...]:
        """Sizes of the axes of a row's table that choose for themselves: layers and heads."""
        ...

    def table(self, state: Any, view: View) -> BlockTable:
        """The best blocks ``[B, *choosing, k]``."""
        ...


def of_blocks(budget: BlockBudget, view: View, table: Callable[[View], BlockTable]) -> Selection:
    """A table's blocks of every layer, laid end to end; all tokens where they are of no more slots.

    Args:
      budget: of the table.
      view: of the cache.
      table: chooses the blocks, if any are to be chosen.
    """
    if not budget.gathers(view.keys[0].shape[2]):
        return everything(view.length)
    return end_to_end(view.keys, view.values, table(view), budget.block)


@dataclass(frozen=True)
class SinksAndRecent:
    """The first tokens of a row, which attention falls back on, and the last (StreamingLLM)."""

    sinks: int = 32
    recent: int = 1024
    needs: Needs = field(default=NOTHING, init=False)

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 1:
            raise ValueError(
                f"sinks={self.sinks} must be at least 0 and recent={self.recent} at least 1: a "
                "draft that sees no recent token has nothing to go on"
            )

    def __call__(self, length: Lengths) -> Spans:
        """The spans in rows of ``length[b]`` committed tokens."""
        sinks = jnp.minimum(length, self.sinks)
        recent = jnp.maximum(sinks, length - self.recent)
        start = jnp.stack([jnp.zeros_like(sinks), recent], axis=1)
        return Spans(start, jnp.stack([sinks, length], axis=1))

    def begin(self, batch: int, capacity: int) -> tuple[()]:
        """No state."""
        return ()

    def extend(self, state: tuple[()], committed: Committed) -> tuple[()]:
        """No state."""
        return ()

    def before_round(self, state: tuple[()], view: View) -> tuple[()]:
        """No state."""
        return ()

    def choose(self, state: tuple[()], view: View) -> Spans:
        """The spans of the rows in view."""
        return self(view.length)

    def gathers(self, capacity: int) -> int:
        """None."""
        return 0
