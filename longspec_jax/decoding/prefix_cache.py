"""Prefix reuse: a prompt begins with the chunks that slots, or the host's memory, hold already.

Slots are the cache. A vacated slot keeps the chunks of its prompt until another prompt takes it,
and a live one shares them too. A prompt takes a copy, which costs about a hundredth of prefilling.

With bytes allowed in the host's memory, every whole chunk is copied there when it has been run, so
that nothing waits when a slot is overwritten. From there it comes back chunk by chunk.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from longspec_jax.decoding.cache import KVCache
from longspec_jax.decoding.chunks import NONE_KNOWN, ChunkLaunch, KnownChunks, most_reusable
from longspec_jax.decoding.copies import copy_prefix, read_chunk
from longspec_jax.decoding.prefixes import HostChunks, Names, SlotPrefixes
from longspec_jax.decoding.rows import Rows, RowShardings
from longspec_jax.drafters.base import Needs, Params
from longspec_jax.ops.placement import tree_bytes

MOST_MOVING = 2
"""Chunks that are on their way to the host at a time; each takes memory on the device."""


class PrefixCache:
    """What is known of prompts, and the programs that move it."""

    def __init__(self, params: Params, needs: Needs, slots: int, host_bytes: int = 0) -> None:
        """Know nothing yet.

        Args:
          params: of both models; they say where arrays lie.
          needs: the drafter's.
          slots: of the engine.
          host_bytes: most bytes of chunks in the host's memory.
        """
        self.slots = SlotPrefixes(slots)
        self.host = HostChunks(host_bytes)
        self.queried = 0
        """Tokens of all prompts that were looked up."""
        self.found = 0
        """How many of them were known."""
        self._needs, self._count = needs, slots
        self._batch = RowShardings.beside(params.target, slots)
        self._row = RowShardings.beside(params.target, 1)
        self._moving: deque[tuple[Names, Future[KVCache]]] = deque()
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="chunk-mover")

    def reusable(self, names: Names, length: int, chunk: int) -> Names:
        """Those of a prompt's chunks that need not be run where they are known."""
        return names[: most_reusable(self._needs, length, chunk)]

    def count(self, reusable: Names) -> int:
        """How many of these first chunks are known."""
        held = self.slots.find(reusable).chunks
        missing = (i for i, name in enumerate(reusable[held:], held) if name not in self.host)
        return next(missing, len(reusable))

    def take(self, reusable: Names, length: int, chunk: int, rows: Rows | None) -> KnownChunks:
        """The known chunks of a prompt that is about to be prefilled, copied out of its slot.

        Args:
          reusable: as of :meth:`reusable`.
          length: tokens of the prompt.
          chunk: tokens of a chunk.
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
        self.slots = SlotPrefixes(self._count)
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
