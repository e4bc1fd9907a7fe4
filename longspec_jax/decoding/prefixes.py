"""Prefix reuse: a prompt begins with the chunks that slots, or the host's memory, hold already.

Slots are the cache. A vacated slot keeps the chunks of its prompt until another prompt takes it,
and a live one shares them too. A prompt takes a copy, which costs about a hundredth of prefilling.
With bytes allowed in the host's memory, every whole chunk is copied there when it has been run, so
that nothing waits when a slot is overwritten. From there it comes back chunk by chunk.

Only whole chunks that were prefilled are reused, at one size of chunks: keys and values of decoded
tokens, or of chunks of another size, round differently. A chunk is named by a digest of its tokens
and of the name of the chunk before it. So a name stands for a whole prefix, and the names form the
radix tree of all prompts. Names begin with a salt: prompts of people who must not learn of each
other's have different ones, because a prompt that is found is faster, and is reported as found.

A target with windows or recurrent layers finds prefixes only in the host's memory. In a slot its
rings and states hold the end of the row, and soon no longer what was there at the end of a chunk.
"""

import hashlib
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree

from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.cache_transfer import copy_prefix, read_chunk
from longspec_jax.decoding.prefill import NONE_KNOWN, ChunkLaunch, KnownChunks, most_reusable
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.runner import ModelRunner
from longspec_jax.ops.placement import tree_bytes

MOST_MOVING = 2
"""Chunks that are on their way to the host at a time; each takes memory on the device."""
Names: TypeAlias = tuple[bytes, ...]
"""Of a prompt's whole chunks, the first one first."""


def chunk_names(tokens: np.ndarray, chunk: int, salt: str = "") -> Names:
    """The names of a prompt's whole chunks.

    Args:
      chunk: tokens of a chunk; prompts in chunks of another size share no name.
      salt: prompts with another one share no name either.
    """
    # Half of a surrogate pair has no UTF-8, and is another salt all the same.
    name, names = chunk.to_bytes(8, "little") + salt.encode("utf-8", "surrogatepass"), []
    whole = np.ascontiguousarray(tokens, np.int32)
    for start in range(0, len(whole) - chunk + 1, chunk):
        name = hashlib.sha256(name + whole[start : start + chunk].tobytes()).digest()
        names.append(name)
    return tuple(names)


def known_chunks(names: Sequence[bytes], known: Container[bytes]) -> int:
    """How many first chunks of a prompt are known, where all before a known one are known too."""
    return bisect_left(range(len(names)), True, key=lambda index: names[index] not in known)


class Match(NamedTuple):
    """What slots hold of a prompt."""

    chunks: int
    """First chunks of the prompt that one slot holds."""
    slot: int | None
    """That slot; None without any."""


class SlotPrefixes:
    """The prompts' chunks that slots hold, live ones and vacated ones alike."""

    def __init__(self, slots: int, holds: bool = True) -> None:
        """Hold nothing yet, or, unless it ``holds`` anything, for good."""
        self._holds = holds
        self._names: list[Names] = [()] * slots
        self._holders: defaultdict[bytes, set[int]] = defaultdict(set)
        self._used = [0] * slots
        self._clock = 0

    def names(self, slot: int) -> Names:
        """The chunks that a slot holds."""
        return self._names[slot]

    def put(self, slot: int, names: Names) -> None:
        """Note what a slot holds from now on; it held something else before."""
        for name in self._names[slot]:
            self._holders[name].discard(slot)
            if not self._holders[name]:
                del self._holders[name]
        names = names if self._holds else ()
        for name in names:
            self._holders[name].add(slot)
        self._names[slot] = names
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Note that a slot was used just now."""
        self._clock += 1
        self._used[slot] = self._clock

    def find(self, names: Names) -> Match:
        """The longest prefix of a prompt that a slot holds, in the slot that was used last."""
        count = known_chunks(names, self._holders)
        if not count:
            return Match(0, None)
        return Match(count, max(self._holders[names[count - 1]], key=self._used.__getitem__))

    def to_overwrite(self, vacant: Sequence[int], names: Names) -> int:
        """The vacant slot that a prompt takes.

        A slot with nothing to lose goes first: its chunks are the prompt's own, or other slots hold
        them too. Of the others it is the one that was used longest ago.

        Args:
          vacant: slots, at least one; of several with nothing to lose the first is taken.
        """
        for slot in vacant:
            # A slot that holds a chunk holds all chunks before it, so the last one tells.
            mine = self._names[slot]
            if not mine or mine[-1] in names or len(self._holders[mine[-1]]) > 1:
                return slot
        return min(vacant, key=self._used.__getitem__)


class HostChunks:
    """Chunks in the host's memory: as many bytes as allowed, the least recently used dropped."""

    def __init__(self, most: int) -> None:
        """Hold nothing."""
        self.most = most
        self.bytes = 0
        """Of all chunks that are held."""
        self._chunks: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        """Whether a chunk is held."""
        return name in self._chunks

    def put(self, name: bytes, chunk: PyTree, size: int) -> None:
        """Hold a chunk, if all bytes suffice for it."""
        self._drop(name)
        if size > self.most:
            return
        while self.bytes + size > self.most:
            self._drop(next(iter(self._chunks)))
        self._chunks[name] = chunk, size
        self.bytes += size

    def find(self, names: Sequence[bytes]) -> list[Any]:
        """The chunks of these names up to the first that is missing; used just now."""
        count = next((i for i, name in enumerate(names) if name not in self), len(names))
        # The first chunk is used last: without it, those after it are of no use.
        for name in reversed(names[:count]):
            self._chunks.move_to_end(name)
        return [self._chunks[name][0] for name in names[:count]]

    def _drop(self, name: bytes) -> None:
        _, size = self._chunks.pop(name, (None, 0))
        self.bytes -= size


class PrefixCache:
    """What is known of prompts, and the programs that move it."""

    def __init__(self, runner: ModelRunner, host_bytes: int = 0) -> None:
        """Know nothing yet.

        Args:
          runner: of the engine whose slots and chunks these are.
          host_bytes: most bytes of chunks in the host's memory.
        """
        # Layers that keep only the end of a row hold no beginning.
        self._count, self._holds = runner.slots, not runner.target.has_bounded_layers
        self.slots = SlotPrefixes(self._count, holds=self._holds)
        self.host = HostChunks(host_bytes)
        self.queried = 0
        """Tokens of all prompts that were looked up."""
        self.found = 0
        """How many of them were known."""
        self._needs = runner.drafter.needs
        self._batch, self._row = runner.shardings, runner.row_shardings
        self._moving: deque[tuple[Names, Future[KVCache]]] = deque()
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="chunk-mover")

    def reusable(self, names: Names, length: int, chunk: int) -> Names:
        """The chunks of a prompt that need not run if a slot has them."""
        return names[: most_reusable(self._needs, length, chunk)]

    def count(self, reusable: Names) -> int:
        """How many of these first chunks are known."""
        held = self.slots.find(reusable).chunks
        missing = (i for i, name in enumerate(reusable[held:], held) if name not in self.host)
        return next(missing, len(reusable))

    def take(self, reusable: Names, length: int, chunk: int, rows: Rows | None) -> KnownChunks:
        """The known chunks of a prompt that is about to be prefilled, copied out of its slot.

        Args:
          reusable: as in :meth:`reusable`.
          rows: of the slots; None before the first prompt.
        """
        self.collect()
        held = self.slots.find(reusable)
        moved = tuple(self.host.find(reusable[held.chunks :]))
        self.queried += length
        self.found += (held.chunks + len(moved)) * chunk
        if held.slot is None or rows is None:
            return KnownChunks(moved=moved) if moved else NONE_KNOWN
        self.slots.touch(held.slot)
        at, tokens = np.int32(held.slot), np.int32(held.chunks * chunk)
        copy = copy_prefix(self._batch, self._row, rows.cache, at, tokens)
        return KnownChunks(copy, held.chunks, moved)

    def keep(self, names: Names, chunk: int, launched: ChunkLaunch) -> None:
        """Have a chunk that was launched copied to the host, if it is whole and not there."""
        index, rest = divmod(launched.tokens, chunk)
        if not self.host.most or rest or names[index - 1] in self.host:
            return
        while len(self._moving) >= MOST_MOVING:
            self._collect_one()
        offset = np.int32(launched.tokens - chunk)
        part = read_chunk(self._row, chunk, launched.cache, offset)
        self._moving.append((names[:index], self._mover.submit(_to_host, part)))

    def collect(self, *, wait: bool = False) -> None:
        """Take in the chunks that have arrived in the host's memory, or all if it may wait."""
        while self._moving and (wait or self._moving[0][1].done()):
            self._collect_one()

    def forget_slots(self) -> None:
        """Forget what slots hold; what is in the host's memory stays."""
        self.slots = SlotPrefixes(self._count, holds=self._holds)
        # What is on its way may never arrive.
        self._moving.clear()

    def forget(self) -> None:
        """Forget everything, the counts too."""
        self.forget_slots()
        self.host = HostChunks(self.host.most)
        self.queried = self.found = 0

    def close(self) -> None:
        """End the thread and forget everything."""
        self._mover.shutdown(wait=False, cancel_futures=True)
        self.forget()

    def _collect_one(self) -> None:
        names, arriving = self._moving.popleft()
        chunk = arriving.result()
        self.host.put(names[-1], chunk, tree_bytes(chunk))
        self.host.find(names)  # The chunks before it were used just now, too.


def _to_host(chunk: KVCache) -> Any:
    # Waiting here lets other threads run; converting an unfinished array may not. Copies, because
    # on a CPU the arrays would share their memory with those of the device.
    return jax.tree.map(np.array, jax.block_until_ready(chunk))
