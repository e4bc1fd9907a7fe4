"""Which candidate every round runs, where rounds are launched before the last ones were seen.

A policy then decides late: when the rounds it asked for are launched, the last of them are still
under way. What has been seen by then is what it observes, the rest when that candidate runs again;
and if nothing has, one more round is launched.
"""

from collections.abc import Sequence

from longspec_jax.decoding.policy import Measurement, Policy


class Choosing:
    """Asks a policy, and keeps what it has not been told yet."""

    def __init__(self, policy: Policy, candidates: int) -> None:
        """Begin with what the policy chooses first.

        Args:
          policy: chooses the candidate of every round.
          candidates: how many there are.
        """
        self.totals = (Measurement(),) * candidates
        """What every candidate has done, as far as it was counted."""
        self._policy = policy
        self._unobserved = [Measurement()] * candidates
        self._choice = policy.choose()
        self._missing = self._choice.rounds

    def next(self, flying: Sequence[int]) -> int:
        """The candidate of the round to launch.

        Args:
          flying: the candidates of the rounds under way.
        """
        seen = self._unobserved[self._choice.candidate]
        if self._missing <= 0 and seen.rounds:
            self._policy = self._policy.observe(self._choice.candidate, seen)
            self._unobserved[self._choice.candidate] = Measurement()
            self._choice = self._policy.choose()
            self._missing = self._choice.rounds - list(flying).count(self._choice.candidate)
        self._missing -= 1
        return self._choice.candidate

    def count(self, candidate: int, seen: Measurement) -> None:
        """Note what a round of a candidate did; the policy hears of it when it is next asked."""
        self._unobserved[candidate] += seen
        totals = list(self.totals)
        totals[candidate] += seen
        self.totals = tuple(totals)
