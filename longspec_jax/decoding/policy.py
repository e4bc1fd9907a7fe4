"""Which tree to run next: the one with most tokens per second, found out at a bounded cost.

A policy knows no clock, no arrays and no models. It gets what some rounds of a candidate emitted
and how long they took, and says which candidate to run next and for how many rounds. What a
candidate costs is measured where it matters, in the run itself: at this context, with this batch,
on this device.

Two things bound what can be lost. Looking at a candidate that is not the fastest costs time in
which the fastest would have emitted more; this *regret* may reach a small share of the time spent
so far, for every candidate, and no more. And what is known of a candidate fades as rounds pass, so
that it is looked at again, the sooner the closer it came.

A round takes longer the more its rows attend to, and every candidate's rounds by about as much. So
when the seconds of the candidate that runs change from burst to burst, those of the others, as they
are known, change with them. What a look at another one finds is about that one alone.

At the end of a burst the device waits for the host, the longer the more buffers a round has. That
*wait* is estimated from bursts of different lengths of one candidate: without it whatever runs in
long bursts would seem faster than what runs in short ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

FIRST_LOOK = 2
"""Rounds of the first bursts of every candidate: one round may emit little by chance."""
SUSPICIOUS = 5.0
"""Times the cheapest candidate's round from which a first timing does not count: it may have met a
pause."""
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

    def __sub__(self, other: "Measurement") -> "Measurement":
        return Measurement(
            self.rounds - other.rounds,
            self.row_rounds - other.row_rounds,
            self.tokens - other.tokens,
            self.seconds - other.seconds,
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

    timings: tuple[tuple[int, float], ...] = ()
    """Rounds and seconds of its latest bursts, each with one wait."""
    brief: float = math.inf
    """Least seconds of a burst of :data:`FIRST_LOOK` rounds."""
    tokens: float = 0.0
    """Tokens a round emits in a row, a mean over recent rounds."""
    weight: float = 0.0
    """Rounds behind that mean, faded."""
    regret: float = 0.0
    """Seconds by which looking at it was slower than running the fastest would have been."""
    rehearsed: bool = False
    """Whether its timings are from before the run. The first one of the run replaces them."""

    def round_seconds(self, wait: float) -> float:
        """Seconds of a round: the least of recent timings, since whatever else runs only adds.

        Args:
          wait: seconds that the host adds to a burst.
        """
        # A wait that was overestimated must not make rounds free.
        return min(max(seconds - wait, 0.1 * seconds) / rounds for rounds, seconds in self.timings)

    def speed(self, wait: float) -> float:
        """Tokens a second in a row; 0 before the first measurement."""
        return self.tokens / self.round_seconds(wait) if self.timings else 0.0

    def faded(self, factor: float) -> "Estimate":
        """The same noise, held less firmly."""
        return replace(self, weight=self.weight * factor)

    def with_tokens_of(self, other: "Estimate") -> "Estimate":
        """The same seconds, with the tokens of another estimate."""
        return replace(self, tokens=other.tokens, weight=other.weight)

    def moved(self, by: float) -> "Estimate":
        """The estimate with ``by`` seconds added to every round."""
        # A context that shrank must not make rounds free.
        timings = ((n, max(seconds + n * by, 0.1 * seconds)) for n, seconds in self.timings)
        return replace(self, timings=tuple(timings))

    def updated(self, seen: Measurement) -> "Estimate":
        """The estimate after some more rounds."""
        weight = self.weight + seen.rounds
        step = (seen.tokens / seen.row_rounds - self.tokens) * seen.rounds / weight
        timing = seen.rounds, seen.seconds
        # Twice, so that no candidate is looked at again for its seconds alone.
        timings = (*((timing,) if self.rehearsed else self.timings), timing)[-RECENT:]
        brief = min(self.brief, seen.seconds) if seen.rounds == FIRST_LOOK else self.brief
        times = {"timings": timings, "brief": brief, "rehearsed": False}
        return replace(self, **times, tokens=self.tokens + step, weight=weight)

    def wait(self, seen: Measurement) -> float:
        """What a burst and a brief one say about the seconds that belong to no round.

        A pause in the longer burst or a context that grew makes it less, never more.
        """
        if seen.rounds <= FIRST_LOOK or math.isinf(self.brief):
            return 0.0
        excess = seen.rounds * self.brief - FIRST_LOOK * seen.seconds
        return min(max(excess / (seen.rounds - FIRST_LOOK), 0.0), self.brief)


@dataclass(frozen=True)
class FastestWithinBudget:
    """Runs the fastest candidate, and looks at the others while that costs little.

    If candidate 0 is plain decoding, a draft that never proposes a right token makes a run slower
    by ``share`` and ``credit`` for every other candidate, or what the rounds that time it cost.
    """

    estimates: tuple[Estimate, ...]
    """Of every candidate; the cheapest first, against which the first looks at the others count."""
    share: float = 0.01
    """Regret allowed to every candidate, as a share of the time spent."""
    credit: float = 2.0
    """Regret allowed to every candidate from the beginning, in rounds of the cheapest one."""
    optimism: float = 0.4
    """How much faster than its estimate a candidate may be, relative, if one round is behind it;
    uncertainty falls with the square root of the rounds."""
    half_life: float = 32.0
    """Rounds after which what was seen counts half."""
    burst_rounds: int = 16
    """Fewest rounds of a burst of the fastest candidate; a look at another takes a quarter of
    them."""
    burst_seconds: float = 0.4
    """A burst is longer where rounds are short, because at its end the device waits for the host:
    2.7 ms on an H200 with a 7B model, more than half a plain round."""
    longest_burst: int = 128
    elapsed: float = 0.0
    """Seconds of all rounds, pauses left out."""
    wait: float = 0.0
    """Seconds that the host adds to a burst, the most that any two bursts told."""
    latest: int | None = None
    """The candidate of the last burst."""

    @classmethod
    def over(cls, candidates: int) -> "FastestWithinBudget":
        """A policy that knows nothing yet of its candidates."""
        return cls((Estimate(),) * candidates)

    @classmethod
    def timed(cls, seconds: Sequence[float]) -> "FastestWithinBudget":
        """A policy that knows what a round of each candidate took, and not what it emits.

        Of launches that are queued ahead, so that the host adds nothing to a burst.
        """
        # Two timings each: no candidate is looked at for its seconds alone.
        return cls(tuple(Estimate(((1, each),) * 2, brief=0.0, rehearsed=True) for each in seconds))

    def with_tokens_of(self, other: Policy) -> "FastestWithinBudget":
        """The same seconds, with what another policy knows of the tokens of a round."""
        if not isinstance(other, FastestWithinBudget):
            return self
        pairs = zip(self.estimates, other.estimates, strict=True)
        return replace(self, estimates=tuple(own.with_tokens_of(its) for own, its in pairs))

    @property
    def leader(self) -> int:
        """The candidate believed to be fastest; the first one before any was measured."""
        speeds = [estimate.speed(self.wait) for estimate in self.estimates]
        return speeds.index(max(speeds))

    def choose(self) -> Choice:
        """The leader, unless another one needs a look and the budget pays for it."""
        first = self._first_look()
        if first is not None:
            return first
        leader = self.leader
        hopes = {i: self._hope(i) for i in range(len(self.estimates)) if i != leader}
        for index in sorted(hopes, key=hopes.__getitem__, reverse=True):
            look = Choice(index, max(1, self.burst_rounds // 4))
            if hopes[index] > self.estimates[leader].speed(self.wait) and self._pays(look):
                return look
        return Choice(leader, self._burst(leader))

    def observe(self, candidate: int, seen: Measurement) -> "FastestWithinBudget":
        """The policy after some rounds of a candidate."""
        if not seen.row_rounds:
            return self
        factor = 0.5 ** (seen.rounds / self.half_life)
        estimates = [estimate.faded(factor) for estimate in self.estimates]
        before = estimates[candidate]
        wait = max(self.wait, before.wait(seen))
        new = before.updated(seen)
        # A pause does not count: the candidate's usual seconds per round do.
        spent = seen.rounds * new.round_seconds(wait) + wait
        fastest = self.estimates[self.leader].speed(wait)
        if candidate != self.leader and fastest:
            emitted = seen.rounds * seen.tokens / seen.row_rounds
            new = replace(new, regret=new.regret + spent - emitted / fastest)
        # The first burst of a run moves what was rehearsed. A single timing may hold a pause.
        if self.latest in (None, candidate) and len(before.timings) > 1:
            by = new.round_seconds(wait) - before.round_seconds(wait)
            estimates = [estimate.moved(by) for estimate in estimates]
        estimates[candidate] = new
        known = {"estimates": tuple(estimates), "elapsed": self.elapsed + spent, "wait": wait}
        return replace(self, **known, latest=candidate)

    def _first_look(self) -> Choice | None:
        """At a candidate of which too little is known, the cheapest first; None if there is none.

        All are of one length: as long as nobody knows the host's part, each holds the same. The
        cheapest is looked at twice, because a run's first burst is the likeliest to meet a pause,
        and of another one a further round is timed if it seems to have met one.
        """
        cheapest, *others = self.estimates
        if len(cheapest.timings) < 2 or not cheapest.weight:
            return Choice(0, FIRST_LOOK)
        usual = SUSPICIOUS * cheapest.round_seconds(self.wait)
        for index, estimate in enumerate(others, start=1):
            if not (estimate.timings and estimate.weight):
                return Choice(index, FIRST_LOOK)
            if len(estimate.timings) == 1 and estimate.round_seconds(self.wait) > usual:
                return Choice(index, 1)
        return None

    def _hope(self, index: int) -> float:
        """The speed a candidate may have, given how little is known of it."""
        estimate = self.estimates[index]
        doubt = self.optimism / math.sqrt(max(estimate.weight, 1e-9))
        return estimate.speed(self.wait) * (1 + doubt)

    def _pays(self, look: Choice) -> bool:
        """Whether the budget covers the regret that a look is expected to cost."""
        estimate = self.estimates[look.candidate]
        fastest = self.estimates[self.leader].speed(self.wait)
        slower = estimate.round_seconds(self.wait) - estimate.tokens / fastest
        expected = look.rounds * slower + self.wait
        cheapest = min(estimate.round_seconds(self.wait) for estimate in self.estimates)
        allowed = self.share * self.elapsed + self.credit * cheapest
        return estimate.regret + expected <= allowed

    def _burst(self, index: int) -> int:
        """Rounds of a burst: enough that waiting for the host does not show."""
        rounds = math.ceil(self.burst_seconds / self.estimates[index].round_seconds(self.wait))
        return min(max(rounds, self.burst_rounds), self.longest_burst)


def default_policy(candidates: int) -> Policy:
    """The fastest of several candidates within a budget; of one, that one."""
    return FastestWithinBudget.over(candidates) if candidates > 1 else Always()
