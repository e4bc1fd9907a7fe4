"""Documents as training rows: tokens, and which of them are learned.

A document becomes one row, truncated and padded. What a row of data means is
:mod:`train.formats`'s table, where it comes from is :mod:`train.loading`'s work.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import DataConfig
from .batches import Row
from .formats import Turn
from .loading import Documents


@dataclass(frozen=True)
class DocumentRows:
    """One document per row, truncated and padded to a length."""

    documents: Documents
    tokenizer: Any
    data: DataConfig
    seq_len: int

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.documents)

    def __getitem__(self, index: int) -> Row:
        """The row of a document."""
        tokens, weights = encode_turns(
            self.documents[index], self.tokenizer, self.data, self.seq_len
        )
        fill = self.seq_len - len(tokens)
        pad = self.tokenizer.pad_token_id or 0
        return np.pad(tokens, (0, fill), constant_values=pad), np.pad(weights, (0, fill))


def encode_turns(turns: list[Turn], tokenizer: Any, data: DataConfig, seq_len: int) -> Row:
    """Tokens and weights of a document, at most ``seq_len`` of them.

    Turns are tokenised one by one with the tokenizer's own special tokens, as the published trainer
    does. System prompts are not learned, questions only where prompts are not masked. A masked
    question is shortened so that an answer of ``answer_room`` tokens fits behind it.
    """
    tokens: list[int] = []
    weights: list[float] = []
    for turn in turns:
        ids = _tokens(turn, tokenizer, data)
        asked = turn.role == "user" and data.mask_prompts
        if asked:
            ids = ids[: max(0, seq_len - data.answer_room - len(tokens))]
        learned = turn.role != "system" and not asked
        tokens += ids
        weights += [float(learned)] * len(ids)
    return np.asarray(tokens[:seq_len], np.int32), np.asarray(weights[:seq_len], np.float32)


def _tokens(turn: Turn, tokenizer: Any, data: DataConfig) -> list[int]:
    """Tokens of one turn; plain text ends with the end-of-text token, a turn by its template."""
    if turn.role:
        # Replaced, not formatted: a template may have braces of its own.
        text = data.turn.replace("{role}", turn.role).replace("{content}", turn.content)
        return tokenizer(text)["input_ids"]
    ids = tokenizer(turn.content)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]
