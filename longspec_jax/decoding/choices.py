"""A policy's choices where launches are queued, and where the number of live rows changes.

A round of 64 nodes costs little more than a plain one beside one row, and several times as much
beside eight. What a round emits in a row does not depend on the others. So every number of live
rows has a policy of its own, and they share what they know of acceptance.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax

from longspec_jax.decoding.policy import Choice, FastestWithinBudget, Measurement, Policy
from longspec_jax.decoding.round import MOST_ROUNDS

LAUNCH_SECONDS = 0.4
"""Seconds of a launch of many rounds: the host can interrupt a run between two of them. Behind each
a GPU waits some 2 ms for the host."""
FIRST_ROUNDS = 4
"""Rounds of the first launch of many where nothing is known of a round's seconds."""


def most_rounds(given: int | None, candidates: int, round_seconds: float) -> int:
    """Rounds of a launch of many.

    Args:
      given: how many; None for as many as fill :data:`LAUNCH_SECONDS`.
      candidates: how many trees there are to choose among.
      round_seconds: of the last launch; NaN before the first.
    """
    if given is not None:
        return given
    if candidates > 1 or jax.process_count() > 1:
        # The policy decides, or every process has to decide alike.
        return MOST_ROUNDS
    if math.isnan(round_seconds):
        return FIRST_ROUNDS
    return min(max(int(LAUNCH_SECONDS / max(round_seconds, 1e-6)), 1), MOST_ROUNDS)


def load_of(live: int) -> int:
    """The class of a number of live rows: 0 for one, 1 for two, 2 for up to four, and so on."""
    return (max(live, 1) - 1).bit_length()


FEW_SLOTS = 4
"""Slots of which a CPU always launches all: another size would prolong a start by two thirds."""


def launch_sizes(slots: int) -> tuple[int, ...]:
    """Rows of an engine's launches, ascending: 1, 2, 4, ... and all slots.

    Every size has a program for each candidate and kind of sampling. A CPU takes seconds to compile
    one, so there the sizes are one row, a quarter of the slots, and all; of few slots all alone.
    """
    if jax.default_backend() == "cpu":
        fewer = {1, slots // 4} if slots > FEW_SLOTS else set()
    else:
        fewer = {1 << power for power in range(load_of(slots))}
    return tuple(sorted({*fewer, slots}))


class LateChoices:
    """A policy's choices, where launches are queued before the last ones were read.

    When the rounds that the policy chose are launched, the last of them are still running. The
    policy then observes what was read by then, and the rest when that candidate runs again. If
    nothing was read, one more round of the same candidate is launched.
    """

    def __init__(self, policy: Policy, candidates: int) -> None:
        """Begin with the policy's first choice."""
        self.totals = (Measurement(),) * candidates
        """What every candidate has done, as far as it was read."""
        self.policy = policy
        """As it is behind what it has observed."""
        self._unobserved = [Measurement()] * candidates
        self._choice = policy.choose()
        self._missing = self._choice.rounds

    def next(self, running: Sequence[Choice], most: int) -> Choice:
        """The candidate and the rounds of the next launch."""
        seen = self._unobserved[self._choice.candidate]
        if self._missing <= 0 and seen.rounds:
            self._observe(self._choice.candidate)
            self._choice = self.policy.choose()
            same = [run.rounds for run in running if run.candidate == self._choice.candidate]
            self._missing = self._choice.rounds - sum(same)
        rounds = min(max(self._missing, 1), most)
        self._missing -= rounds
        return Choice(self._choice.candidate, rounds)

    def record(self, candidate: int, seen: Measurement) -> None:
        """Note what a launch did; the policy observes it before its next choice."""
        self._unobserved[candidate] += seen
        totals = list(self.totals)
        totals[candidate] += seen
        self.totals = tuple(totals)

    def resume(self, latest: Policy) -> None:
        """Go on after other rounds ran, with what the policy that chose them knows of tokens."""
        if isinstance(self.policy, FastestWithinBudget):
            self.policy = self.policy.with_tokens_of(latest)
        self._choice = self.policy.choose()
        self._missing = self._choice.rounds

    def forget(self) -> None:
        """Forget the totals, and not what the policy has learnt."""
        self.totals = (Measurement(),) * len(self.totals)

    def settle(self) -> None:
        """Have the policy observe all that was read."""
        for candidate, seen in enumerate(self._unobserved):
            if seen.rounds:
                self._observe(candidate)

    def _observe(self, candidate: int) -> None:
        self.policy = self.policy.observe(candidate, self._unobserved[candidate])
        self._unobserved[candidate] = Measurement()


class ChoicesByLoad:
    """The late choices of one policy for every number of live rows, by powers of two."""

    def __init__(self, policies: Sequence[Policy], candidates: int) -> None:
        """Begin with the first policy.

        Args:
          policies: for one live row, two, up to four and so on; the last one for all others.

        Raises:
          NotImplementedError: if there is a choice in a computation of several processes.
        """
        if candidates > 1 and jax.process_count() > 1:
            raise NotImplementedError(
                f"{jax.process_count()} processes would each choose by their own clock and run "
                "different programs; decode with one fixed tree instead"
            )
        self._by_load = [LateChoices(policy, candidates) for policy in policies]
        self._load = 0

    @property
    def totals(self) -> tuple[Measurement, ...]:
        """What every candidate has done, as far as it was read."""
        every: Any = zip(*(choices.totals for choices in self._by_load), strict=True)
        return tuple(sum(parts, Measurement()) for parts in every)

    def next(self, running: Sequence[Choice], most: int, live: int) -> Choice:
        """As of :class:`LateChoices`, for the rounds of this many live rows."""
        load = self._of(live)
        if load != self._load:
            before = self._by_load[self._load]
            before.settle()
            self._by_load[load].settle()
            self._by_load[load].resume(before.policy)
            self._load = load
        return self._by_load[load].next(running, most)

    def record(self, candidate: int, seen: Measurement, live: int) -> None:
        """Note what a launch beside this many live rows did."""
        self._by_load[self._of(live)].record(candidate, seen)

    def forget(self) -> None:
        """Forget the totals, and not what the policies have learnt."""
        for choices in self._by_load:
            choices.forget()

    def _of(self, live: int) -> int:
        return min(load_of(live), len(self._by_load) - 1)
