"""Which tree to run next: the one that emits most tokens a second, within a budget for finding out.

A policy knows no clock, no arrays and no models. It is told what some rounds of a candidate emitted
and how long they took, and says which candidate to run next and for how many rounds. What a
candidate costs is measured where it matters, in the run itself: at this context, with this batch,
on this device.

Two things bound what can be lost. Looking at a candidate that is not the fastest costs time in which
the fastest would have emitted more; this *regret* may reach a small share of the time spent so far,
for every candidate, and no more. And what is known of a candidate fades as rounds pass, so that it is
looked at again, the sooner the closer it came.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

SAMPLES = 2
"""Timings of one round each before a candidate is judged: one alone may have met a pause."""
MANY = 2**31 - 1
"""More rounds than any run has."""
RECENT = 5
"""Timings of which the least counts; a context grows, so old ones are dropped."""


class Choice(NamedTuple):
    """What to run next."""

    candidate: int
    rounds: int


@dataclass(frozen=True)
class Measurement:
    """What some rounds of one candidate did."""

    rounds: int = 0
    row_rounds: int = 0
    """Rounds counted once for every row that was not done."""
    tokens: int = 0
    """Emitted by all rows together."""
    seconds: float = 0.0

    def __add__(self, other: "Measurement") -> "Measurement":
        return Measurement(
            self.rounds + other.rounds,
            self.row_rounds + other.row_rounds,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )


@runtime_checkable
class Policy(Protocol):
    """What the decode loop asks for a choice; a value, not an object that changes."""

    def choose(self) -> Choice:
        """What to run next."""
        ...

    def observe(self, candidate: int, seen: Measurement) -> "Policy":
        """The policy after some rounds of a candidate."""
        ...


@dataclass(frozen=True)
class Always:
    """Runs one candidate to the end."""

    candidate: int = 0

    def choose(self) -> Choice:
        """The candidate, until every row is done."""
        return Choice(self.candidate, MANY)

    def observe(self, candidate: int, seen: Measurement) -> "Always":
        """Nothing is learnt."""
        return self


@dataclass(frozen=True)
class Estimate:
    """What is known of one candidate."""

    timings: tuple[float, ...] = ()
    """Seconds a round of its latest bursts."""
    tokens: float = 0.0
    """Tokens a round emits in a row, a mean over recent rounds."""
    weight: float = 0.0
    """Rounds behind that mean, faded."""
    regret: float = 0.0
    """Seconds by which looking at it was slower than running the fastest would have been."""

    @property
    def seconds(self) -> float:
        """Seconds of a round: the least of recent timings, since whatever else runs only adds."""
        return min(self.timings)

    @property
    def speed(self) -> float:
        """Tokens a second in a row; 0 before the first measurement."""
        return self.tokens / self.seconds if self.timings else 0.0

    def faded(self, factor: float) -> "Estimate":
        """The same beliefs, held less firmly."""
        return replace(self, weight=self.weight * factor)

    def updated(self, seen: Measurement) -> "Estimate":
        """The estimate after some more rounds."""
        weight = self.weight + seen.rounds
        step = (seen.tokens / seen.row_rounds - self.tokens) * seen.rounds / weight
        timings = (*self.timings, seen.seconds / seen.rounds)[-RECENT:]
        return replace(self, timings=timings, tokens=self.tokens + step, weight=weight)


@dataclass(frozen=True)
class FastestWithinBudget:
    """Runs the fastest candidate, and looks at the others while that costs little.

    If candidate 0 is plain decoding, a draft that never proposes a right token makes a run slower by
    ``share`` and ``credit`` for every other candidate, or what the two rounds that time it cost.
    """

    estimates: tuple[Estimate, ...]
    """Of every candidate; the cheapest first, against which the first looks at the others count."""
    share: float = 0.01
    """Regret allowed to every candidate, as a share of the time spent."""
    credit: float = 2.0
    """Regret allowed to every candidate from the beginning, in rounds of the cheapest one."""
    optimism: float = 0.5
    """How much faster than its estimate a candidate may be, relative, if one round is behind it;
    uncertainty falls with the square root of the rounds."""
    half_life: float = 32.0
    """Rounds after which what was seen counts half."""
    burst_rounds: int = 16
    """Fewest rounds of a burst of the fastest candidate; a look at another takes a quarter of them."""
    burst_seconds: float = 0.25
    """A burst is longer where rounds are short, because at its end the device waits for the host: 2.7 ms
    on an H200 with a 7B model, more than half a plain round."""
    longest_burst: int = 128
    elapsed: float = 0.0
    """Seconds of all rounds, pauses left out."""

    @classmethod
    def over(cls, candidates: int) -> "FastestWithinBudget":
        """A policy that knows nothing yet of so many candidates."""
        return cls((Estimate(),) * candidates)

    @property
    def leader(self) -> int:
        """The candidate believed to be fastest; the first one before any was measured."""
        speeds = [estimate.speed for estimate in self.estimates]
        return speeds.index(max(speeds))

    def choose(self) -> Choice:
        """The leader, unless another one needs a look and the budget pays for it."""
        for index, estimate in enumerate(self.estimates):
            if len(estimate.timings) < SAMPLES:
                return Choice(index, 1)
        leader = self.leader
        hopes = {i: self._hope(i) for i in range(len(self.estimates)) if i != leader}
        for index in sorted(hopes, key=hopes.__getitem__, reverse=True):
            look = Choice(index, max(1, self.burst_rounds // 4))
            if hopes[index] > self.estimates[leader].speed and self._pays(look):
                return look
        return Choice(leader, self._burst(leader))

    def observe(self, candidate: int, seen: Measurement) -> "FastestWithinBudget":
        """The policy after some rounds of a candidate.

        Args:
          candidate: its index.
          seen: what the rounds did; changes nothing if there were none.
        """
        if not seen.row_rounds:
            return self
        factor = 0.5 ** (seen.rounds / self.half_life)
        estimates = [estimate.faded(factor) for estimate in self.estimates]
        new = estimates[candidate].updated(seen)
        # A pause is nobody's fault: time is counted at the candidate's usual pace.
        spent = seen.rounds * new.seconds
        fastest = self.estimates[self.leader].speed
        if candidate != self.leader and fastest:
            emitted = seen.rounds * seen.tokens / seen.row_rounds
            new = replace(new, regret=new.regret + spent - emitted / fastest)
        estimates[candidate] = new
        return replace(self, estimates=tuple(estimates), elapsed=self.elapsed + spent)

    def _hope(self, index: int) -> float:
        """The speed a candidate may have, given how little is known of it."""
        estimate = self.estimates[index]
        doubt = self.optimism / math.sqrt(max(estimate.weight, 1e-9))
        return estimate.speed * (1 + doubt)

    def _pays(self, look: Choice) -> bool:
        """Whether the budget covers the regret that a look is expected to cost."""
        estimate, fastest = self.estimates[look.candidate], self.estimates[self.leader].speed
        expected = look.rounds * (estimate.seconds - estimate.tokens / fastest)
        cheapest = min(estimate.seconds for estimate in self.estimates)
        allowed = self.share * self.elapsed + self.credit * cheapest
        return estimate.regret + expected <= allowed

    def _burst(self, index: int) -> int:
        """Rounds of a burst: enough that waiting for the host does not show."""
        rounds = math.ceil(self.burst_seconds / self.estimates[index].seconds)
        return min(max(rounds, self.burst_rounds), self.longest_burst)
