"""Rounds driven from Python for a stream, the next one launched before the last one is read.

A launch returns at once, so the host can put round ``n + 1`` on the device's queue while round
``n`` still runs; the device then never waits for what the host does with the tokens. Three things
make that possible:

* A round is a straight line of operations (:func:`one_round`). The loop of
  :func:`~longspec_jax.decoding.adaptive.burst` asks the host on a GPU whether to go on, and its
  launch returns only when all its rounds are done.
* Beside the state, which the next launch donates, a round returns one small array of its own: what
  it emitted (:func:`report_of`). It is all the host ever reads: one transfer per round.
* Another thread waits for that array (:class:`Rounds`), so that no wait holds up a launch and the
  time of arrival is known even while the consumer is busy.

The price: when the report arrives that ends the last row, one more round is already under way. It
commits nothing and emits nothing, as rounds do for rows that are done, and nobody waits for it; it
keeps the device busy for as long as a round takes.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.adaptive import check_one_clock
from longspec_jax.decoding.engine import Request, SpecState, spec_step
from longspec_jax.decoding.policy import Measurement, Policy
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params

Launch: TypeAlias = Callable[[int, SpecState], tuple[SpecState, Array]]
"""``(candidate, state) -> state, report``: starts a round, donates the state and does not wait."""


@dataclass(frozen=True)
class Report:
    """What one round did, on the host."""

    count: np.ndarray
    """``[B]`` tokens each row gained, 0 where it was done."""
    done: np.ndarray
    """``[B]`` whether the row has met a stop token or its budget."""
    tokens: np.ndarray
    """``[B, h]`` the gained tokens; garbage from ``count[b]`` on."""
    drafted: np.ndarray
    """``[B, h]`` whether a gained token was an accepted draft token."""

    @classmethod
    def of(cls, packed: np.ndarray) -> "Report":
        """Take apart what :func:`report_of` packed."""
        height = (packed.shape[1] - 2) // 2
        tokens, drafted = packed[:, 2 : 2 + height], packed[:, 2 + height :]
        return cls(packed[:, 0], packed[:, 1] != 0, tokens, drafted != 0)

    def measured(self, seconds: float) -> Measurement:
        """The round as a policy sees it."""
        rows = int(np.count_nonzero(self.count))
        return Measurement(int(rows > 0), rows, int(self.count.sum()), seconds)


def report_of(before: SpecState, after: SpecState, height: int) -> Array:
    """What a round added, packed into one ``[B, 2 + 2 h]`` int32 array; see :class:`Report`.

    Args:
      before: the state before the round.
      after: the state after it.
      height: most tokens a round emits in a row; static.
    """
    columns = before.emitted[:, None] + jnp.arange(height)
    gained = (jnp.take_along_axis(all_, columns, axis=1) for all_ in (after.output, after.drafted))
    ends = (after.emitted - before.emitted)[:, None], after.done[:, None]
    return jnp.concatenate([part.astype(jnp.int32) for part in (*ends, *gained)], axis=1)


@program(static_argnames=("target", "drafter"), donate_argnames=("state",))
def one_round(
    target: TargetModel, drafter: Drafter, params: Params, request: Request, state: SpecState
) -> tuple[SpecState, Array]:
    """One round and its report, with no branch and no loop; the state is donated.

    If every row is done nothing is emitted or committed, but the round is computed all the same.
    """
    after = spec_step(target, drafter, params, request, state)
    return after, report_of(state, after, drafter.tree.num_levels + 1)


def fetch(report: Array) -> np.ndarray:
    """Bring a report to the host: the one transfer of a round."""
    # Waiting here lets other threads run; converting an unfinished array may not.
    report.block_until_ready()
    return np.asarray(report)


class _Flight(NamedTuple):
    """A round that was launched and not yet looked at."""

    candidate: int
    launched: float
    landing: Future[tuple[Report, float]]


class Rounds:
    """Rounds until every row is done, as an iterator over their reports; a context manager.

    The first round is launched on entering, every other one while the one before it runs. Leave
    the context at any time: what is under way ends by itself and touches nothing.

    A round's seconds run from the end of the round before, or from its own launch if the device had
    nothing to do, to the arrival of its report. How long the consumer takes does not count.

    A policy decides one round late, because the device never waits for it: when the rounds it asked
    for are launched, the last of them has not been seen. What has been seen by then is what it
    observes, the rest when that candidate runs again; and if none has, one more round is launched.
    """

    def __init__(
        self,
        launch: Launch,
        state: SpecState,
        policy: Policy,
        candidates: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Prepare to start from a state with a row that is not done.

        Args:
          launch: starts a round of a candidate.
          state: the state before the first round; donated.
          policy: chooses the candidate of every round.
          candidates: how many there are.
          clock: seconds, for the policy and the totals; the reader's thread asks it, too.

        Raises:
          NotImplementedError: if there is a choice in a computation of several processes.
        """
        check_one_clock(candidates)
        self.state = state
        """The state behind the last launch, at most one round ahead of the last report."""
        self.totals = (Measurement(),) * candidates
        """What every candidate has done, as far as reported."""
        self._launch, self._policy, self._clock = launch, policy, clock
        self._unobserved = [Measurement()] * candidates
        self._choice = policy.choose()
        self._missing = self._choice.rounds
        self._flights: deque[_Flight] = deque()
        self._last_arrival = -math.inf
        self._over = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="round-reader")

    def __enter__(self) -> "Rounds":
        """Launch the first round."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for nothing."""
        self._over = True
        self._reader.shutdown(wait=False, cancel_futures=True)

    def __iter__(self) -> Iterator[Report]:
        """Yield every round's report as it arrives."""
        done = False
        while not done:
            self._start()
            candidate, launched, landing = self._flights.popleft()
            report, arrival = landing.result()
            seconds = arrival - max(launched, self._last_arrival)
            self._last_arrival = arrival
            self._count(candidate, report.measured(seconds))
            done = bool(report.done.all())
            yield report

    def _start(self) -> None:
        """Launch a round, and have its report read."""
        self._decide()
        candidate, launched = self._choice.candidate, self._clock()
        self.state, report = self._launch(candidate, self.state)
        self._flights.append(_Flight(candidate, launched, self._reader.submit(self._land, report)))
        self._missing -= 1

    def _decide(self) -> None:
        """Ask the policy, if its last choice is launched and some of it has been seen."""
        candidate = self._choice.candidate
        seen = self._unobserved[candidate]
        if self._missing > 0 or not seen.rounds:
            return
        self._policy = self._policy.observe(candidate, seen)
        self._unobserved[candidate] = Measurement()
        self._choice = self._policy.choose()
        same = [flight.candidate for flight in self._flights].count(self._choice.candidate)
        self._missing = self._choice.rounds - same

    def _count(self, candidate: int, seen: Measurement) -> None:
        """Note what a round of a candidate did; the policy hears of it when it is next asked."""
        self._unobserved[candidate] += seen
        totals = list(self.totals)
        totals[candidate] += seen
        self.totals = tuple(totals)

    def _land(self, report: Array) -> tuple[Report, float]:
        """Wait for a report and note the time. Runs in the reader's thread."""
        if self._over:
            raise RuntimeError("nobody asks for a round behind the last one")
        landed = Report.of(fetch(report))
        self._over = bool(landed.done.all())
        return landed, self._clock()
