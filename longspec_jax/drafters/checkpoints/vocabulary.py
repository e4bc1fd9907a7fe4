"""The table of a reduced draft vocabulary (:mod:`longspec_jax.drafters.vocabulary`), in and out.

It is a file of its own next to the draft's weights, so any draft can get one later. Tokens are
stored by frequency, so that one table serves every smaller vocabulary.

Trainers of drafts over the target's features store the tokens among the weights instead
(:mod:`longspec_jax.drafters.checkpoints.features`).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int
from safetensors import SafetensorError, safe_open

from longspec_jax.drafters.vocabulary import check_vocabulary
from longspec_jax.weights.hub import local_folder
from longspec_jax.weights.params import save_tensors

FILE = "draft_vocabulary.safetensors"
TENSOR = "tokens"
"""``[v]`` int32 token ids, the most useful first."""
HOW = "longspec-vocabulary --help (python -m train.vocabulary --help) says how to make one"


def save_draft_vocabulary(
    folder: str | Path, tokens: ArrayLike | Sequence[int], vocab_size: int
) -> Path:
    """Save a table next to a draft's weights, replacing the one that may be there.

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
    save_tensors(file, {TENSOR: table}, {"vocab_size": str(vocab_size)})
    return file


def load_draft_vocabulary(
    source: str | Path, vocab_size: int, size: int, *, revision: str | None = None
) -> Int[np.ndarray, " v"]:
    """The first tokens of the table next to a draft.

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
