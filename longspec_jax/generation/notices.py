"""What is worth telling once about a run that works: a draft whose proposals are never right."""

import warnings

from longspec_jax.generation.job import Job
from longspec_jax.generation.runner import Run

ROUNDS = 64
"""After which a draft is judged."""
USELESS = 0.05
"""Accepted draft tokens per round below which it does not know its target."""


class Notices:
    """Remembers what was said, so that it is said once."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._said = False

    def look_at(self, job: Job, run: Run) -> None:
        """Warn if a draft has proposed for some time and next to nothing was accepted."""
        speculative = [
            total
            for drafter, total in zip(job.drafters, run.totals, strict=True)
            if drafter.tree.widths
        ]
        rounds = sum(total.row_rounds for total in speculative)
        if self._said or rounds < ROUNDS:
            return
        accepted = sum(total.tokens for total in speculative) - rounds
        if accepted > USELESS * rounds:
            return
        self._said = True
        warnings.warn(
            f"{accepted} of the draft's proposals were accepted in {rounds} rounds: it slows decoding "
            "down and seems not to be this target's; load the one trained for it, or decode plainly",
            UserWarning,
            stacklevel=3,
        )
