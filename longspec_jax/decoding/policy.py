"""Which tree to run next: the one with most tokens per second, as rounds of any tree show it.

The one chooser: of a call that names no tree, of ``adaptive``, and of a server by its load.

A policy knows no clock, no arrays of a device and no models. It gets what some rounds of a
candidate emitted and how long they took, and says which candidate to run next.

**Seconds** of a round are nearly constants of a device, a model and a number of nodes. They are
measured in the warm-up, apart from the *wait*: at the end of a launch the device waits for the
host. What moves them in a run, a context that grows or rows that come, moves those of all
candidates by about as much: it is one number, learnt from whatever runs.

**Tokens** of a round are uncertain, and known round by round: the accepted path of one tree says
what its smaller cuts, lookup alone and plain decoding would have emitted
(:func:`longspec_jax.decoding.report.foregone`). So these need no rounds of their own. Older rounds
count less. A launch of many rounds compares the speeds itself, behind every round
(:class:`Watch`), and ends where another candidate leads: as soon as it is known, and not before.

Only what the leader's rounds do not show needs a *look*. Looks cost time in which the leader would
have emitted more; this *regret* may reach a small share of the time spent so far, and no more.

A round of 64 nodes costs little more than a plain one beside one row, and several times as much
beside eight. What a round emits in a row does not depend on the others. So every number of live
rows has a policy of its own, and they share what they know of acceptance (:class:`Chooser`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.base import Drafter
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy, on_one_level

FIRST_LOOK = 2
"""Rounds of the first launches of a candidate that the warm-up did not time."""
SUSPICIOUS = 5.0
"""Times the cheapest candidate's round from which a single timing does not count: it may have met a
pause."""
LOOK = 8
"""Rounds of a look: a few may emit little by chance, and the wait is the same."""
KNOWN = 2.0
"""Rounds for which what a candidate emitted in earlier runs counts, or a guess of it: texts differ.
"""
STREAMED = 8
"""Rounds behind which a choice is thought over where each is a launch of its own."""
KEPT = 0.5 ** (1 / 32)
"""Share of an older round's weight that remains behind another one."""
TRUSTED = 16
"""Rounds of which the seconds are a mean: a context grows."""
UNSURE = 16
"""Times the wait that a launch takes if half of what its rounds took longer is believed."""
LONGEST = 0.4
"""Seconds of a launch of many rounds, at most: the host can interrupt a run between two."""
MANY = 2**31 - 1
"""More rounds than any run has."""
SHORTEST = 1e-9
"""Seconds of a round at least: a clock may not have moved between two readings."""

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
    shown: np.ndarray | None = None
    """``[rounds, K]`` what every candidate would have emitted in a row; NaN where a round does not
    say. If absent rounds show the candidate that ran, in the mean."""

    def __add__(self, other: "Measurement") -> "Measurement":
        shown = [each.shown for each in (self, other) if each.shown is not None]
        return Measurement(
            self.rounds + other.rounds,
            self.row_rounds + other.row_rounds,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            np.concatenate(shown) if shown else None,
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


@struct.dataclass
class Watch:
    """What a launch of many rounds knows of all candidates, to end where another one leads."""

    rounds: Leaf[Int[Array, ""]]
    """Of the launch, at most."""
    known: Leaf[Float[Array, "5 K"]]
    """Of every candidate: tokens and weight, as of :class:`Estimate`, the seconds of a round, how
    much faster than the one that runs it must be, and the doubt of that one's speed if this one's
    rounds do not show it."""

    @classmethod
    def of(cls, rounds: int, candidates: int) -> "Watch":
        """A launch that ends after this many rounds."""
        most: Any = np.int32(rounds)
        known: Any = np.ones((5, candidates), np.float32)
        known[3] = np.inf
        return cls(most, known)

    def leads(self, candidate: int) -> Bool[Array, ""]:
        """Whether no other candidate is faster than the one that runs by as much as it must be."""
        tokens, weight, seconds, lead, doubt = self.known
        speeds = tokens / weight / seconds
        needed = (lead + doubt / jnp.sqrt(weight[candidate])) * speeds[candidate]
        others = jnp.arange(len(speeds)) != candidate
        return ~(others & (speeds > needed)).any()

    def after(self, foregone: Int[Array, "B K"]) -> "Watch":
        """What is known behind a round.

        Args:
          foregone: as of :func:`longspec_jax.decoding.report.foregone`.
        """
        shown, live = foregone.min(axis=0) >= 0, (foregone.max(axis=1) > 0).sum()
        mean = jnp.where(shown, foregone.sum(axis=0) / jnp.maximum(live, 1), 0.0)
        tokens, weight = KEPT * self.known[:2] + jnp.stack([mean, shown.astype(mean.dtype)])
        return replace(self, known=jnp.stack([tokens, weight, *self.known[2:]]))


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

    seconds: float = math.inf
    """Of a round, without what all candidates' rounds take longer by."""
    timings: int = 0
    """Of which the least are those seconds; more than one are not doubted."""
    tokens: float = 0.0
    """That rounds of it emit in a row, all together; an older round counts less."""
    weight: float = 0.0
    """Those rounds, faded alike."""
    varies: bool = False
    """Whether its rounds differ in what they do, so that its seconds follow the text."""

    @property
    def mean(self) -> float:
        """Tokens of a round in a row; 0 before any is known."""
        return self.tokens / self.weight if self.weight else 0.0

    def after(self, shown: np.ndarray) -> "Estimate":
        """The estimate behind some rounds; NaN of those that do not show it."""
        kept = KEPT ** np.arange(len(shown) - 1, -1, -1)
        seen, older = ~np.isnan(shown), KEPT ** len(shown)
        tokens = older * self.tokens + kept[seen] @ shown[seen]
        return replace(self, tokens=float(tokens), weight=float(older * self.weight + kept @ seen))


@dataclass(frozen=True)
class FastestWithinBudget:
    """Runs the fastest candidate, and looks at those that its rounds do not show.

    If candidate 0 is plain decoding, a draft that never proposes a right token makes a run slower
    by ``share`` and ``credit``, or what the rounds that time it cost.
    """

    estimates: tuple[Estimate, ...]
    """Of every candidate, the cheapest first."""
    shows: tuple[tuple[bool, ...], ...] = ()
    """Of every candidate, which ones its rounds show; without it, itself alone."""
    wait: float = 0.0
    """Seconds that the host adds to a launch."""
    drift: float = 0.0
    """Seconds that a round of any candidate takes longer than it did when it was timed."""
    ran: int = 0
    """Rounds behind that, at most :data:`TRUSTED`."""
    share: float = 0.01
    """Regret of all looks, as a share of the time spent."""
    credit: float = 2.0
    """Regret of all looks from the beginning, in rounds of the cheapest candidate; beside three
    waits, as a look has two. Without them a candidate that began badly would never run again."""
    doubt: float = 0.4
    """How much faster than its estimate a candidate may be, relative, if one round is behind it;
    uncertainty falls with the square root of the rounds."""
    elapsed: float = 0.0
    """Seconds of all rounds, pauses left out."""
    regret: float = 0.0
    """Seconds by which looks were slower than running the fastest would have been."""
    running: int | None = None
    """The last leader that ran."""

    @classmethod
    def over(
        cls, candidates: int, shows: tuple[tuple[bool, ...], ...] = ()
    ) -> "FastestWithinBudget":
        """A policy that knows nothing yet of its candidates."""
        return cls((Estimate(),) * candidates, shows)

    @classmethod
    def timed(
        cls,
        seconds: Sequence[float],
        tokens: Sequence[float | None] = (),
        *,
        wait: float = 0.0,
        shows: tuple[tuple[bool, ...], ...] = (),
        varying: Sequence[int] = (),
    ) -> "FastestWithinBudget":
        """A policy that knows what a round of each candidate takes.

        Args:
          seconds: without the wait.
          tokens: that a round of each may emit in a row, from earlier runs or as a guess; those of
            which there is none are looked at first.
          wait: seconds that the host adds to a launch.
          shows: of every candidate, which ones its rounds show.
          varying: indices of those whose seconds follow the text.
        """
        means = tokens or (None,) * len(seconds)
        estimates = [
            Estimate(max(each, SHORTEST), 2, KNOWN * mean, KNOWN) if mean else Estimate(each, 2)
            for each, mean in zip(seconds, means, strict=True)
        ]
        for index in varying:
            estimates[index] = replace(estimates[index], varies=True)
        return cls(tuple(estimates), shows, wait)

    def with_tokens_of(self, other: Policy) -> "FastestWithinBudget":
        """The same seconds, with what another policy knows of the tokens of a round."""
        if not isinstance(other, FastestWithinBudget):
            return self
        pairs = zip(self.estimates, other.estimates, strict=True)
        shared = (replace(own, tokens=its.tokens, weight=its.weight) for own, its in pairs)
        return replace(self, estimates=tuple(shared))

    def round_seconds(self, index: int) -> float:
        """Seconds of a round of a candidate now."""
        usual = self.estimates[index].seconds
        # A context that shrank must not make rounds free.
        return max(usual + self.drift, 0.1 * usual)

    def speed(self, index: int) -> float:
        """Tokens a second in a row; 0 before any is known."""
        return self.estimates[index].mean / self.round_seconds(index)

    @property
    def leader(self) -> int:
        """The candidate believed to be fastest; the first one before any was measured."""
        every = range(len(self.estimates))
        speeds = [self.speed(index) for index in every]
        if (running := self.running) is not None and speeds[running]:
            lead, doubt = self._lead(running)
            # The last one goes on unless another is so much faster.
            unsure = self.estimates[running].weight ** -0.5
            for index in every:
                speeds[index] /= 1.0 if index == running else lead + doubt[index] * unsure
        return speeds.index(max(speeds))

    def choose(self) -> Choice:
        """The leader, unless another one needs a look and the budget pays for it."""
        for index, each in enumerate(self.estimates):
            if not each.weight or each.timings < (1 if index else 2):
                return Choice(index, FIRST_LOOK)
            if each.timings == 1 and each.seconds > SUSPICIOUS * self.estimates[0].seconds:
                return Choice(index, 1)
        leader = self.leader
        hopes = {i: self._hope(i) for i in range(len(self.estimates)) if not self._shown(leader, i)}
        for index in sorted(hopes, key=hopes.__getitem__, reverse=True):
            if hopes[index] > self.speed(leader) and self._pays(Choice(index, LOOK)):
                return Choice(index, LOOK)
        return Choice(leader, math.ceil(LONGEST / self.round_seconds(leader)))

    def watch(self, choice: Choice) -> Watch:
        """Ends a launch of the leader where another one leads; a look runs to its end."""
        every, watch = range(len(self.estimates)), Watch.of(choice.rounds, len(self.estimates))
        if choice.candidate != self.leader or not all(each.weight for each in self.estimates):
            return watch
        lead, doubt = self._lead(choice.candidate)
        known = [
            [each.tokens for each in self.estimates],
            [each.weight for each in self.estimates],
            [self.round_seconds(index) for index in every],
            [lead for _ in every],
            doubt,
        ]
        return replace(watch, known=np.asarray(known, np.float32))

    def observe(self, candidate: int, seen: Measurement) -> "FastestWithinBudget":
        """The policy after some rounds of a candidate."""
        if not seen.row_rounds:
            return self
        estimates, mean = list(self.estimates), seen.tokens / seen.row_rounds
        own, leads = estimates[candidate], candidate == self.leader
        drift, ran = self.drift, self.ran
        measured = max(seen.seconds - self.wait, 0.1 * seen.seconds, SHORTEST) / seen.rounds
        usual = self.round_seconds(candidate)
        if not own.timings or (own.timings < 2 and seen.rounds <= FIRST_LOOK):
            own = replace(own, seconds=min(own.seconds, measured), timings=own.timings + 1)
        elif leads:  # A look's few rounds say too little of seconds.
            # One launch may have met a pause.
            by = min(max(measured, usual / 2), 2 * usual) - usual
            by *= seen.rounds / (seen.rounds + ran)
            # The excess of a launch that is short beside the wait is the host's. Taken whole, it
            # made all rounds seem alike, and a lead of a third in tokens a second was not seen.
            by *= seen.seconds / (seen.seconds + UNSURE * self.wait)
            ran = min(ran + seen.rounds, TRUSTED)
            if own.varies:
                own = replace(own, seconds=own.seconds + by)
            else:
                drift += by
        estimates[candidate] = own
        shown = seen.shown
        if shown is None:
            shown = np.full((seen.rounds, len(estimates)), np.nan)
            shown[:, candidate] = mean
        after = replace(
            self,
            estimates=tuple(
                each.after(column) for each, column in zip(estimates, shown.T, strict=True)
            ),
            drift=drift,
            ran=ran,
            running=candidate if leads else self.running,
        )
        spent = seen.rounds * after.round_seconds(candidate) + self.wait
        regret = self.regret
        if not leads and (fastest := self.speed(self.leader)):
            regret += spent - seen.rounds * mean / fastest
        return replace(after, elapsed=self.elapsed + spent, regret=regret)

    def _shown(self, by: int, index: int) -> bool:
        """Whether rounds of one candidate show another one."""
        return self.shows[by][index] if self.shows else by == index

    def _lead(self, running: int) -> tuple[float, list[float]]:
        """How much faster than the one that runs another must be to replace it.

        It has to make up for the wait in as many rounds as count. And where its rounds would not
        show the one that runs, it must be faster than that one may be by its few rounds, because a
        mistake would not be noticed.

        Returns:
          The speed over that of the one that runs; and for each candidate how much more at a weight
          of 1, less by the square root of the weight.
        """
        lead = 1 + self.wait * (1 - KEPT) / self.round_seconds(running)
        every = range(len(self.estimates))
        return lead, [0.0 if self._shown(index, running) else self.doubt for index in every]

    def _hope(self, index: int) -> float:
        """The speed a candidate may have, given how little is known of it."""
        return self.speed(index) * (1 + self.doubt / math.sqrt(self.estimates[index].weight))

    def _pays(self, look: Choice) -> bool:
        """Whether the budget covers the regret that a look is expected to cost."""
        estimate, fastest = self.estimates[look.candidate], self.speed(self.leader)
        slower = self.round_seconds(look.candidate) - estimate.mean / fastest
        expected = look.rounds * slower + 2 * self.wait
        allowed = self.share * self.elapsed + self.credit * self.round_seconds(0) + 3 * self.wait
        return self.regret + expected <= allowed


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
        # A launch of many rounds may have ended before its time.
        if seen.rounds and (self._missing <= 0 or most > 1):
            self._observe(self._choice.candidate)
            self._choice = self.policy.choose()
            same = [run.rounds for run in running if run.candidate == self._choice.candidate]
            self._missing = self._choice.rounds - sum(same)
            if most == 1:
                self._missing = min(self._missing, STREAMED)
        rounds = min(max(self._missing, 1), most)
        self._missing -= rounds
        return Choice(self._choice.candidate, rounds)

    def watch(self, choice: Choice) -> Watch | None:
        """What ends a launch of the choice before its time."""
        policy = self.policy
        return policy.watch(choice) if isinstance(policy, FastestWithinBudget) else None

    def record(self, candidate: int, seen: Measurement) -> None:
        """Note what a launch did; the policy observes it before its next choice."""
        self._unobserved[candidate] += seen
        totals = list(self.totals)
        totals[candidate] += replace(seen, shown=None)
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

    def watch(self, choice: Choice, live: int) -> Watch | None:
        """As of :class:`LateChoices`."""
        return self._by_load[self._of(live)].watch(choice)

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
