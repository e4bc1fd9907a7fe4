"""What a partially verified chain gains and costs: how long it should be, and whether it pays.

A partial round yields so many tokens and takes so long; the full pass confirms a token of the chain
with the *agreement* ``a``, given that it confirmed the one before. Of a chain of ``n`` tokens it
emits ``1 + a + ... + a**n`` with its own next one, and goes on into a tree behind the chain with
probability ``a**n``. Longer chains share one full pass among more partial rounds, and throw more of
them away; with what was measured the best length is a comparison of a few numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

BISECTIONS = 50


@dataclass(frozen=True)
class ChainCost:
    """What rounds take and yield, measured."""

    partial_seconds: float
    """Of a partial round: the inner draft's tree, and the target over a part of its cache."""
    full_seconds: float
    """Of a full pass, with choosing blocks and with what is drafted behind the chain."""
    partial_yield: float
    """Mean tokens that a partial round emits into the chain, its own next one included."""
    height: int
    """The most that one emits: a row goes on while its chain has room for so many."""
    end_yield: float = 1.0
    """Mean tokens behind a chain that is confirmed to its end: with no tree there, the full pass's
    own next one."""

    def __post_init__(self) -> None:
        if not 1 <= self.partial_yield <= self.height or not self.end_yield >= 1:
            raise ValueError(
                f"partial_yield={self.partial_yield} must be 1 to height={self.height} tokens and "
                f"end_yield={self.end_yield} at least 1: every pass emits a token of its own"
            )
        if not (self.partial_seconds > 0 and self.full_seconds > 0):
            raise ValueError(
                f"partial_seconds={self.partial_seconds} and full_seconds={self.full_seconds} must "
                "be above 0"
            )

    def rounds(self, levels: int) -> float:
        """Mean partial rounds of a chain of so many levels; rounds of one yield are assumed."""
        return max(0, levels - self.height) / self.partial_yield + 1

    def tokens(self, levels: int, agreement: float) -> float:
        """Mean tokens that a full pass emits."""
        length = min(self.rounds(levels) * self.partial_yield, float(levels))
        return confirmed(length, agreement) + 1 + agreement**length * (self.end_yield - 1)

    def speed(self, levels: int, agreement: float) -> float:
        """Tokens per second of a row.

        Args:
          levels: of the chain, 1 or more.
          agreement: from 0 to 1.
        """
        seconds = self.rounds(levels) * self.partial_seconds + self.full_seconds
        return self.tokens(levels, agreement) / seconds

    def best(self, chains: Sequence[int], agreement: float) -> int:
        """The chain with most tokens per second, of some numbers of levels."""
        return max(chains, key=lambda levels: self.speed(levels, agreement))

    def break_even(self, levels: int, speed: float) -> float | None:
        """The agreement from which a chain is faster than what has this speed; None if never.

        Speed grows with agreement, so it is bisected.
        """
        if self.speed(levels, 1.0) <= speed:
            return None
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if self.speed(levels, middle) > speed:
                high = middle
            else:
                low = middle
        return high


def measured_agreement(confirmed: Sequence[int], shortest: int) -> float:
    """The agreement that makes counts of full passes likeliest; NaN if they say nothing.

    Args:
      confirmed: draft tokens that every full pass confirmed, the tree behind a chain included.
      shortest: tokens that every chain had at least. What ended a longer count is not known, the
        full pass or the chain, so that it only tells of so many confirmed ones.
    """
    refused = sum(count < shortest for count in confirmed)
    held = sum(min(count, shortest) for count in confirmed)
    return held / (held + refused) if held + refused else math.nan


def confirmed(length: float, agreement: float) -> float:
    """Mean confirmed tokens of a chain: ``a + ... + a**n``, and smooth between whole ``n``."""
    if agreement >= 1.0:
        return length
    return agreement * (1 - agreement**length) / (1 - agreement)
