"""What makes a resumed run the same run, and one set of data the same data.

Data and models count by their content, never by where they lie: a copied or moved file is the same
data, a file that was rewritten under the same name is not. Of the configuration counts
:meth:`train.config.RunConfig.identity`: everything but where things lie, how often something is
written, and how the work is split over devices, so that a run may be resumed on other ones. A
resume of another run is refused, with the names of what differs.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longspec_jax.weights.gguf.file import parts_of
from longspec_jax.weights.hub import local_model

Fingerprint = dict[str, Any]
"""A value that JSON can hold for every name; two runs are the same if all are equal."""

_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.pth")


def model_digest(source: str | Path, revision: str | None = None) -> str:
    """A digest of a model's files; of large ones, evenly spaced parts count."""
    folder = local_model(source, revision)
    if folder.is_file():
        return files_digest(parts_of(folder))
    found = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    return files_digest(sorted(found))


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume from a checkpoint of another run.

    Raises:
      ValueError: if they differ.
    """
    if changes := differences(saved, now):
        raise ValueError(
            f"the checkpoint {folder} is of another run: {changes}; restore what changed to resume "
            "it, or begin anew with another --workdir"
        )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Names and values of what differs from JSON values that were saved; empty if all agree."""
    # In JSON a tuple is a list.
    now = json.loads(json.dumps(now))
    names = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    shown = {name: (now.get(name, "absent"), saved.get(name, "absent")) for name in names}
    return ", ".join(f"{name}={value} (was {before})" for name, (value, before) in shown.items())


# Digests of files.

BLOCK = 1 << 18
BLOCKS = 1024
"""Larger files than this many blocks are known by as many of them."""
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.model", "*.tiktoken",
)  # fmt: skip


def fingerprint(parts: Mapping[str, Any]) -> str:
    """A short digest of JSON values, the same for the same names and values."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def files_digest(paths: Iterable[Path]) -> str:
    """A digest of files in their order: names without folders, and contents."""
    return fingerprint({"files": [(path.name, content_digest(path)) for path in paths]})


def tokenizer_digest(folder: Path) -> str:
    """A digest of the files in a folder that make tokens of text, or of a GGUF file."""
    if folder.is_file():
        return files_digest(parts_of(folder)[:1])
    found = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    return files_digest(sorted(path for path in found if path.is_file()))


def content_digest(path: Path) -> str:
    """A digest of a file's size and content.

    Up to 256 MiB every byte counts. Of a larger file, which would take longer to read than a run
    may wait, head, tail and evenly spaced blocks do, 256 MiB in all: an edit that keeps the size
    and falls between them goes unseen.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        count = min(BLOCKS, -(-size // BLOCK))
        for index in range(count):
            # The first block begins the file and the last one ends it.
            file.seek(max(0, size - BLOCK) * index // max(1, count - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
