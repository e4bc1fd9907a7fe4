"""Which tree to run next: the one with most tokens per second, found out at a bounded cost.

The one chooser: of a call that names no tree, of ``adaptive``, and of a server by its load.

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

A round of 64 nodes costs little more than a plain one beside one row, and several times as much
beside eight. What a round emits in a row does not depend on the others. So every number of live
rows has a policy of its own, and they share what they know of acceptance (:class:`Chooser`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Drafter
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy, on_one_level

FIRST_LOOK = 2
"""Rounds of the first bursts of every candidate: one round may emit little by chance."""
PAUSED = 2.0
"""Most times the seconds of the warm-up that the first burst of a run counts for: it may have met a
pause, and it moves what is known of all candidates."""
SUSPICIOUS = 5.0
"""Times the cheapest candidate's round from which a first timing does not count: it may have met a
pause."""
KNOWN_ROUNDS = 16.0
"""Rounds for which what a candidate emitted in earlier runs counts."""
GUESSED_ROUNDS = 1.0
"""Rounds for which a guess of it counts, until the first rounds that show it."""
MANY = 2**31 - 1
"""More rounds than any run has."""
SHORTEST = 1e-9
"""Seconds of a round at least: a clock may not have moved between two readings."""
RECENT = 5
"""Timings of which the least counts; a context grows, so old ones are dropped."""

SMALL = 16
"""Nodes of the small tree among which an engine chooses by its load."""


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
    foregone: Mapping[int, "Measurement"] = field(default_factory=dict)
    """What other candidates would have done in those of the rounds that say so, by their index
    (:func:`longspec_jax.decoding.report.foregone`); their seconds are not known."""

    def __add__(self, other: "Measurement") -> "Measurement":
        both, none = self.foregone.keys() | other.foregone.keys(), Measurement()
        return Measurement(
            self.rounds + other.rounds,
            self.row_rounds + other.row_rounds,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            {i: self.foregone.get(i, none) + other.foregone.get(i, none) for i in both},
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
    guessed: bool = False
    """Whether its tokens are a guess. The first rounds that show them replace it."""

    @property
    def seen(self) -> bool:
        """Whether rounds have shown its tokens."""
        return self.weight > 0 and not self.guessed

    def round_seconds(self, wait: float) -> float:
        """Seconds of a round: the least of recent timings, since whatever else runs only adds.

        Args:
          wait: seconds that the host adds to a burst.
        """
        # A wait that was overestimated must not make rounds free, nor a clock that stood still.
        least = min(max(seconds - wait, 0.1 * seconds) / rounds for rounds, seconds in self.timings)
        return max(least, SHORTEST)

    def speed(self, wait: float) -> float:
        """Tokens a second in a row; 0 before the first measurement."""
        return self.tokens / self.round_seconds(wait) if self.timings else 0.0

    def faded(self, factor: float) -> "Estimate":
        """The same noise, held less firmly."""
        return replace(self, weight=self.weight * factor)

    def with_tokens_of(self, other: "Estimate") -> "Estimate":
        """The same seconds, with the tokens of another estimate."""
        return replace(self, tokens=other.tokens, weight=other.weight, guessed=other.guessed)

    def moved(self, by: float) -> "Estimate":
        """The estimate with ``by`` seconds added to every round."""
        # A context that shrank must not make rounds free.
        timings = ((n, max(seconds + n * by, 0.1 * seconds)) for n, seconds in self.timings)
        return replace(self, timings=tuple(timings))

    def updated(self, seen: Measurement) -> "Estimate":
        """The estimate after some more rounds."""
        timing = seen.rounds, seen.seconds
        # Twice, so that no candidate is looked at again for its seconds alone.
        timings = (*((timing,) if self.rehearsed else self.timings), timing)[-RECENT:]
        brief = min(self.brief, seen.seconds) if seen.rounds == FIRST_LOOK else self.brief
        shown = self.shown(seen)
        return replace(shown, timings=timings, brief=brief, rehearsed=False)

    def shown(self, seen: Measurement) -> "Estimate":
        """The estimate after rounds, of this tree or of another, that showed its tokens."""
        before = 0.0 if self.guessed else self.weight
        weight = before + seen.rounds
        emitted = (before * self.tokens + seen.rounds * seen.tokens / seen.row_rounds) / weight
        return replace(self, tokens=emitted, weight=weight, guessed=False)

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
    """Seconds that the host adds to a burst, the most that any two bursts showed."""
    latest: int | None = None
    """The candidate of the last burst."""
    first: int | None = None
    """The candidate that a run begins with; None for the one of which least is known."""

    @classmethod
    def over(cls, candidates: int) -> "FastestWithinBudget":
        """A policy that knows nothing yet of its candidates."""
        return cls((Estimate(),) * candidates)

    @classmethod
    def timed(
        cls,
        seconds: Sequence[float],
        tokens: Sequence[float | None] = (),
        first: int | None = None,
        guesses: Sequence[float] = (),
    ) -> "FastestWithinBudget":
        """A policy that knows what a round of each candidate took.

        Args:
          seconds: of launches that are queued ahead, so that the host adds nothing to a burst.
          tokens: that a round of each emitted in a row before; None of one that nobody has seen.
            Of plain decoding it is 1, so that it is known without a look.
          first: the candidate that a run begins with; if absent, of those that nobody has seen the
            one that is fastest by its guess, if no other is faster.
          guesses: of the tokens of those that nobody has seen: a slow one may never be looked at.
            Without them each of those is.
        """
        known = tokens or (None,) * len(seconds)
        guessed = [emitted is None and bool(guesses) for emitted in known]
        known = [
            guesses[index] if guess else emitted
            for index, (emitted, guess) in enumerate(zip(known, guessed, strict=True))
        ]
        # Two timings each: no candidate is looked at for its seconds alone.
        return cls(
            tuple(
                Estimate(
                    timings=((1, each),) * 2,
                    brief=0.0,
                    tokens=emitted or 0.0,
                    weight=0.0 if emitted is None else GUESSED_ROUNDS if guess else KNOWN_ROUNDS,
                    rehearsed=True,
                    guessed=guess,
                )
                for each, emitted, guess in zip(seconds, known, guessed, strict=True)
            ),
            first=first,
        )

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
        first = self.first
        if first is not None and self.latest is None and not self.estimates[first].seen:
            return Choice(first, FIRST_LOOK)
        unknown = self._first_look()
        if unknown is not None:
            return unknown
        leader = self.leader
        if not self.estimates[leader].seen:
            return Choice(leader, FIRST_LOOK)
        hopes = {i: self._hope(i) for i in range(len(self.estimates)) if i != leader}
        for index in sorted(hopes, key=hopes.__getitem__, reverse=True):
            rounds = max(1, self.burst_rounds // 4) if self.estimates[index].seen else FIRST_LOOK
            look = Choice(index, rounds)
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
        if before.rehearsed:
            most = PAUSED * seen.rounds * before.round_seconds(self.wait)
            seen = replace(seen, seconds=min(seen.seconds, most))
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
        for index, instead in seen.foregone.items():
            estimates[index] = estimates[index].shown(instead)
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


def load_of(live: int) -> int:
    """The class of a number of live rows: 0 for one, 1 for two, 2 for up to four, and so on."""
    return (max(live, 1) - 1).bit_length()


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


class Chooser:
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


def smaller_tree(tree: TreeConfig) -> TreeConfig:
    """A chain of half a tree's levels: most of what is accepted, where every node costs.

    ``(4, 16, 16, 16, 16)`` becomes ``(1, 1, 1)``. Lookup keeps its levels. Of a chain with a tree
    at its end it is half the chain with the same tree.
    """
    if tree.lookup:
        widths = (1,) * -(-len(tree.widths) // 2)
        return TreeConfig(widths, min(tree.num_nodes, SMALL), lookup=tree.lookup)
    if tree.chain:
        half, end = -(-tree.chain // 2), tree.end
        budget = None if end.budget is None else half + end.budget
        return TreeConfig((1,) * half + end.widths, budget, tree.threshold, half)
    return TreeConfig((1,) * -(-tree.num_levels // 2), chain=tree.chain)


def candidates(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What a run may choose among: no tree, and the drafters; a smaller tree too of a single one.

    Partial verification does not pay everywhere, so of a single hierarchy its draft's own tree is
    one as well, verified on one level.

    Args:
      drafters: of which each differs from the others in its tree.

    Returns:
      The candidates, the cheapest first.
    """
    own = list(drafters)
    if len(own) == 1:
        [alone] = own
        own.insert(0, with_tree(alone, smaller_tree(alone.tree)))
        if isinstance(alone, Hierarchy) and alone.levels:
            own.append(with_tree(alone, on_one_level(alone.inner.tree)))
    own.sort(key=lambda drafter: drafter.tree.num_nodes)
    return tuple(dict.fromkeys([with_tree(own[0], PLAIN), *own]))


def candidates_by_load(drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """What an engine may choose among by its load: no tree, a small tree, and the default one.

    At eight rows 64 nodes of each cost two to three plain rounds, and 16 nodes less than two. A
    default tree that is small itself has no smaller one beside it, whose programs would take as
    long to compile.

    Args:
      drafters: as of :func:`candidates`; of each name the first one counts.

    Returns:
      The candidates, the cheapest first.
    """
    default = {drafter.name: drafter for drafter in reversed(drafters)}
    own = [default[name] for name in dict.fromkeys(drafter.name for drafter in drafters)]
    both = [*own, *(with_tree(one, smaller) for one in own if (smaller := _small_tree(one)))]
    both.sort(key=lambda drafter: drafter.tree.num_nodes)
    return tuple(dict.fromkeys([with_tree(own[0], PLAIN), *both]))


def _small_tree(drafter: Drafter) -> TreeConfig | None:
    tree = drafter.tree
    if tree.num_nodes <= SMALL:
        return None
    return smaller_tree(tree) if isinstance(drafter, Hierarchy) else replace(tree, budget=SMALL)


def tallest(drafters: Sequence[Drafter]) -> Drafter:
    """The drafter with the tallest tree, whose rounds need the most slack slots."""
    return max(drafters, key=lambda drafter: drafter.tree.num_levels)
