"""Draft vocabularies: the tokens that a draft may propose, the most frequent ones.

The draft reads the target's LM head at every level of every tree. With a vocabulary of a hundred
thousand tokens this is most of its time, and most of the tokens are hardly ever right. Verification
covers the whole vocabulary: a token that is left out is drawn all the same, one round later.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int


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


def check_vocabulary(tokens: Any, vocab_size: int) -> Int[np.ndarray, " v"]:
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
