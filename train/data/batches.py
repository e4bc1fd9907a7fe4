"""The batches of a stage: which rows a step takes, how long they are, and their way to the devices.

Rows that are not packed have the length of their documents, most of which are far shorter than the
longest. They are sorted into buckets of few lengths, each half of the next, and a step takes rows
of one bucket: a program is compiled for every length, and little more is computed than is there. A
step of a shorter bucket takes as many more rows, so that every step has the same number of places
for tokens, and about the same memory.

The batch of a step is a pure function of the seed, the step and the rows' lengths. No iterator
state exists: every process makes the same plan, a resumed run reads the very rows the uninterrupted
one would have read, and prefetching cannot disturb it.
"""

import functools
import itertools
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..features import Features
from ..step import Batch
from .rows import Rows


def bucket_lengths(seq_len: int, count: int) -> tuple[int, ...]:
    """Lengths of a number of buckets, from short to long; the last one holds whole rows."""
    return tuple(seq_len >> halvings for halvings in reversed(range(count)))


class StepRows(NamedTuple):
    """What a step takes."""

    rows: np.ndarray
    """Indices."""
    length: int
    """Tokens that each is padded to."""


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The rows of every step: a shuffle per epoch, rows left over at its end dropped."""

    lengths: tuple[int, ...]
    """Of the buckets, from short to long."""
    bucket: np.ndarray
    """Of every row, the shortest that holds it; uint8 ``[rows]``."""
    batch: int
    """Rows of a step of the longest bucket."""
    seed: int

    @classmethod
    def of(
        cls, row_lengths: np.ndarray, lengths: tuple[int, ...], batch: int, seed: int
    ) -> "BatchPlan":
        """The plan for rows of these lengths, none longer than the last bucket's."""
        bucket = np.searchsorted(lengths, row_lengths).astype(np.uint8)
        return cls(lengths, bucket, batch, seed)

    @functools.cached_property
    def per_epoch(self) -> int:
        """Steps in one pass over the data, which is the same for every pass."""
        return len(_epoch(self, 0))

    def __call__(self, step: int) -> StepRows:
        """What a step takes."""
        epoch, within = divmod(step, self.per_epoch)
        return _epoch(self, epoch)[within]


@functools.lru_cache(maxsize=2)
def _epoch(plan: BatchPlan, epoch: int) -> list[StepRows]:
    """The steps of an epoch.

    What is left of a bucket, too little for a step, goes to the next longer one: however many
    buckets there are, an epoch leaves out less than the rows of one step of the longest.
    """
    shuffled = np.random.default_rng((plan.seed, epoch)).permutation(len(plan.bucket))
    of_row, rest = plan.bucket[shuffled], shuffled[:0]
    steps, counts = [], []
    for bucket, length in enumerate(plan.lengths):
        rows = np.concatenate([rest, shuffled[of_row == bucket]])
        size = plan.batch * (plan.lengths[-1] // length)
        whole = len(rows) // size * size
        steps.append(iter(rows[:whole].reshape(-1, size)))
        rest = rows[whole:]
        counts.append(whole // size)
    # Long and short steps are mixed, so that the end of an epoch is like its beginning.
    order = np.random.default_rng((plan.seed, epoch, 1)).permutation(
        np.repeat(np.arange(len(counts)), counts)
    )
    return [StepRows(next(steps[bucket]), plan.lengths[bucket]) for bucket in order]


@dataclass(frozen=True)
class Batches:
    """The batches of a stage, by step."""

    rows: Rows
    batch: int
    """Rows of a step; of shorter buckets as many more."""
    accumulation: int
    seed: int
    buckets: int = 1
    """Lengths that rows are padded to; with one, that of the rows."""
    features: Features | None = None
    """What was stored of the rows; nothing if absent."""

    def __post_init__(self) -> None:
        if self.per_epoch == 0:
            raise ValueError(
                f"the data gives {len(self.rows)} rows, a step needs {self.batch}: give more data, "
                "or a smaller batch or seq_len"
            )

    @functools.cached_property
    def plan(self) -> BatchPlan:
        """Which rows a step takes."""
        longest, lengths = self.rows.seq_len, self._lengths
        lengths = np.full(len(self.rows), longest) if lengths is None else lengths
        return BatchPlan.of(lengths, bucket_lengths(longest, self.buckets), self.batch, self.seed)

    @functools.cached_property
    def _lengths(self) -> np.ndarray | None:
        """Tokens of every row without padding, where the plan needs them."""
        return self.rows.lengths() if self.buckets > 1 else None

    def real(self, step: int) -> int | None:
        """Tokens of a step that are not padding; None where the rows would have to be read."""
        return None if self._lengths is None else int(self._lengths[self.plan(step).rows].sum())

    @property
    def per_epoch(self) -> int:
        """Steps in one pass over the data."""
        return self.plan.per_epoch

    def shape(self, step: int) -> tuple[int, int, int]:
        """Shape of a step's batch, ``[A, B, T]``."""
        rows, length = self.plan(step)
        return self.accumulation, len(rows) // self.accumulation, length

    def __call__(self, step: int, share: slice = slice(None)) -> Batch:
        """The batch of a step; ``share`` picks one process's columns of every micro-batch."""
        return self.counted(step, share)[0]

    def counted(self, step: int, share: slice = slice(None)) -> tuple[Batch, int]:
        """The batch of a step, and how many of its tokens are not padding."""
        chosen, length = self.plan(step)
        order = chosen.reshape(self.accumulation, -1)[:, share]
        rows = (self.rows[index] for index in order.ravel().tolist())
        tokens, weights, lengths = zip(*rows, strict=True)
        shape = (*order.shape, length)

        def together(parts: tuple[np.ndarray, ...]) -> np.ndarray:
            return np.stack([part[:length] for part in parts]).reshape(shape)

        view = None
        if self.features is not None:
            stored = self.features.read(order.ravel().tolist(), length)
            view = {name: part.reshape(*shape, *part.shape[2:]) for name, part in stored.items()}
        return Batch(together(tokens), together(weights), view), sum(lengths)


def prefetch(
    batches: Batches, first: int, sharding: NamedSharding, depth: int = 2
) -> Generator[tuple[Batch, int], None, None]:
    """What :func:`to_devices` gives of the steps from one on, made ahead by a thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        ready: deque[Future[tuple[Batch, int]]] = deque()
        try:
            for step in itertools.count(first):
                ready.append(thread.submit(to_devices, batches, step, sharding))
                if len(ready) > depth:
                    yield ready.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


def to_devices(batches: Batches, step: int, sharding: NamedSharding) -> tuple[Batch, int]:
    """A step's batch as sharded device arrays, and its tokens that are not padding.

    Masked tokens count. Every process makes the columns of its own devices only. Where the lengths
    of all rows are not known, it counts as if all were like its own.
    """
    shape = batches.shape(step)
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = [index[1].indices(shape[1]) for index in indices if index is not None]
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    own, counted = batches.counted(step, slice(first, last))
    real = batches.real(step)
    real = counted * shape[1] // (last - first) if real is None else real

    def place(part: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "every device of a batch's sharding holds a part"
            start, stop, _ = index[1].indices(shape[1])
            return part[:, start - first : stop - first]

        return jax.make_array_from_callback((*shape, *part.shape[3:]), sharding, shard)

    return jax.tree.map(place, own), real
