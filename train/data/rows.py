"""Sources of training rows: documents, and packed tokens.

A row source is anything with a length and ``[i]`` that gives a :class:`Row`. A document becomes one
row, truncated and padded; packed, documents follow each other and rows are cut from the whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int

from ..config import DataConfig
from .tokens import SPEAKERS, EncodedDocuments, EncodedTurn

COUNTED = 1 << 26
"""Tokens of a source that show which of the vocabulary are frequent."""


class Row(NamedTuple):
    """A row of a batch."""

    tokens: np.ndarray
    """``[T]`` int32."""
    weights: np.ndarray
    """``[T]`` float32; 0 where a token is not learned."""
    length: int
    """Tokens in front of the padding."""


class Rows(Protocol):
    """A random-access source of rows of one length."""

    @property
    def seq_len(self) -> int: ...  # noqa: D102

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int) -> Row: ...  # noqa: D105

    def lengths(self) -> np.ndarray:
        """Tokens in front of the padding of every row, ``[rows]``."""
        ...


@dataclass(frozen=True, eq=False)
class Spans:
    """Weights of a long run of tokens, where neighbours mostly have the same."""

    ends: np.ndarray
    """Tokens up to the end of every span."""
    weights: np.ndarray
    """Of every span's tokens, float32."""

    def between(self, start: int, stop: int) -> np.ndarray:
        """The weights of the tokens from one index to another."""
        first, last = np.searchsorted(self.ends, (start, stop - 1), "right")
        ends = np.clip(self.ends[first : last + 1], start, stop)
        return np.repeat(self.weights[first : last + 1], np.diff(ends, prepend=start))


@dataclass(frozen=True)
class PackedRows:
    """Rows cut from one long run of tokens, documents one after another.

    Neighbouring documents of the run share a row, so their order decides what a long row contains.
    """

    tokens: np.ndarray
    """All tokens, usually memory-mapped."""
    seq_len: int
    spans: Spans | None = None
    """Their weights; all are learned if absent."""
    begin: int | None = None
    """A token in front of every row, which then takes one token less from the run. It is never
    predicted."""

    def __len__(self) -> int:
        """Whole rows."""
        return len(self.tokens) // self._cut

    def __getitem__(self, index: int) -> Row:
        """The row at an index."""
        start = index * self._cut
        stop = start + self._cut
        row = np.asarray(self.tokens[start:stop], np.int32)
        weights = None if self.spans is None else self.spans.between(start, stop)
        if self.begin is not None:
            row = np.insert(row, 0, self.begin)
            weights = None if weights is None else np.insert(weights, 0, 0.0)
        return full_row(row) if weights is None else Row(row, weights, self.seq_len)

    @property
    def _cut(self) -> int:
        """Tokens of a row that the run gives."""
        return self.seq_len - (self.begin is not None)

    def lengths(self) -> np.ndarray:
        """Tokens of every row; none is padding."""
        return np.full(len(self), self.seq_len)


def token_counts(sources: Sequence[Rows], vocab_size: int) -> Int[np.ndarray, " V"]:
    """How often every token is to be predicted in the rows of some sources.

    Of a source of more than :data:`COUNTED` tokens, evenly spaced rows count.
    """
    counts = np.zeros(vocab_size, np.int64)
    for rows in sources:
        size = min(len(rows), -(-COUNTED // rows.seq_len))
        for index in np.arange(size) * len(rows) // size:
            row = rows[int(index)]
            counts += np.bincount(row.tokens[row.weights > 0], minlength=vocab_size)
    return counts


def full_row(tokens: np.ndarray) -> Row:
    """A row that is learned whole."""
    return Row(tokens, np.ones(len(tokens), np.float32), len(tokens))


@dataclass(frozen=True)
class Selection:
    """Some of another source's rows."""

    rows: Rows
    chosen: np.ndarray
    """Their indices."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.rows.seq_len

    def __len__(self) -> int:
        """Rows that are chosen."""
        return len(self.chosen)

    def __getitem__(self, index: int) -> Row:
        """The row at an index of the selection."""
        return self.rows[int(self.chosen[index])]

    def lengths(self) -> np.ndarray:
        """Tokens in front of the padding of every row."""
        return self.rows.lengths()[self.chosen]


@dataclass(frozen=True)
class DocumentRows:
    """One document per row, truncated and padded to a length."""

    documents: EncodedDocuments
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
        """Tokens in front of the padding of every row; most documents are not read for it."""
        lengths = self.documents.lengths()
        answer = self.data.answer_room if self.data.mask_prompts else 0
        for index in np.flatnonzero(lengths > self.seq_len - answer).tolist() if answer else ():
            lengths[index] = cut_turns(self.documents[index], self.data, self.seq_len).length
        return np.minimum(lengths, self.seq_len)


def cut_turns(turns: Iterable[EncodedTurn], data: DataConfig, seq_len: int) -> Row:
    """Tokens and weights of a document, at most ``seq_len`` of them.

    System prompts are not learned, questions only where prompts are not masked. A masked question
    is shortened so that an answer of ``answer_room`` tokens fits after it.
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
