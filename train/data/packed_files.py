"""Files packed by gzip or zstd: unpacked once, under a name that their content gives.

A row at any place of the file must be at hand, which a packed stream does not offer.
"""

import shutil
from pathlib import Path

from longspec_jax import files

from .fingerprint import content_digest

CODECS = {".gz": "gzip", ".zst": "zstd"}


def unpacked(path: Path) -> Path:
    """A file as it is, or what a packed one holds, kept in the cache of the data sets.

    Raises:
      OSError, ValueError: if it is damaged.
    """
    codec = CODECS.get(path.suffix)
    if codec is None:
        return path
    import pyarrow
    from datasets import config

    folder = Path(config.HF_DATASETS_CACHE) / "unpacked"
    kept = folder / f"{content_digest(path)[:32]}{path.with_suffix('').suffix}"
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with pyarrow.input_stream(str(path), compression=codec) as packed:
            with files.replacing(kept) as unfinished, unfinished.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    return kept
