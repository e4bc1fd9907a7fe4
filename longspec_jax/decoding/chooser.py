"""Who runs next: how the decode loop asks a policy, and what it tells it.

A policy names a candidate and how many of its rounds to run, and learns what rounds did. The one
that goes by the clock is in :mod:`longspec_jax.decoding.policy`. The loop launches rounds before
the last ones were read, so a policy hears late of what it has chosen (:class:`LateChoices`).

A round of 64 nodes costs little more than a plain one alongside one row, and several times as much
alongside eight. What a round emits in a row does not depend on the others. So every number of live
rows has a policy of its own, and they share what they know of acceptance (:class:`Chooser`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.config.tree import TreeConfig

KEPT = 0.5 ** (1 / 32)
"""Share of an older round's weight that remains after another one."""
STREAMED = 8
"""Rounds after which a choice is thought over where each is a launch of its own."""


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
        shown = self.shown if other.shown is None else other.shown
        if self.shown is not None and other.shown is not None:
            shown = np.concatenate([self.shown, other.shown])
        return Measurement(
            self.rounds + other.rounds,
            self.row_rounds + other.row_rounds,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            shown,
        )


@struct.dataclass
class Watch:
    """What a launch of many rounds knows of all candidates, to end where another one leads.

    The device compares their speeds after every round, so a run changes its tree as soon as it is
    known to be slower, and not before.
    """

    rounds: Leaf[Int[Array, ""]]
    """Of the launch, at most."""
    known: Leaf[Float[Array, "6 K"]]
    """Of every candidate: tokens and weight, as in
    :class:`~longspec_jax.decoding.policy.Estimate`, the seconds of a round, how much faster than
    the one that runs it must be, the doubt of that one's speed if this one's rounds do not show it,
    and the least speed."""

    @classmethod
    def of(cls, rounds: int, candidates: int) -> "Watch":
        """A launch that ends after this many rounds, and not before."""
        most: Any = np.int32(rounds)
        known: Any = np.ones((6, candidates), np.float32)
        known[3] = np.inf
        return cls(most, known)

    def leads(self, candidate: int) -> Bool[Array, ""]:
        """Whether no other candidate is faster than the one that runs by as much as it must be."""
        tokens, weight, seconds, lead, doubt, least = self.known
        speeds = jnp.maximum(tokens / weight / seconds, least)
        needed = (lead + doubt / jnp.sqrt(weight[candidate])) * speeds[candidate]
        others = jnp.arange(len(speeds)) != candidate
        return ~(others & (speeds > needed)).any()

    def after(self, candidate: int, foregone: Int[Array, "B K"]) -> "Watch":
        """What is known after a round of a candidate.

        Args:
          foregone: as in :func:`longspec_jax.decoding.report.foregone`.
        """
        shown, live = foregone.min(axis=0) >= 0, (foregone.max(axis=1) > 0).sum()
        mean = jnp.where(shown, foregone.sum(axis=0) / jnp.maximum(live, 1), 0.0)
        tokens, weight = KEPT * self.known[:2] + jnp.stack([mean, shown.astype(mean.dtype)])
        before, behind = self.known[0] / self.known[1], tokens / weight
        moved = jnp.maximum(behind + (behind - before)[candidate], 1.0) * weight
        # Rounds of a tree without a doubt would show the one that runs: it holds that one's nodes.
        tokens = jnp.where(shown | (self.known[4] > 0), tokens, moved)
        return replace(self, known=jnp.stack([tokens, weight, *self.known[2:]]))


@dataclass(frozen=True)
class TreeTiming:
    """What rounds of one drafter with one tree did."""

    drafter: str
    """Its name."""
    tree: TreeConfig
    """Its shape; without levels, plain decoding."""
    seconds: float
    """Of one round."""
    tokens: float
    """Emitted in one round by a row."""
    rounds: int = 0
    """How many rounds the tokens are a mean of."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one row."""
        return self.tokens / self.seconds

    def corrected(self, seen: Measurement, most: float) -> "TreeTiming":
        """The timing after more rounds of the same tree.

        Args:
          seen: what they did.
          most: earlier rounds that count, at most.
        """
        share = seen.rounds / (min(self.rounds, most) + seen.rounds)
        # Equal means stay as they are: plain rounds emit one token exactly.
        return replace(
            self,
            seconds=self.seconds + share * (seen.seconds / seen.rounds - self.seconds),
            tokens=self.tokens + share * (seen.tokens / seen.row_rounds - self.tokens),
            rounds=self.rounds + seen.rounds,
        )


class Policy:
    """What the decode loop asks for a choice; a value, not an object that changes."""

    def choose(self) -> Choice:
        """What to run next."""
        raise NotImplementedError

    def observe(self, candidate: int, seen: Measurement) -> "Policy":
        """The policy after some rounds of a candidate."""
        raise NotImplementedError

    def watch(self, choice: Choice) -> Watch | None:
        """What ends a launch of the choice before its time; None for nothing."""
        return None

    def with_tokens_of(self, other: "Policy") -> "Policy":
        """The same, with what another one knows of the tokens of a round."""
        return self


class LateChoices:
    """A policy's choices, where launches are queued before the last ones were read.

    When the rounds that the policy chose are launched, the last of them are still running. The
    policy then observes what was read by then, and the rest when that candidate runs again. If
    nothing was read, one more round of the same candidate is launched.
    """

    def __init__(self, policy: Policy, candidates: int) -> None:
        """Begin with the policy's first choice."""
        self.policy = policy
        """As it is after what it has observed."""
        self._unobserved = [Measurement()] * candidates
        self._choice = policy.choose()
        self._missing = self._choice.rounds

    def next(self, running: Sequence[Choice], most: int) -> Choice:
        """The candidate and the rounds of the next launch."""
        # A launch of many rounds may have ended before its time.
        if self._unobserved[self._choice.candidate].rounds and (self._missing <= 0 or most > 1):
            self._observe(self._choice.candidate)
            self._choice = self.policy.choose()
            same = [run.rounds for run in running if run.candidate == self._choice.candidate]
            self._missing = self._choice.rounds - sum(same)
            if most == 1:
                self._missing = min(self._missing, STREAMED)
        rounds = min(max(self._missing, 1), most)
        self._missing -= rounds
        return Choice(self._choice.candidate, rounds)

    def record(self, candidate: int, seen: Measurement) -> None:
        """Note what a launch did; the policy observes it before its next choice."""
        self._unobserved[candidate] += seen

    def resume(self, before: "LateChoices") -> None:
        """Go on after rounds that another one chose, with what its policy knows of tokens."""
        before._settle()
        self._settle()
        self.policy = self.policy.with_tokens_of(before.policy)
        self._choice = self.policy.choose()
        self._missing = self._choice.rounds

    def _settle(self) -> None:
        """Have the policy observe all that was read."""
        for candidate, seen in enumerate(self._unobserved):
            if seen.rounds:
                self._observe(candidate)

    def _observe(self, candidate: int) -> None:
        self.policy = self.policy.observe(candidate, self._unobserved[candidate])
        self._unobserved[candidate] = Measurement()


class Chooser:
    """The candidate of every launch: a policy's choice for this many live rows."""

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

    def next(self, running: Sequence[Choice], most: int, live: int) -> tuple[Choice, Watch | None]:
        """The candidate and the rounds of the next launch, and what ends it before its time.

        Args:
          running: the launches under way.
          most: rounds of a launch.
          live: rows that take part.
        """
        load = self._of(live)
        own = self._by_load[load]
        if load != self._load:
            own.resume(self._by_load[self._load])
            self._load = load
        choice = own.next(running, most)
        return choice, own.policy.watch(choice) if most > 1 else None

    def record(self, candidate: int, seen: Measurement, live: int) -> None:
        """Note what a launch alongside this many live rows did."""
        self._by_load[self._of(live)].record(candidate, seen)

    def _of(self, live: int) -> int:
        return min(load_of(live), len(self._by_load) - 1)


def load_of(live: int) -> int:
    """The class of a number of live rows: 0 for one, 1 for two, 2 for up to four, and so on."""
    return (max(live, 1) - 1).bit_length()
