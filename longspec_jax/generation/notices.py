"""What is worth telling once about a run that works: a draft whose proposals are never right."""

import warnings
from collections.abc import Sequence

from longspec_jax.generation.result import Stats
from longspec_jax.generation.timings import TreeTiming

ROUNDS = 64
"""After which a draft is judged."""
USELESS = 0.05
"""Accepted draft tokens per round below which it does not know its target."""


class Notices:
    """Remembers what was said, so that it is said once."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._said = False

    def look_at(self, stats: Stats) -> None:
        """Warn if a draft has proposed for some time and next to nothing was accepted."""
        rounds = sum(use.rounds for use in stats.trees if use.tree.widths)
        accepted = sum(depth * count for depth, count in enumerate(stats.acceptance_histogram))
        if rounds >= ROUNDS and accepted <= USELESS * rounds:
            self._warn(f"{accepted} of the draft's tokens were accepted in {rounds} rounds")

    def look_at_timings(self, timings: Sequence[TreeTiming]) -> None:
        """Warn if no tree earned anything when they were timed."""
        earned = [timing.tokens - 1 for timing in timings if timing.tree.widths]
        if earned and max(earned) <= USELESS:
            self._warn(f"at most {max(earned):.2f} of the draft's tokens were accepted per round")

    def _warn(self, found: str) -> None:
        if self._said:
            return
        self._said = True
        warnings.warn(
            f"{found}: it slows decoding down and seems not to be this target's; load the draft "
            "that was trained for it, or decode plainly",
            UserWarning,
            stacklevel=4,
        )
