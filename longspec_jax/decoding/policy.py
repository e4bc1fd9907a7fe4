"""Which tree to run next: the one with most tokens per second, as rounds of any tree show it.

The one policy that chooses: of a call that names no tree, of ``adaptive``, and of a server by its
load. It knows no clock, no arrays and no models. It gets what some rounds of a candidate emitted
and how long they took, and says which candidate to run next.

**Seconds** of a round are nearly constants of a device, a model and a number of nodes. They are
measured in the warm-up, apart from the *wait*: at the end of a launch the device waits for the
host. What moves them in a run, a context that grows or rows that come, moves those of all
candidates by about as much: it is one number, learnt from whatever runs. Rounds that verify
only what pays follow the text. Their candidate is never slower than those that verify nothing.

**Tokens** of a round are uncertain, and known round by round: the accepted path of one tree says
what its smaller cuts, lookup alone and plain decoding would have emitted
(:func:`longspec_jax.decoding.report.foregone`). So these need no rounds of their own. Older rounds
count less. A larger tree, which would show the one that runs, moves along with it by as many
tokens: where lookup finds nothing, a tree that looks up among other things finds less, too.

The fastest candidate, the *leader*, runs. Only what its rounds do not show needs a *look*. Looks
cost time in which the leader would have emitted more; this *regret* may reach a small share of the
time spent so far, and no more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longspec_jax.decoding.chooser import KEPT, Choice, Measurement, Policy, Watch

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
TRUSTED = 16
"""Rounds of which the seconds are a mean: a context grows."""
CHEAPEST = 0.4
"""Part of its timed seconds that a round takes at least. Plain rounds of 32 rows at 1k take 0.43 of
those at 4k. What a large tree's timing took too long must not make plain rounds free.
"""
UNSURE = 16
"""Times the wait that a launch takes if half of what its rounds took longer is believed."""
LONGEST = 0.4
"""Seconds of a launch of many rounds, at most: the host can interrupt a run between two."""
BLIND = 0.2
"""The same where the leader's rounds do not show all others: meanwhile none of these is thought of.
"""
BEGUN = 0.7
"""Speed over the leader's, both guessed, from which a candidate begins whose rounds show all
others. Each text then says which is its fastest, and guesses only what such rounds cost."""
SHORTEST = 1e-9
"""Seconds of a round at least: a clock may not have moved between two readings."""


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
    least: float = 0.0
    """Seconds of a round that verifies nothing, of a candidate whose rounds verify only what pays,
    so that its seconds follow the text; 0 of others."""

    @property
    def mean(self) -> float:
        """Tokens of a round in a row; 0 before any is known."""
        return self.tokens / self.weight if self.weight else 0.0

    def after(self, shown: np.ndarray) -> "Estimate":
        """The estimate after some rounds; NaN of those that do not show it."""
        kept = KEPT ** np.arange(len(shown) - 1, -1, -1)
        seen, older = ~np.isnan(shown), KEPT ** len(shown)
        tokens = older * self.tokens + kept[seen] @ shown[seen]
        return replace(self, tokens=float(tokens), weight=float(older * self.weight + kept @ seen))

    def moved(self, by: float) -> "Estimate":
        """The estimate with a mean that is larger by so many tokens."""
        return replace(self, tokens=max(self.mean + by, 1.0) * self.weight)


@dataclass(frozen=True)
class FastestWithinBudget(Policy):
    """Runs the fastest candidate, and looks at those that its rounds do not show.

    If candidate 0 is plain decoding, a draft that never proposes a right token makes a run slower
    by ``share`` and ``credit``, or what the rounds that time it cost.
    """

    estimates: tuple[Estimate, ...]
    """Of every candidate, the cheapest first."""
    shows: tuple[tuple[bool, ...], ...] = ()
    """Of every candidate, which ones its rounds show; without it, only itself."""
    wait: float = 0.0
    """Seconds that the host adds to a launch."""
    drift: float = 0.0
    """Seconds that a round of any candidate takes longer than it did when it was timed."""
    ran: int = 0
    """Rounds that the drift is a mean of, at most :data:`TRUSTED`."""
    share: float = 0.01
    """Regret of all looks, as a share of the time spent."""
    credit: float = 2.0
    """Regret of all looks from the beginning, in rounds of the cheapest candidate; with three
    waits, as a look has two. Without them a candidate that began badly would never run again."""
    doubt: float = 0.5
    """How much faster than its estimate the leader may be, relative, if the estimate is of one
    round; uncertainty falls with the square root of the rounds."""
    hope: float = 0.15
    """The same of a candidate that a look would show. It is less: what makes one tree's rounds emit
    more in a text makes others', too, and a look takes a fifth of a call of 256 tokens that lookup
    finds."""
    elapsed: float = 0.0
    """Seconds of all rounds, pauses left out."""
    regret: float = 0.0
    """Seconds by which looks were slower than running the fastest would have been."""
    running: int | None = None
    """The last leader that ran, or the one that was to begin."""

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
        least: Mapping[int, float] | None = None,
    ) -> "FastestWithinBudget":
        """A policy that knows what a round of each candidate takes.

        Args:
          seconds: without the wait.
          tokens: that a round of each may emit in a row, from earlier runs or as a guess. A
            candidate whose number is None is looked at first.
          wait: seconds that the host adds to a launch.
          shows: of every candidate, which ones its rounds show.
          least: seconds of a round that verifies nothing, of the candidates that may do so.
        """
        means = tokens or (None,) * len(seconds)
        estimates = [
            Estimate(max(each, SHORTEST), 2, KNOWN * mean, KNOWN) if mean else Estimate(each, 2)
            for each, mean in zip(seconds, means, strict=True)
        ]
        for index, each in (least or {}).items():
            estimates[index] = replace(estimates[index], least=max(each, SHORTEST))
        policy = cls(tuple(estimates), shows, wait)
        if not all(means):
            return policy
        # A look that comes first must not replace the tree that was to begin by a narrow margin.
        first, every = policy.leader, range(len(estimates))
        showing = [i for i in every if all(policy._shown(i, other) for other in every)]
        best = max(showing, key=policy.speed, default=first)
        # Where plain decoding leads, a tree could be a little slower to the end of the call.
        pays = first > 0 and policy.speed(best) >= BEGUN * policy.speed(first)
        return replace(policy, running=best if pays else first)

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
        longest = BLIND if hopes else LONGEST
        return Choice(leader, math.ceil(longest / self.round_seconds(leader)))

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

    def speed(self, index: int) -> float:
        """Tokens a second in a row; 0 before any is known."""
        speed = self.estimates[index].mean / self.round_seconds(index)
        return max(speed, self._least_speed(index)) if speed else speed

    def _least_speed(self, index: int) -> float:
        """Of rounds that verify nothing; 0 where there are none.

        The seconds of a candidate that verifies only what pays are of a passage that paid.
        """
        least = self.estimates[index].least
        return 1 / self._now(least) if least else 0.0

    def round_seconds(self, index: int) -> float:
        """Seconds of a round of a candidate now."""
        return self._now(self.estimates[index].seconds)

    def _now(self, usual: float) -> float:
        """Seconds of a round now that took as many when it was timed."""
        return max(usual + self.drift, CHEAPEST * usual)

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

    def _shown(self, by: int, index: int) -> bool:
        """Whether rounds of one candidate show another one."""
        return self.shows[by][index] if self.shows else by == index

    def _hope(self, index: int) -> float:
        """The speed a candidate may have, given how little is known of it."""
        return self.speed(index) * (1 + self.hope / math.sqrt(self.estimates[index].weight))

    def _pays(self, look: Choice) -> bool:
        """Whether the budget covers the regret that a look is expected to cost."""
        lost = 1 - self.speed(look.candidate) / self.speed(self.leader)
        expected = look.rounds * self.round_seconds(look.candidate) * lost + 2 * self.wait
        allowed = self.share * self.elapsed + self.credit * self.round_seconds(0) + 3 * self.wait
        return self.regret + expected <= allowed

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
            [self._least_speed(index) for index in every],
        ]
        return replace(watch, known=np.asarray(known, np.float32))

    def observe(self, candidate: int, seen: Measurement) -> "FastestWithinBudget":
        """The policy after some rounds of a candidate."""
        if not seen.row_rounds:
            return self
        leads, mean = candidate == self.leader, seen.tokens / seen.row_rounds
        after = self._with_seconds(candidate, seen, leads)
        spent = seen.rounds * after.round_seconds(candidate) + self.wait
        regret = self.regret
        if not leads and (fastest := self.speed(self.leader)):
            regret += spent - seen.rounds * mean / fastest
        shown = seen.shown
        if shown is None:
            shown = np.full((seen.rounds, len(self.estimates)), np.nan)
            shown[:, candidate] = mean
        columns = zip(after.estimates, shown.T, strict=True)
        estimates = [each.after(column) for each, column in columns]
        if self.estimates[candidate].weight:
            by = estimates[candidate].mean - self.estimates[candidate].mean
            hidden = [bool(np.isnan(column).all()) for column in shown.T]
            for index, each in enumerate(estimates):
                if hidden[index] and self._shown(index, candidate):
                    estimates[index] = each.moved(by)
        return replace(
            after,
            estimates=tuple(estimates),
            elapsed=self.elapsed + spent,
            regret=regret,
            running=candidate if leads else self.running,
        )

    def _with_seconds(self, index: int, seen: Measurement, leads: bool) -> "FastestWithinBudget":
        """The policy with what some rounds say of the seconds of a round."""
        own, usual = self.estimates[index], self.round_seconds(index)
        drift, ran = self.drift, self.ran
        measured = max(seen.seconds - self.wait, 0.1 * seen.seconds, SHORTEST) / seen.rounds
        if not own.timings or (own.timings < 2 and seen.rounds <= FIRST_LOOK):
            own = replace(own, seconds=min(own.seconds, measured), timings=own.timings + 1)
        elif leads:  # A look's few rounds say too little of seconds.
            # One launch may have met a pause.
            by = min(max(measured, usual / 2), 2 * usual) - usual
            by *= seen.rounds / (seen.rounds + ran)
            # The excess of a launch that is short next to the wait is the host's. Taken whole, it
            # made all rounds seem alike, and a lead of a third in tokens a second was not seen.
            by *= seen.seconds / (seen.seconds + UNSURE * self.wait)
            ran = min(ran + seen.rounds, TRUSTED)
            if own.least:
                own = replace(own, seconds=own.seconds + by)
            else:
                drift += by
        estimates = (*self.estimates[:index], own, *self.estimates[index + 1 :])
        return replace(self, estimates=estimates, drift=drift, ran=ran)

    def with_tokens_of(self, other: Policy) -> "FastestWithinBudget":
        """The same seconds, with what another policy knows of the tokens of a round."""
        if not isinstance(other, FastestWithinBudget):
            return self
        pairs = zip(self.estimates, other.estimates, strict=True)
        shared = (replace(own, tokens=its.tokens, weight=its.weight) for own, its in pairs)
        return replace(self, estimates=tuple(shared))
