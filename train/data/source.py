"""Where a stage's rows come from, and which of them are kept for measuring.

A corpus brings its own held-out documents. Of other data a few rows, evenly spread, are taken out
of training, so that simulated acceptance is never measured on rows that were learned.
"""

import dataclasses
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from longspec_jax.weights.hub import local_model

from ..config import RunConfig, StageConfig
from ..fingerprint import files_digest, fingerprint, tokenizer_digest
from ..processes import by_first, is_first
from ..step import ROWS, Batch
from .corpus import tokens_file
from .documents import BadRows
from .loading import Documents, data_digest, stream_digest, stream_revision
from .rows import DocumentRows, PackedRows, Rows, Selection, learned_spans
from .tokens import (
    FORM,
    EncodedDocuments,
    ModelTokenizer,
    encode,
    load_tokenizer,
    read_encoded,
    read_tokens,
    write_encoded,
)


@dataclass(frozen=True)
class Source:
    """The data of a run."""

    config: RunConfig
    workdir: Path
    target: str
    """Folder or hub id whose tokenizer makes tokens of text."""
    vocab_size: int
    section: str = "data"
    """Of the configuration, as it is typed, in which these data are described."""

    def split(self, stage: StageConfig, mesh: Mesh) -> tuple[Rows, Batch]:
        """The rows of a stage, and a micro-batch kept from training; the same on every mesh."""
        count = self.config.accept_rows
        length = self.config.accept_seq_len or stage.seq_len
        if self.config.data.corpus is not None:
            train, held = (
                PackedRows(read_tokens(path), each, begin=self._begin)
                for path, each in zip(self._corpus_files, (stage.seq_len, length), strict=True)
            )
            return train, _batch(held, _spread(held, count), mesh)
        if self.config.data.pack and length != stage.seq_len:
            raise ValueError(
                f"accept_seq_len={length} differs from seq_len={stage.seq_len} of stage "
                f"{stage.name}: packed rows are kept from training whole; leave "
                "--config.accept_seq_len at 0"
            )
        rows = self._rows(stage.seq_len)
        chosen = _spread(rows, count)
        rest = np.setdiff1d(np.arange(len(rows)), chosen)
        return Selection(rows, rest), _batch(self._rows(length), chosen, mesh)

    def fingerprint(self) -> str:
        """A digest of what the rows are made of: data, tokenizer, options; 16 hexadecimal digits.

        It does not change when files move and does when their content, their order, the tokenizer's
        files or an option of the data changes. Of files above 256 MiB evenly spaced blocks count
        (:func:`train.fingerprint.content_digest`). Lengths, batches and seeds are the run's, and
        not in it. The target needs to exist only where its tokenizer makes the tokens.
        """
        data = self.config.data
        options = dataclasses.asdict(data)
        # Where data lie is not what they are; and a budget changes no row of a run that begins.
        for name in ("files", "hub", "corpus", "max_bad_rows", "buckets", "stream"):
            del options[name]
        if data.corpus is not None:
            digest = files_digest(self._corpus_files)
            return fingerprint({"options": options, "data": digest})
        return fingerprint({"options": options, **self._digests})

    def prepare(self) -> EncodedDocuments:
        """All documents as tokens on disk, made if they are absent."""
        data, folder = self.config.data, self.encoded_folder
        if not folder.is_dir():
            bad = BadRows(data.max_bad_rows, f"--config.{self.section}.max_bad_rows")
            pinned = stream_revision(data, self.workdir) if data.stream else None
            documents = Documents(data, bad, revision=pinned)
            turns = encode(documents, self._tokenizer, data.turn)
            write_encoded(folder, turns, len(self._tokenizer), bad.summary)
        return read_encoded(folder)

    @cached_property
    def encoded_folder(self) -> Path:
        """Where the tokens of these data are kept, or will be; its name is their digest."""
        data = self.config.data
        options = (data.split, data.turn, data.pack, data.max_bad_rows, FORM)
        return self.workdir / f"tokens-{fingerprint({'options': options, **self._digests})}"

    @cached_property
    def _digests(self) -> dict[str, str]:
        """What the data and the tokenizer are; of a stream, which is not read, its revision."""
        data, folder = self.config.data, local_model(self.target, self.config.revision or None)
        digest = stream_digest(data, self.workdir) if data.stream else data_digest(data)
        return {"data": digest, "tokenizer": tokenizer_digest(folder)}

    @cached_property
    def _corpus_files(self) -> list[Path]:
        """The tokens to train on, and those held out."""
        corpus = self.config.data.corpus
        assert corpus is not None, "a run without a corpus has no files of one"
        folder, tokenizer = corpus.place(self.workdir), self.workdir / "tokenizer"
        return [tokens_file(folder, name, tokenizer) for name in ("train", "heldout")]

    @cached_property
    def _begin(self) -> int | None:
        """What packed rows begin with, if they are to begin with anything."""
        if not self.config.data.begin_rows:
            return None
        made = self.workdir / "tokenizer"  # A corpus run's, before there is a target.
        tokenizer = load_tokenizer(made) if made.is_dir() else self._tokenizer
        if tokenizer.bos_token_id is None:
            raise ValueError(
                f"--config.data.begin_rows begins rows with the first token of "
                f"{self.target}'s tokenizer, which has none; set it to False"
            )
        return tokenizer.bos_token_id

    @cached_property
    def _tokenizer(self) -> ModelTokenizer:
        tokenizer = load_tokenizer(self.target, self.config.revision or None)
        if len(tokenizer) > self.vocab_size:
            raise ValueError(
                f"the tokenizer of {self.target} has {len(tokenizer)} entries, the model "
                f"vocab_size={self.vocab_size}; use the tokenizer that was saved with the model"
            )
        return tokenizer

    @cached_property
    def _documents(self) -> EncodedDocuments:
        """The documents of files or hub, all of them checked, as tokens."""
        by_first("tokens", self.prepare)
        documents = read_encoded(self.encoded_folder)
        if documents.skipped and is_first():
            print(documents.skipped, file=sys.stderr, flush=True)
        return documents

    def _rows(self, seq_len: int) -> Rows:
        """All rows of files or hub, cut to a length."""
        data = self.config.data
        pad, documents = self._tokenizer.pad_token_id or 0, self._documents
        if data.pack:
            spans = learned_spans(documents, data)
            return PackedRows(documents.tokens, seq_len, spans, self._begin)
        return DocumentRows(documents, data, seq_len, pad)


def _spread(rows: Rows, count: int) -> np.ndarray:
    """Indices of a few rows, evenly spread, so that all kinds of documents are measured."""
    if len(rows) < count:
        raise ValueError(
            f"measuring acceptance needs {count} rows of {rows.seq_len} tokens, the data give "
            f"{len(rows)}; lower accept_rows or accept_seq_len, or give more data"
        )
    return np.arange(count) * len(rows) // count


def _batch(rows: Rows, chosen: np.ndarray, mesh: Mesh) -> Batch:
    """Some rows as a micro-batch on the devices, filled up with rows of no weight to spread."""
    sharding = NamedSharding(mesh, jax.sharding.PartitionSpec(*ROWS[1:]))
    tokens, weights, _ = zip(*(rows[int(index)] for index in chosen), strict=True)
    missing = -len(chosen) % (mesh.shape["data"] * mesh.shape["fsdp"])

    def place(parts: tuple[np.ndarray, ...]) -> jax.Array:
        whole = np.stack([*parts, *missing * [np.zeros_like(parts[0])]])
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return Batch(place(tokens), place(weights))
