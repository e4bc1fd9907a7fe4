"""Which prompts' chunks are known, by their tokens: in slots, and in the host's memory.

Only whole chunks that were prefilled are reused, at one size of chunks: keys and values of decoded
tokens, or of chunks of another size, round differently. A chunk is named by a digest of its tokens
and of the name of the chunk before it. So a name stands for a whole prefix, and the names form the
radix tree of all prompts.

No arrays are computed here.
"""

import hashlib
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Names: TypeAlias = tuple[bytes, ...]
"""Of a prompt's whole chunks, the first one first."""


def chunk_names(tokens: np.ndarray, chunk: int) -> Names:
    """The names of a prompt's whole chunks.

    Args:
      tokens: ``[P]``.
      chunk: tokens of a chunk; prompts in chunks of another size share no name.
    """
    name, names = chunk.to_bytes(8, "little"), []
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

    def __init__(self, slots: int) -> None:
        """Hold nothing.

        Args:
          slots: how many there are.
        """
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
          names: the prompt's chunks.
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
        """Hold nothing.

        Args:
          most: bytes of all chunks together.
        """
        self.most = most
        self.bytes = 0
        """Of all chunks that are held."""
        self._chunks: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        """Whether a chunk is held."""
        return name in self._chunks

    def put(self, name: bytes, chunk: Any, size: int) -> None:
        """Hold a chunk, if all bytes suffice for it.

        Args:
          name: of the chunk.
          chunk: its keys and values.
          size: their bytes.
        """
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
        # The first chunk is used last: without it, those behind it are of no use.
        for name in reversed(names[:count]):
            self._chunks.move_to_end(name)
        return [self._chunks[name][0] for name in names[:count]]

    def _drop(self, name: bytes) -> None:
        _, size = self._chunks.pop(name, (None, 0))
        self.bytes -= size
