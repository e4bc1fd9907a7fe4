"""Rounds driven from Python for a stream, the next one launched before the last one is read.

A launch returns at once, so the host can put round ``n + 1`` on the device's queue while round
``n`` still runs; the device then never waits for what the host does with the tokens. Three things
make that possible:

* A round is a straight line of operations (:func:`one_round`). The loop of
  :func:`~longspec_jax.decoding.adaptive.burst` asks the host on a GPU whether to go on, and its
  launch returns only when all its rounds are done.
* Beside the rows, which the next launch donates, a round returns one small array of its own: what
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
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np

from longspec_jax.axes import Array
from longspec_jax.decoding.adaptive import check_one_clock
from longspec_jax.decoding.choosing import Choosing
from longspec_jax.decoding.engine import spec_step
from longspec_jax.decoding.policy import Measurement, Policy
from longspec_jax.decoding.programs import program
from longspec_jax.decoding.record import Emitted
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, Params

State = TypeVar("State")
Launch: TypeAlias = Callable[[int, State], tuple[State, Array]]
"""``(candidate, rows) -> rows, report``: starts a round, donates the rows and does not wait."""


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
        count, done, accepted, tokens = *packed[:, :3].T, packed[:, 3:]
        drafted = np.arange(tokens.shape[1]) < accepted[:, None]
        return cls(count, done != 0, tokens, drafted)

    def measured(self, seconds: float) -> Measurement:
        """The round as a policy sees it."""
        rows = int(np.count_nonzero(self.count))
        return Measurement(int(rows > 0), rows, int(self.count.sum()), seconds)


def report_of(emitted: Emitted, after: Rows) -> Array:
    """What a round did, packed into one ``[B, 3 + h]`` int32 array; see :class:`Report`."""
    ends = jnp.stack([emitted.count, after.done, emitted.accepted], axis=1)
    return jnp.concatenate([ends, emitted.tokens], axis=1)


@program(static_argnames=("target", "drafter"), donate_argnames=("rows",))
def one_round(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows
) -> tuple[Rows, Array]:
    """One round and its report, with no branch and no loop; the rows are donated.

    If every row is done nothing is emitted or committed, but the round is computed all the same.
    """
    after, emitted = spec_step(target, drafter, params, rows)
    return after, report_of(emitted, after)


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


class Rounds(Generic[State]):
    """Rounds until every row is done, as an iterator over their reports; a context manager.

    The first round is launched on entering, every other one while the one before it runs. Leave
    the context at any time: what is under way ends by itself and touches nothing.

    A round's seconds run from the end of the round before, or from its own launch if the device had
    nothing to do, to the arrival of its report. How long the consumer takes does not count.
    A
    policy decides one round late (:mod:`longspec_jax.decoding.choosing`).
    """

    def __init__(
        self,
        launch: Launch[State],
        rows: State,
        policy: Policy,
        candidates: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Prepare to start from a batch with a row that is not done.

        Args:
          launch: starts a round of a candidate.
          rows: the batch before the first round; donated.
          policy: chooses the candidate of every round.
          candidates: how many there are.
          clock: seconds, for the policy and the totals; the reader's thread asks it, too.

        Raises:
          NotImplementedError: if there is a choice in a computation of several processes.
        """
        check_one_clock(candidates)
        self.rows = rows
        """The rows behind the last launch, at most one round ahead of the last report."""
        self._launch, self._clock = launch, clock
        self._choosing = Choosing(policy, candidates)
        self._flights: deque[_Flight] = deque()
        self._last_arrival = -math.inf
        self._over = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="round-reader")

    @property
    def totals(self) -> tuple[Measurement, ...]:
        """What every candidate has done, as far as reported."""
        return self._choosing.totals

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
            self._choosing.count(candidate, report.measured(seconds))
            done = bool(report.done.all())
            yield report

    def _start(self) -> None:
        """Launch a round, and have its report read."""
        candidate = self._choosing.next([flight.candidate for flight in self._flights])
        launched = self._clock()
        self.rows, report = self._launch(candidate, self.rows)
        self._flights.append(_Flight(candidate, launched, self._reader.submit(self._land, report)))

    def _land(self, report: Array) -> tuple[Report, float]:
        """Wait for a report and note the time. Runs in the reader's thread."""
        if self._over:
            raise RuntimeError("nobody asks for a round behind the last one")
        landed = Report.of(fetch(report))
        self._over = bool(landed.done.all())
        return landed, self._clock()
