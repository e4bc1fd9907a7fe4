"""What tells one set of data from another: its content, never where it lies.

A copied or moved file is the same data, a file that was written anew under the same name is not.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
    """A digest of the files in a folder that make tokens of text."""
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
