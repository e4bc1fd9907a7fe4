"""Metrics of a run: JSON lines always, a progress bar on a terminal, plain lines elsewhere."""

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .records import mend, read_records, rewind
from .writers import Writer


class Metrics:
    """Appends one JSON object per line to ``metrics.jsonl``; only process 0 writes.

    Args:
      path: the file.
      writers: what gets every record as well, behind the file.
    """

    def __init__(self, path: Path, writers: Sequence[Writer] = ()):
        self._path, self._writers = path, writers
        self._bar: Any = None
        self._counts: Counter[str] = Counter()
        self._file = None
        if jax.process_index() == 0:
            if cut := mend(path):
                print(f"{path}: a line that was cut off is left out ({cut})", file=sys.stderr)
            self._open()

    def _open(self) -> None:
        self._file = self._path.open("a")
        self._counts = Counter(record["stage"] for record in read_records(self._path))

    def count(self, stage: str) -> int:
        """Records there are of a stage: where its log stands when it is saved."""
        return self._counts[stage]

    def rewind(self, stage: str, count: int) -> None:
        """Forget what was recorded of a stage behind its checkpoint: it is about to be repeated."""
        if self._file is not None and count < self.count(stage):
            self._file.close()
            rewind(self._path, stage, count)
            self._open()

    def start(self, stage: str, step: int, steps: int) -> None:
        """Begin the display of a stage."""
        if self._file is None or not sys.stderr.isatty():
            return
        from tqdm import tqdm

        self._bar = tqdm(total=steps or None, initial=step, desc=stage, unit="step")

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def write(self, stage: str, step: int, values: dict[str, float]) -> None:
        """Record what was measured at a step."""
        if self._file is None:
            return
        rounded = {name: _round(value) for name, value in values.items()}
        record = {"stage": stage, "step": step, **rounded}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._counts[stage] += 1
        for writer in self._writers:
            writer.write(record)
        if self._bar is not None:
            self._bar.set_postfix(rounded)
        else:
            words = " ".join(f"{name}={value}" for name, value in rounded.items())
            print(f"{stage} step {step}: {words}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """End the display of a stage."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Close the file and the other writers."""
        if self._file is not None:
            self._file.close()
            for writer in self._writers:
                writer.close()


def _round(value: float) -> float | None:
    """Six significant digits; null for what JSON cannot say."""
    value = float(value)
    return float(f"{value:.6g}") if math.isfinite(value) else None
