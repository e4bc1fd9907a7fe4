"""Draft vocabularies: the tokens that a draft may propose, the most frequent ones.

The draft reads the target's LM head at every level of every tree. With a vocabulary of a hundred
thousand tokens this is most of its time, and most of the tokens are hardly ever right. Verification
covers the whole vocabulary: a token that is left out is drawn all the same, one round later.

Two sources need no corpus. A tokenizer that merges pairs has learned the frequent ones first
(:func:`first_merged`). And a text repeats its own rare words: the tokens of each row join the
list, but only in that row (:class:`OwnTokens`).
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Int

from longspec_jax.axes import Array, Leaf
from longspec_jax.checks import Tokenizer
from longspec_jax.drafters.base import Committed

OWN_TOKENS = 512
"""Occurrences of tokens that every row lists for itself. Of 4,000 tokens of code or prose 20 to 50
different ones are not among the 65,536 that Llama 3 or Qwen2.5 merged first."""


def most_frequent(
    counts: Int[np.ndarray, " V"], size: int | None = None, always: Sequence[int] = ()
) -> Int[np.ndarray, " v"]:
    """Tokens in the order of their worth: those to keep always, then the most frequent first.

    A shorter vocabulary is the beginning of a longer one.

    Args:
      counts: how often every token of the vocabulary occurs in a corpus. Ties go to the lower id,
        which a merging tokenizer learned earlier: the more frequent one of tokens not seen.
      size: tokens to keep; the whole vocabulary, in order, if absent.
      always: tokens to keep whatever their counts: the special and the stop tokens, which a corpus
        of plain text does not show.

    Raises:
      ValueError: if the size is out of range, or a token to keep is.
    """
    vocab_size = len(counts)
    size = vocab_size if size is None else size
    always = sorted(set(always))
    if always:
        check_vocabulary(always, vocab_size)
    if not max(1, len(always)) <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} tokens is out of range: it holds the {len(always)} "
            f"tokens to keep always and at most all {vocab_size} of the target"
        )
    order = np.argsort(-np.asarray(counts, np.int64), kind="stable")
    rest = order[~np.isin(order, always)]
    return np.concatenate([np.asarray(always, np.int32), rest.astype(np.int32)])[:size]


def check_vocabulary(tokens: object, vocab_size: int) -> Int[np.ndarray, " v"]:
    """A draft vocabulary as int32; raises unless it is a list of different tokens of the target."""
    array = np.asarray(tokens)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"a draft vocabulary is a list of token ids, got shape {array.shape} of {array.dtype}"
        )
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"the draft vocabulary holds token {outside[0]}, outside the target's {vocab_size} "
            "tokens; make it with the tokenizer of this target"
        )
    distinct, times = np.unique(array, return_counts=True)
    if distinct.size < array.size:
        raise ValueError(
            f"the draft vocabulary holds token {distinct[times > 1][0]} {times.max()} times; each "
            "token is proposed once: leave out repetitions"
        )
    return array.astype(np.int32)


def first_merged(tokenizer: Tokenizer, size: int) -> Int[np.ndarray, " v"] | None:
    """The tokens that a merging tokenizer learned first, with all that it did not merge.

    Those are its letters or bytes, and the special tokens.

    Args:
      tokenizer: of transformers.
      size: how many tokens.

    Returns:
      Their ids in ascending order; None where the tokenizer does not say what it merged, or has
      fewer tokens, or half of them would be none that it merged.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or len(tokenizer) < size:
        return None
    model = json.loads(backend.to_str())["model"]
    if model["type"] != "BPE":
        return None
    ids, merged = model["vocab"], {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
        token = ids.get(left + right)
        if token is not None:
            merged.setdefault(token, rank)
    others = sorted(set(range(len(tokenizer))) - set(merged))
    if not 0 < 2 * len(others) <= size:
        return None
    first = [*others, *merged][:size]  # Merges are in the order of their ranks.
    return np.sort(np.asarray(first, np.int32))


@struct.dataclass
class OwnTokens:
    """A ring of each row's latest tokens that the draft vocabulary lacks."""

    tokens: Leaf[Int[Array, "B X"]]
    """The latest occurrences; a token may be there several times."""
    count: Leaf[Int[Array, " B"]]
    """Occurrences so far."""

    @classmethod
    def begin(cls, batch: int) -> "OwnTokens":
        """A row's own tokens: none yet."""
        return cls(jnp.zeros((batch, OWN_TOKENS), jnp.int32), jnp.zeros(batch, jnp.int32))

    def extended(self, committed: Committed, listed: Bool[Array, " V"]) -> "OwnTokens":
        """With those of more tokens that are not listed.

        Args:
          committed: the tokens.
          listed: which tokens of the target are in the draft vocabulary.
        """
        tokens, slots = committed.tokens, self.tokens.shape[1]
        new = (jnp.arange(tokens.shape[1]) < committed.count[:, None]) & ~jnp.take(listed, tokens)
        before = jnp.cumsum(new, axis=1, dtype=jnp.int32) - new
        found = new.sum(axis=1, dtype=jnp.int32)
        # Of more than the ring holds, the last ones; the others go to a slot that does not exist.
        kept = new & (before >= found[:, None] - slots)
        at = jnp.where(kept, (self.count[:, None] + before) % slots, slots)
        write = jax.vmap(lambda ring, slot, fresh: ring.at[slot].set(fresh, mode="drop"))
        return replace(self, tokens=write(self.tokens, at, tokens), count=self.count + found)

    def distinct(self) -> Bool[Array, "B X"]:
        """Slots whose token no earlier slot holds."""
        place = jnp.arange(self.tokens.shape[1])
        there = place < self.count[:, None]
        same = self.tokens[:, :, None] == self.tokens[:, None]
        return there & ~(same & (place < place[:, None])).any(axis=2)
