"""Which rows a step takes, and how long it makes them.

Rows that are not packed have the length of their documents, most of which are far shorter than the
longest. They are sorted into buckets of few lengths, each half of the next, and a step takes rows
of one bucket: a program is compiled for every length, and what is computed is little more than what
is there. A step of a shorter bucket takes as many more rows, so that every step has the same number
of places for tokens, and about the same memory.

All of it is a pure function of the seed, the step and the rows' lengths: every process makes the
same plan, and a resumed run goes on with it.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


def bucket_lengths(seq_len: int, count: int) -> tuple[int, ...]:
    """Lengths of so many buckets, from short to long; the last one holds whole rows."""
    return tuple(seq_len >> halvings for halvings in reversed(range(count)))


class StepRows(NamedTuple):
    """What a step takes."""

    rows: np.ndarray
    """Indices."""
    length: int
    """Tokens that each is padded to."""


class _Epoch(NamedTuple):
    """A pass over the rows."""

    bucket: np.ndarray
    """Of every step, ``[steps]``."""
    nth: np.ndarray
    """Which of its bucket's steps every step is, ``[steps]``."""
    rows: tuple[np.ndarray, ...]
    """For every bucket the rows of its steps, ``[steps of the bucket, rows]``."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The rows of every step: a shuffle per epoch, rows left over at its end dropped."""

    lengths: tuple[int, ...]
    """Of the buckets, from short to long."""
    bucket: np.ndarray
    """Of every row, the shortest that holds it; uint8 ``[rows]``."""
    batch: int
    """Rows of a step of the longest bucket."""
    seed: int

    @classmethod
    def of(cls, row_lengths: np.ndarray, lengths: tuple[int, ...], batch: int, seed: int) -> "Plan":
        """The plan for rows with so many tokens each, none longer than the last length."""
        bucket = np.searchsorted(lengths, row_lengths).astype(np.uint8)
        return cls(lengths, bucket, batch, seed)

    @functools.cached_property
    def per_epoch(self) -> int:
        """Steps in one pass over the data, which is the same for every pass."""
        steps = rest = 0
        for bucket, length in enumerate(self.lengths):
            whole, rest = divmod(rest + (self.bucket == bucket).sum(), self._rows_of(length))
            steps += int(whole)
        return steps

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, and the rows it has taken before a step."""
        epoch, within = divmod(step, self.per_epoch)
        before = _epoch(self, epoch).bucket[:within]
        return epoch, sum(self._rows_of(self.lengths[bucket]) for bucket in before)

    def __call__(self, step: int) -> StepRows:
        """What a step takes."""
        epoch, within = divmod(step, self.per_epoch)
        plan = _epoch(self, epoch)
        bucket = plan.bucket[within]
        return StepRows(plan.rows[bucket][plan.nth[within]], self.lengths[bucket])

    def _rows_of(self, length: int) -> int:
        return self.batch * (self.lengths[-1] // length)


@functools.lru_cache(maxsize=2)
def _epoch(plan: Plan, epoch: int) -> _Epoch:
    """The steps of an epoch.

    What is left of a bucket, too little for a step, goes to the next longer one: however many
    buckets there are, an epoch leaves out less than the rows of one step of the longest.
    """
    shuffled = np.random.default_rng((plan.seed, epoch)).permutation(len(plan.bucket))
    of_row, rest, taken = plan.bucket[shuffled], shuffled[:0], []
    for bucket, length in enumerate(plan.lengths):
        rows = np.concatenate([rest, shuffled[of_row == bucket]])
        size = plan._rows_of(length)
        whole = len(rows) // size * size
        taken.append(rows[:whole].reshape(-1, size))
        rest = rows[whole:]
    # Long and short steps are mixed, so that the end of an epoch is like its beginning.
    order = np.repeat(np.arange(len(taken)), [len(rows) for rows in taken])
    order = np.random.default_rng((plan.seed, epoch, 1)).permutation(order)
    nth = np.zeros(len(order), np.int64)
    for bucket in range(len(taken)):
        nth[order == bucket] = np.arange(len(taken[bucket]))
    return _Epoch(order, nth, tuple(taken))
