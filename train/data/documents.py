"""Documents as training rows: tokens, and which of them are learned.

A document becomes one row, truncated and padded. What a row of data means is
:mod:`.formats`' table, where it comes from is :mod:`.loading`'s work, and its tokens are made by
:mod:`.encoded`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..config import DataConfig
from .batches import Row, Spans
from .encoded import SPEAKERS, EncodedDocuments, EncodedTurn, encode
from .loading import Documents


class Encoded(Protocol):
    """Documents as the tokens of their turns."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> list[EncodedTurn]: ...  # noqa: D105


@dataclass(frozen=True)
class Encoding:
    """Documents that become tokens when they are asked for."""

    documents: Documents
    tokenizer: Any
    data: DataConfig

    @property
    def skipped(self) -> str:
        """What was left out, in one sentence; empty if nothing was."""
        return self.documents.skipped

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.documents)

    def __getitem__(self, index: int) -> list[EncodedTurn]:
        """The turns of a document."""
        return next(encode([self.documents[index]], self.tokenizer, self.data))


@dataclass(frozen=True)
class DocumentRows:
    """One document per row, truncated and padded to a length."""

    documents: Encoded
    data: DataConfig
    seq_len: int
    pad: int
    """The token that fills a row up."""

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.documents)

    def __getitem__(self, index: int) -> Row:
        """The row of a document."""
        tokens, weights, length = cut_turns(self.documents[index], self.data, self.seq_len)
        fill = self.seq_len - length
        return Row(
            np.pad(tokens, (0, fill), constant_values=self.pad), np.pad(weights, (0, fill)), length
        )

    def lengths(self) -> np.ndarray:
        """Tokens in front of the padding of every row; documents on disk are not read for it."""
        if not isinstance(self.documents, EncodedDocuments):
            return np.asarray([self[index].length for index in range(len(self))])
        lengths = self.documents.lengths()
        room = self.data.answer_room if self.data.mask_prompts else 0
        for index in np.flatnonzero(lengths > self.seq_len - room).tolist() if room else ():
            lengths[index] = cut_turns(self.documents[index], self.data, self.seq_len).length
        return np.minimum(lengths, self.seq_len)


def cut_turns(turns: Iterable[EncodedTurn], data: DataConfig, seq_len: int) -> Row:
    """Tokens and weights of a document, at most ``seq_len`` of them.

    System prompts are not learned, questions only where prompts are not masked. A masked question
    is shortened so that an answer of ``answer_room`` tokens fits behind it.
    """
    tokens, weights, length = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], 0
    for ids, role in turns:
        if role == "user" and data.mask_prompts:
            ids = ids[: max(0, seq_len - data.answer_room - length)]
        tokens.append(np.asarray(ids[: seq_len - length], np.int32))
        weights.append(np.full(len(tokens[-1]), is_learned(role, data), np.float32))
        length += len(tokens[-1])
    return Row(np.concatenate(tokens), np.concatenate(weights), length)


def is_learned(role: str, data: DataConfig) -> bool:
    """Whether the turns of a speaker are learned."""
    return role != "system" and not (role == "user" and data.mask_prompts)


def learned_spans(documents: EncodedDocuments, data: DataConfig) -> Spans:
    """Which tokens of all documents, one after another, are learned."""
    learned = np.asarray([is_learned(role, data) for role in SPEAKERS], np.float32)
    return Spans(documents.turn_ends, learned[documents.speakers])
