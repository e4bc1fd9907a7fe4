"""The chunks of a prompt: their size, what is known of them, and which a draft learns of."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from longspec_jax.axes import Array
from longspec_jax.decoding.cache import KVCache
from longspec_jax.drafters.base import Needs

SMALLEST_CHUNK = 128
"""Tokens of the smallest chunk of a prompt that is prefilled alone."""
NEXT_SMALLER = 4
"""By how much a chunk is smaller than that of the next size. Every size is a program, and a prompt
may fill no more than a quarter of its chunk."""


def chunk_sizes(largest: int) -> tuple[int, ...]:
    """Sizes of the chunks of prompts that are prefilled alone, ascending.

    Args:
      largest: tokens of a chunk of a long prompt.
    """
    sizes = [largest]
    while sizes[0] // NEXT_SMALLER >= SMALLEST_CHUNK:
        sizes.insert(0, sizes[0] // NEXT_SMALLER)
    return tuple(sizes)


def chunk_of(length: int, sizes: Sequence[int]) -> int:
    """Tokens of the chunks of a prompt: the smallest size that holds it, else the largest."""
    return next((size for size in sizes if size >= length), sizes[-1])


class KnownChunks(NamedTuple):
    """First chunks of a prompt whose keys and values need not be computed."""

    cache: KVCache | None = None
    """A batch of one row that holds the first :attr:`copied` chunks; DONATED. None without any."""
    copied: int = 0
    """Chunks in that cache."""
    moved: Sequence[KVCache] = ()
    """The chunks behind these, in the host's memory, as
    :func:`longspec_jax.decoding.copies.read_chunk` cut them out."""

    @property
    def total(self) -> int:
        """All known chunks."""
        return self.copied + len(self.moved)


NONE_KNOWN = KnownChunks()


class ChunkLaunch(NamedTuple):
    """A chunk that was launched."""

    tokens: int
    """Of the longest prompt, launched so far."""
    ready: Array
    """Ready when they have been run."""
    cache: KVCache
    """The cache behind it; donated by the next chunk."""
    logits: Float[Array, "B V"]
    """Behind the last token of the prompts that have ended so far."""
    logprobs: Int[Array, "B C m"] | None = None
    """Of the tokens that follow the chunk's, packed; None if they were not wanted."""


def most_reusable(needs: Needs, length: int, chunk: int) -> int:
    """First chunks of a prompt that need not be run where their keys and values are known.

    The last token's chunk is always run, for its logits. So are the chunks that a drafter needs
    features of; one that needs none learns of the others by their tokens. Features of first tokens
    alone take nothing from the others: their chunks are run again (:func:`run_again`).
    """
    most = (length - 1) // chunk
    if needs.hidden or needs.queries or needs.keys:
        recent = length if needs.recent is None else min(needs.recent, length)
        most = min(most, (length - recent) // chunk if recent else most)
    return most


def run_again(needs: Needs, chunk: int) -> int:
    """First chunks that a drafter needs features of: they are run whether they are known or not."""
    return -(-needs.first // chunk) if needs.hidden or needs.queries or needs.keys else 0


def concerns(needs: Needs, length: np.ndarray, offset: int, chunk: int) -> bool:
    """Whether a chunk of the prompts holds a token that the drafter's state depends on."""
    recent = length
    if needs.recent is not None and not needs.text:
        recent = np.minimum(length, needs.recent)
    last = (length - recent < offset + chunk) & (recent > 0)
    return bool(((length > offset) & (last | (offset < needs.first))).any())
