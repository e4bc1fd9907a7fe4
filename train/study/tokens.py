"""Held-out rows for a study, and which of their tokens are copies of earlier ones."""

from pathlib import Path

import numpy as np

from ..data.batches import PackedRows, read_tokens

RUN = 8
"""Tokens that must agree, the copied one among them, for a token to be called a copy."""


def held_out_rows(path: Path, length: int, count: int, begin: int | None) -> np.ndarray:
    """Rows ``[count, length]`` int32, evenly spread over a token file.

    Args:
      path: of tokens one after another, as a run's ``corpus/heldout-*.npy``.
      length: of a row.
      count: of rows.
      begin: a token in front of every row; none if absent.

    Raises:
      ValueError: if the file has fewer rows.
    """
    rows = PackedRows(read_tokens(path), length, begin=begin)
    if len(rows) < count:
        raise ValueError(
            f"{path} gives {len(rows)} rows of {length} tokens, {count} are asked for; set --rows "
            f"to at most {len(rows)}, or shorten --contexts"
        )
    chosen = np.arange(count) * len(rows) // count
    return np.stack([rows[int(index)].tokens for index in chosen])


def cut(rows: np.ndarray, context: int, begin: int | None) -> np.ndarray:
    """The last ``context`` tokens of every row, the first of them replaced by ``begin``."""
    short = rows[:, -context:].copy()
    if begin is not None:
        short[:, 0] = begin
    return short


def copy_distance(row: np.ndarray, run: int = RUN) -> np.ndarray:
    """How far back the nearest copy of each token lies, 0 where there is none.

    A token is a copy if it and the ``run - 1`` tokens before it stand somewhere earlier in the row
    in the same order.
    """
    latest: dict[bytes, int] = {}
    distance = np.zeros(len(row), np.int64)
    row = np.ascontiguousarray(row)
    for end in range(run - 1, len(row)):
        key = row[end - run + 1 : end + 1].tobytes()
        distance[end] = end - latest.get(key, end)
        latest[key] = end
    return distance
