"""Rows, their order, and their way to the devices.

A row source is anything with a length and ``[i]`` that gives ``(tokens[T], weights[T])``. The batch
of a step is a pure function of (seed, step), as :mod:`.buckets` plans it: no iterator state exists,
so a resumed run reads the very rows the uninterrupted one would have read, and prefetching cannot
disturb it.
"""

import functools
import os
import queue
import tempfile
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from longspec_jax import files

from ..step import Batch
from .buckets import Plan, bucket_lengths


class Row(NamedTuple):
    """A row of a batch."""

    tokens: np.ndarray
    """``[T]`` int32."""
    weights: np.ndarray
    """``[T]`` float32; 0 where a token is not learned."""
    length: int
    """Tokens in front of the padding."""


class Rows(Protocol):
    """A random-access source of rows of one length."""

    @property
    def seq_len(self) -> int: ...  # noqa: D102

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> Row: ...  # noqa: D105

    def lengths(self) -> np.ndarray:
        """Tokens in front of the padding of every row, ``[rows]``."""
        ...


@dataclass(frozen=True, eq=False)
class Spans:
    """Weights of a long run of tokens, where neighbours mostly have the same."""

    ends: np.ndarray
    """Tokens up to the end of every span."""
    weights: np.ndarray
    """Of every span's tokens, float32."""

    def between(self, start: int, stop: int) -> np.ndarray:
        """The weights of the tokens from one place to another."""
        first, last = np.searchsorted(self.ends, (start, stop - 1), "right")
        ends = np.clip(self.ends[first : last + 1], start, stop)
        return np.repeat(self.weights[first : last + 1], np.diff(ends, prepend=start))


@dataclass(frozen=True)
class PackedRows:
    """Rows cut from one long run of tokens, documents one after another.

    Neighbouring documents of the run share a row, so their order decides what a long row contains.
    """

    tokens: np.ndarray
    """All tokens, usually memory-mapped."""
    seq_len: int
    spans: Spans | None = None
    """Their weights; all are learned if absent."""
    begin: int | None = None
    """A token in front of every row, of which the run then gives one less. It is never
    predicted."""

    def __len__(self) -> int:
        """Whole rows."""
        return len(self.tokens) // self._cut

    def __getitem__(self, index: int) -> Row:
        """The row at an index."""
        start = index * self._cut
        stop = start + self._cut
        row = np.asarray(self.tokens[start:stop], np.int32)
        weights = None if self.spans is None else self.spans.between(start, stop)
        if self.begin is not None:
            row = np.insert(row, 0, self.begin)
            weights = None if weights is None else np.insert(weights, 0, 0.0)
        return full_row(row) if weights is None else Row(row, weights, self.seq_len)

    @property
    def _cut(self) -> int:
        """Tokens of a row that the run gives."""
        return self.seq_len - (self.begin is not None)

    def lengths(self) -> np.ndarray:
        """Tokens of every row; none is padding."""
        return np.full(len(self), self.seq_len)


@dataclass(frozen=True)
class SyntheticRows:
    """Random tokens, for trying a set-up without data."""

    count: int
    seq_len: int
    vocab_size: int

    def __len__(self) -> int:
        """Rows there are."""
        return self.count

    def __getitem__(self, index: int) -> Row:
        """The row at an index."""
        tokens = np.random.default_rng(index).integers(0, self.vocab_size, self.seq_len)
        return full_row(tokens.astype(np.int32))

    def lengths(self) -> np.ndarray:
        """Tokens of every row; none is padding."""
        return np.full(len(self), self.seq_len)


def full_row(tokens: np.ndarray) -> Row:
    """A row that is learned whole."""
    return Row(tokens, np.ones(len(tokens), np.float32), len(tokens))


@dataclass(frozen=True)
class Selection:
    """Some of another source's rows."""

    rows: Rows
    chosen: np.ndarray
    """Their indices."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.rows.seq_len

    def __len__(self) -> int:
        """Rows that are chosen."""
        return len(self.chosen)

    def __getitem__(self, index: int) -> Row:
        """The row at an index of the selection."""
        return self.rows[int(self.chosen[index])]

    def lengths(self) -> np.ndarray:
        """Tokens in front of the padding of every row."""
        return self.rows.lengths()[self.chosen]


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

    def __post_init__(self) -> None:
        if self.per_epoch == 0:
            raise ValueError(
                f"the data gives {len(self.rows)} rows, a step needs {self.batch}: give more data, "
                "or a smaller batch or seq_len"
            )

    @functools.cached_property
    def plan(self) -> Plan:
        """Which rows a step takes."""
        longest = self.rows.seq_len
        lengths = self.rows.lengths() if self.buckets > 1 else np.full(len(self.rows), longest)
        return Plan.of(lengths, bucket_lengths(longest, self.buckets), self.batch, self.seed)

    @property
    def per_epoch(self) -> int:
        """Steps in one pass over the data."""
        return self.plan.per_epoch

    def position(self, step: int) -> tuple[int, int]:
        """Epoch, and index of the next row in its order: where a run at this step stands."""
        return self.plan.position(step)

    def shape(self, step: int) -> tuple[int, int, int]:
        """Of a step's batch, ``[A, B, T]``."""
        rows, length = self.plan(step)
        return self.accumulation, len(rows) // self.accumulation, length

    def __call__(self, step: int, share: slice = slice(None)) -> Batch:
        """The batch of a step; ``share`` picks one process's columns of every micro-batch."""
        return self.counted(step, share)[0]

    def counted(self, step: int, share: slice = slice(None)) -> tuple[Batch, int]:
        """The batch of a step, and how many of its tokens are no padding."""
        chosen, length = self.plan(step)
        order = chosen.reshape(self.accumulation, -1)[:, share]
        rows = _readers().map(self.rows.__getitem__, order.ravel().tolist())
        tokens, weights, lengths = zip(*rows, strict=True)
        shape = (*order.shape, length)

        def together(parts: tuple[np.ndarray, ...]) -> np.ndarray:
            return np.stack([part[:length] for part in parts]).reshape(shape)

        return Batch(together(tokens), together(weights)), sum(lengths)


@functools.cache
def _readers() -> ThreadPoolExecutor:
    """Threads that read rows: a tokenizer, which most of the time goes to, lets others run."""
    return ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1)), thread_name_prefix="rows")


class Prefetched(Iterator[Batch]):
    """Batches that a thread makes ahead, and what is known of the one taken last."""

    real_tokens = 0
    """Tokens of the batch taken last that are no padding, masked ones among them. Of several
    processes each knows its own rows, and takes the others to be like them."""

    def __init__(self, ahead: Generator[tuple[Batch, int], None, None]):
        self._ahead = ahead

    def __next__(self) -> Batch:
        """The batch of the next step."""
        batch, self.real_tokens = next(self._ahead)
        return batch

    def close(self) -> None:
        """End the thread."""
        self._ahead.close()


def prefetch(batches: Batches, first: int, sharding: NamedSharding, depth: int = 2) -> Prefetched:
    """Batches from a step on, as sharded device arrays, made ahead by a thread."""
    return Prefetched(_ahead(batches, first, sharding, depth))


def _ahead(
    batches: Batches, first: int, sharding: NamedSharding, depth: int
) -> Generator[tuple[Batch, int], None, None]:
    """What a thread makes ahead."""
    ready: queue.Queue[tuple[Batch, int] | BaseException] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: tuple[Batch, int] | BaseException) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        step = first
        try:
            while not stopped.is_set():
                put(to_devices(batches, step, sharding))
                step += 1
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()


def to_devices(batches: Batches, step: int, sharding: NamedSharding) -> tuple[Batch, int]:
    """A step's batch, and its tokens that are no padding.

    Every process makes the columns of its own devices only, and counts as if all were like them.
    """
    shape = batches.shape(step)
    indices = sharding.addressable_devices_indices_map(shape).values()
    spans = [index[1].indices(shape[1]) for index in indices if index is not None]
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    own, real = batches.counted(step, slice(first, last))

    def place(part: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "every device of a batch's sharding holds a part"
            start, stop, _ = index[1].indices(shape[1])
            return part[:, start - first : stop - first]

        return jax.make_array_from_callback(shape, sharding, shard)

    return Batch(place(own.tokens), place(own.weights)), real * shape[1] // (last - first)


def read_tokens(path: Path) -> np.ndarray:
    """A memory-mapped token file, as :func:`write_tokens` makes it."""
    return np.load(path, mmap_mode="r")


def write_tokens(path: Path, parts: Iterator[np.ndarray], vocab_size: int) -> int:
    """Write token arrays one after another in the narrowest type; returns how many there are.

    The length is known only at the end, so that the parts go to a raw file first and are then
    copied behind a NumPy header; a reader never sees a half-written file.
    """
    kind = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    total = 0
    with tempfile.TemporaryFile(dir=path.parent) as raw:
        for part in parts:
            raw.write(part.astype(kind).tobytes())
            total += len(part)
        raw.flush()
        with files.replacing(path) as unfinished:
            if total:
                final = np.lib.format.open_memmap(unfinished, "w+", kind, (total,))
                final[:] = np.memmap(raw, dtype=kind, mode="r")
                final.flush()
            else:
                with unfinished.open("wb") as empty:
                    np.save(empty, np.zeros((0,), kind))
    return total
