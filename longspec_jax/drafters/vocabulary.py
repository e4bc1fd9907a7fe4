"""A reduced draft vocabulary: the tokens that a draft may propose, the most frequent ones.

The draft reads the target's LM head at every level of every tree. With a vocabulary of a hundred
thousand tokens this is most of its time, and most of the tokens are hardly ever right. Verification
covers the whole vocabulary: a token that is left out is drawn all the same, one round later.

The table of tokens is a file of its own beside the draft's weights, so any draft can get one later.
Tokens are stored by frequency, so that one table serves every smaller vocabulary.

Trainers of drafts over the target's features store the tokens among the weights instead: ``d2t``
holds what to add to each of the draft's ids.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from longspec_jax.drafters.tables import NOT_WHOLE, Sizes
from longspec_jax.weights.checkpoint import Tensor, Tensors
from longspec_jax.weights.hub import local_folder

FILE = "draft_vocabulary.safetensors"
TENSOR = "tokens"
"""``[v]`` int32 token ids, the most useful first."""
HOW = "longspec-vocabulary --help (python -m train.vocabulary --help) says how to make one"
OFFSETS, MEMBERS = "d2t", "t2d"
"""What to add to each of the draft's ids, and which of the target's tokens it knows."""
DROPPED = {
    r"verifier_(norm|lm_head)\.weight": "the target has its own",
    MEMBERS: "it follows from d2t, with which it is compared",
}
"""Tensors that no draft over the target's features needs."""
_PREFIX = "model."
"""Stands before all names in some files."""


def save_draft_vocabulary(folder: str | Path, tokens: Any, vocab_size: int) -> Path:
    """Save a table beside a draft's weights, replacing the one that may be there.

    Args:
      folder: the draft's; made if absent.
      tokens: ids of the tokens that may be proposed, the most useful first.
      vocab_size: width of the target's logits; recorded, so that another target's table is refused.

    Returns:
      The file.
    """
    table = check_vocabulary(tokens, vocab_size)
    file = Path(folder).expanduser() / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({TENSOR: table}, file, metadata={"vocab_size": str(vocab_size)})
    return file


def load_draft_vocabulary(
    source: str | Path, vocab_size: int, size: int, *, revision: str | None = None
) -> Int[np.ndarray, " v"]:
    """The first tokens of the table beside a draft.

    Args:
      source: the draft's folder or hub id.
      size: tokens to use; at most as many as the table holds.
      revision: branch, tag or commit of a hub id.

    Raises:
      FileNotFoundError: if the draft comes without a table.
      ValueError: if the table is damaged, belongs to another vocabulary, or is too short.
    """
    file = local_folder(source, revision) / FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{source} comes without {FILE}, the table of its most frequent tokens; {HOW}, or "
            "leave out the option vocabulary to propose from all tokens"
        )
    tokens, made_for = _read(file)
    if made_for != vocab_size:
        raise ValueError(
            f"{file} was made for a vocabulary of {made_for} tokens, the target has {vocab_size}; "
            f"make it with the tokenizer of this target ({HOW})"
        )
    try:
        tokens = check_vocabulary(tokens, vocab_size)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not 1 <= size <= len(tokens):
        raise ValueError(
            f"vocabulary={size} must be 1 to {len(tokens)}, the tokens that {file} holds; "
            f"choose fewer, or make a larger table ({HOW})"
        )
    return tokens[:size]


def _read(file: Path) -> tuple[np.ndarray, int]:
    """Tokens and the vocabulary they belong to, as stored."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return opened.get_tensor(TENSOR), int((opened.metadata() or {})["vocab_size"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{file} is not a table of draft tokens ({error}); make it again ({HOW})"
        ) from error


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


def vocabulary_of(tensors: Tensors, draft: Sizes) -> np.ndarray | None:
    """The target's tokens that the draft knows, taken out of its tensors; None for all of them.

    ``d2t`` holds offsets: the target's id is the draft's plus the offset at it.
    """
    offsets, members = tensors.pop(OFFSETS, None), tensors.get(MEMBERS)
    if offsets is None:
        if draft.proposable != draft.vocab_size:
            raise ValueError(
                f"the draft knows {draft.proposable} of {draft.vocab_size} tokens, and d2t, "
                f"which says which, is not among its tensors; {NOT_WHOLE}"
            )
        return None
    if offsets.shape != (draft.proposable,):
        raise ValueError(
            f"d2t {offsets.shape} must have draft_vocab_size={draft.proposable} numbers; use the "
            "config.json that was saved with the weights"
        )
    tokens = check_vocabulary(np.arange(draft.proposable) + _whole(offsets), draft.vocab_size)
    if members is not None:
        listed = np.flatnonzero(_whole(members))
        if members.shape != (draft.vocab_size,) or not np.array_equal(np.sort(tokens), listed):
            raise ValueError(
                f"d2t names {len(tokens)} tokens and t2d {members.shape} marks {len(listed)}, and "
                f"they must be the same ones of the target's {draft.vocab_size}; {NOT_WHOLE}"
            )
    same = len(tokens) == draft.vocab_size and bool((tokens == np.arange(len(tokens))).all())
    return None if same else tokens


def vocabulary_tensors(vocabulary: Any, vocab_size: int) -> dict[str, np.ndarray]:
    """The inverse of :func:`vocabulary_of`: ``d2t`` and ``t2d``; none for all tokens."""
    if vocabulary is None:
        return {}
    tokens = np.asarray(vocabulary, np.int64)
    offsets = tokens - np.arange(len(tokens))
    return {OFFSETS: offsets, MEMBERS: np.isin(np.arange(vocab_size), tokens)}


def _whole(tensor: Tensor) -> np.ndarray:
    """A small tensor of whole numbers."""
    if len(tensor.shape) != 1:
        raise ValueError(f"d2t and t2d must be lists, got {tensor.shape}; {NOT_WHOLE}")
    return tensor.read((slice(None),))


def without_prefix(tensors: Tensors) -> Tensors:
    """The tensors under their usual names, where all carry a prefix."""
    named: Mapping[str, Tensor] = tensors
    if not all(name.startswith(_PREFIX) for name in named if name not in (OFFSETS, MEMBERS)):
        return dict(named)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in named.items()}
