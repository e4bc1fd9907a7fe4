"""Documents as tokens: the tokenizer, token files, and documents that are encoded once.

Turns stand one after another in one file of tokens; next to it stand where they end and who speaks.
Which of them are learned is not kept: the options mask the same tokens in different ways.
A fast tokenizer encodes on all cores.
"""

import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from longspec_jax import files, loading
from longspec_jax.checks import Tokenizer

from .documents import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    class ModelTokenizer(Tokenizer, Protocol):
        """What training asks of a tokenizer, besides what decoding does."""

        bos_token_id: int | None
        eos_token_id: int | None
        pad_token_id: int | None

        @property
        def chat_template(self) -> str | None:
            """The Jinja text of its one template."""
            ...

        def __len__(self) -> int:
            """All tokens, those added later too."""
            ...

        def get_vocab(self) -> dict[str, int]:
            """The ids of all tokens."""
            ...

        def save_pretrained(self, save_directory: Path | str) -> object:
            """Write its files into a folder."""
            ...
else:
    ModelTokenizer = Tokenizer

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Special tokens, with ids 0, 1 and 2."""
FORM = 2
"""Of the files, and of how documents become tokens; another one makes older files unknown."""
SPEAKERS = ("", "system", "user", "assistant")
SHARE = 256
"""Documents that a tokenizer gets at once."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer (any text round-trips) that begins every text with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,  # Longer ones would be licence headers learned by heart.
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str | Path, revision: str | None = None) -> ModelTokenizer:
    """The tokenizer of a Hugging Face folder or hub id."""
    tokenizer = loading.load_tokenizer(source, revision)
    if tokenizer is None:
        raise ValueError(
            f"{source} comes without a tokenizer; put tokenizer.json and tokenizer_config.json "
            "next to the model"
        )
    return tokenizer


def encode_documents(tokenizer: ModelTokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Token ids of every text, with the tokenizer's own BOS in front and EOS after."""
    for [turn] in encode(([Turn(text)] for text in texts), tokenizer, ""):
        yield turn.ids


def encode_texts(tokenizer: ModelTokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Ids of every text; a fast tokenizer's backend does it in parallel and without offsets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield from (tokenizer(text)["input_ids"] for text in texts)
    else:
        yield from (encoding.ids for encoding in backend.encode_batch_fast(texts))


def read_tokens(path: Path) -> np.ndarray:
    """A memory-mapped token file, as :func:`write_tokens` makes it."""
    return _array(path, path, "r")


def _array(path: Path, made: Path, mode: Literal["r"] | None = None) -> np.ndarray:
    """The array in a file, memory-mapped in the mode; ``made`` is made anew where it is missing.

    Raises:
      ValueError: if the file is damaged.
    """
    try:
        return np.load(path, mode)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is damaged; remove {made}, and the same command makes it anew"
        ) from error


def write_tokens(path: Path, parts: Iterator[np.ndarray], vocab_size: int) -> int:
    """Write token arrays one after another in the narrowest type; returns how many there are.

    The length is known only at the end, so that the parts go to a raw file first and are then
    copied after a NumPy header; a reader never sees a half-written file.
    """
    kind = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    total = 0
    with tempfile.TemporaryFile(dir=path.parent) as raw:
        for part in parts:
            raw.write(part.astype(kind).tobytes())
            total += len(part)
        raw.flush()
        with files.replacing(path) as unfinished:
            if total:
                final = np.lib.format.open_memmap(unfinished, "w+", kind, (total,))
                final[:] = np.memmap(raw, dtype=kind, mode="r")
                final.flush()
            else:
                with unfinished.open("wb") as empty:
                    np.save(empty, np.zeros((0,), kind))
    return total


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
        _array(folder / "tokens.npy", folder, "r"),
        *(_array(folder / f"{name}.npy", folder) for name in ("turn_ends", "speakers", "ends")),
        skipped=(folder / "skipped.txt").read_text(),
    )


def write_encoded(
    folder: Path,
    documents: Iterable[list[EncodedTurn]],
    vocab_size: int,
    skipped: Callable[[], str],
) -> None:
    """Write documents into a new folder, which is there when all of it is.

    ``skipped`` says what was left out, once all are written.
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
    documents: Iterable[list[Turn]], tokenizer: ModelTokenizer, template: str
) -> Iterator[list[EncodedTurn]]:
    """The tokens of documents. The tokenizer gets a batch of documents at once.

    Turns are tokenised one by one with the tokenizer's own special tokens, as the published trainer
    does. Plain text ends with the end-of-text token. A turn is written by its template, which has
    ``{role}`` and ``{content}``.
    """
    documents, end = iter(documents), tokenizer.eos_token_id
    while chunk := list(islice(documents, SHARE)):
        texts = [_written(turn, template) for turns in chunk for turn in turns]
        encoded = encode_texts(tokenizer, texts)
        for turns in chunk:
            yield [EncodedTurn(_ended(next(encoded), turn, end), turn.role) for turn in turns]


def _written(turn: Turn, template: str) -> str:
    """The text of a turn."""
    if not turn.role:
        return turn.content
    # Replaced, not formatted: a template may have braces of its own.
    return template.replace("{role}", turn.role).replace("{content}", turn.content)


def _ended(ids: list[int], turn: Turn, end: int | None) -> np.ndarray:
    """The tokens of a turn, with the end-of-text token after plain text."""
    if not turn.role and end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    return np.asarray(ids, np.int32)
