"""Documents as tokens on disk: made once, read by place, whoever made them.

Turns stand one after another in one file of tokens; beside it stand where they end and who speaks.
Which of them are learned is not kept: masks are laid over the same tokens as the options say.
"""

import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import DataConfig
from .batches import read_tokens, write_tokens
from .formats import Turn
from .tokenizer import encode_texts

FORM = 1
"""Of the files, and of how documents become tokens; another one makes older files unknown."""
SPEAKERS = ("", "system", "user", "assistant")


class EncodedTurn(NamedTuple):
    """A turn's tokens."""

    ids: np.ndarray
    role: str


@dataclass(frozen=True, eq=False)
class EncodedDocuments:
    """The documents of a folder that :func:`write_encoded` made."""

    tokens: np.ndarray
    """Of all turns, memory-mapped."""
    turn_ends: np.ndarray
    """Tokens up to the end of every turn."""
    speakers: np.ndarray
    """Of every turn, as places in ``SPEAKERS``."""
    ends: np.ndarray
    """Turns up to the end of every document."""
    skipped: str
    """What was left out, in one sentence; empty if nothing was."""

    def __len__(self) -> int:
        """Documents there are."""
        return len(self.ends)

    def __getitem__(self, index: int) -> list[EncodedTurn]:
        """The turns of a document."""
        first, last = (int(self.ends[index - 1]) if index else 0), int(self.ends[index])
        return [self._turn(turn) for turn in range(first, last)]

    def lengths(self) -> np.ndarray:
        """Tokens of every document, ``[documents]``."""
        return np.diff(self.turn_ends[self.ends - 1], prepend=0)

    def _turn(self, index: int) -> EncodedTurn:
        start = self.turn_ends[index - 1] if index else 0
        ids = self.tokens[start : self.turn_ends[index]]
        return EncodedTurn(ids, SPEAKERS[self.speakers[index]])


def read_encoded(folder: Path) -> EncodedDocuments:
    """The documents of a folder."""
    return EncodedDocuments(
        read_tokens(folder / "tokens.npy"),
        *(np.load(folder / f"{name}.npy") for name in ("turn_ends", "speakers", "ends")),
        skipped=(folder / "skipped.txt").read_text(),
    )


def write_encoded(
    folder: Path,
    documents: Iterable[list[EncodedTurn]],
    vocab_size: int,
    skipped: Callable[[], str],
) -> None:
    """Write documents into a new folder, which is there when all of it is.

    Args:
      folder: does not exist yet.
      documents: their tokens.
      vocab_size: no token is as large.
      skipped: says, once all are written, what was left out.
    """
    turn_ends, speakers, ends = array("q"), array("B"), array("q")

    def parts() -> Iterator[np.ndarray]:
        total = 0
        for turns in documents:
            for turn in turns:
                total += len(turn.ids)
                turn_ends.append(total)
                speakers.append(SPEAKERS.index(turn.role))
                yield turn.ids
            ends.append(len(turn_ends))

    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # Of a run that was killed.
    unfinished.mkdir()
    write_tokens(unfinished / "tokens.npy", parts(), vocab_size)
    np.save(unfinished / "turn_ends.npy", np.asarray(turn_ends, np.int64))
    np.save(unfinished / "speakers.npy", np.asarray(speakers, np.uint8))
    np.save(unfinished / "ends.npy", np.asarray(ends, np.int64))
    (unfinished / "skipped.txt").write_text(skipped())
    unfinished.rename(folder)


def encode(
    documents: Iterable[list[Turn]], tokenizer: Any, data: DataConfig, batch: int = 256
) -> Iterator[list[EncodedTurn]]:
    """The tokens of documents, a batch of which the tokenizer gets at once.

    Turns are tokenised one by one with the tokenizer's own special tokens, as the published trainer
    does. Plain text ends with the end-of-text token, a turn by its template.
    """
    documents, end = iter(documents), tokenizer.eos_token_id
    while chunk := list(islice(documents, batch)):
        texts = [_written(turn, data) for turns in chunk for turn in turns]
        encoded = encode_texts(tokenizer, texts)
        for turns in chunk:
            yield [EncodedTurn(_ended(next(encoded), turn, end), turn.role) for turn in turns]


def _written(turn: Turn, data: DataConfig) -> str:
    """The text of a turn."""
    if not turn.role:
        return turn.content
    # Replaced, not formatted: a template may have braces of its own.
    return data.turn.replace("{role}", turn.role).replace("{content}", turn.content)


def _ended(ids: list[int], turn: Turn, end: int | None) -> np.ndarray:
    """The tokens of a turn, with the end-of-text token behind plain text."""
    if not turn.role and end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    return np.asarray(ids, np.int32)
