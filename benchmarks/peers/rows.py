"""What is asked of every peer, and the rows of one schema that they answer.

A peer is a program of its own, ``python -m benchmarks.peers.NAME JOB``, in a process of its own:
the engines' packages need not agree, a crash costs only that job, and memory is free after it.
It reads a :class:`Job` and appends a row to the job's file whenever it has measured one. This file
and the command (:mod:`.run`) import none of the engines.
"""

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longspec_jax import files

from ..arguments import MEASURED
from ..report import Row, refusal
from ..timing import rounded

PLAIN, ROUND, REAL, ATTENTION = MEASURED
DRAFT = "eagle3"
"""The drafter of random weights in rounds, and in real texts the draft that the command names."""
FIELDS = (
    "peer version what shape context batch temperature drafter tau ms tokens_per_second "
    "differing_tokens new_tokens prefill_ms refusal"
).split()
"""Of every row, null where there is no such figure. ``ms`` is a plain step or a round, only
decoding; ``tokens_per_second`` counts all rows of the batch; ``prefill_ms`` is in neither.
``differing_tokens`` of ``new_tokens`` are not those of the same peer's plain decoding."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Some settings that one process of a peer measures, one after the other."""

    what: str
    drafter: str | None
    """Who proposes, in the peer's words; None for plain decoding."""
    shape: str
    model: str
    """A folder with only a configuration (``plain``, ``round``) or with weights; a GGUF file."""
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    tau: float
    """Tokens emitted a round, the bonus included, of ``round``."""
    new_tokens: int
    repetitions: int
    texts: tuple[tuple[int, ...], ...]
    """Prompts of ``real``."""
    draft: str | None
    """The folder of :data:`DRAFT`, of ``real``."""
    rows: str
    """The file that rows are appended to, one JSON object a line."""

    @staticmethod
    def read(path: str) -> "Job":
        """The job that :meth:`write` has stored."""
        stored = json.loads(Path(path).read_text())
        lists = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        lists["texts"] = tuple(map(tuple, stored["texts"]))
        return Job(**(stored | lists))

    def write(self, path: Path) -> None:
        """Store it for the process that measures."""
        files.replace(path, json.dumps(dataclasses.asdict(self)).encode())

    def add(self, row: Row) -> None:
        """Append a measured row."""
        with Path(self.rows).open("a") as file:
            file.write(json.dumps({"what": self.what, "shape": self.shape} | row) + "\n")

    def measure(self, point: Callable[[int, int], Row]) -> None:
        """Add a row for every context and batch; what a point raises is the row's refusal."""
        for batch, context in itertools.product(self.batches, self.contexts):
            row = {"context": context, "batch": batch, "drafter": self.drafter}
            try:
                self.add(row | point(context, batch))
            except (RuntimeError, ValueError, MemoryError) as error:
                self.add(row | {"refusal": refusal(error)})


def random_prompts(vocabulary: int, context: int, batch: int) -> list[list[int]]:
    """Token ids that every peer is given, no two rows of one prefix."""
    import numpy as np

    draws = np.random.default_rng(0).integers(16, vocabulary - 16, (batch, context))
    return draws.tolist()


def timed(seconds: Sequence[float], steps: float, tokens: float) -> Row:
    """The figures of repetitions that took so long each.

    Args:
      seconds: of decoding only, by repetition.
      steps: plain steps or rounds of one repetition.
      tokens: emitted in it, over all rows of the batch.
    """
    median = statistics.median(seconds)
    return {"ms": rounded(1e3 * median / steps), "tokens_per_second": rounded(tokens / median)}


def rounds_of(tokens: int, accepted: int) -> int:
    """Target forwards after this many tokens: each emits one of its own and the accepted ones."""
    return tokens - accepted


def text_row(
    job: Job, answer: Sequence[int], seconds: float, prefill: float, accepted: int | None
) -> Row:
    """A row of ``real``, with the ids of the answer, which the command compares and drops."""
    emitted = len(answer) - 1  # The first token is the prefill's.
    rounds = rounds_of(emitted, accepted or 0)
    return {
        "drafter": job.drafter,
        "tau": None if accepted is None else rounded(emitted / rounds),
        **timed([seconds], rounds, emitted),
        "prefill_ms": rounded(1e3 * prefill),
        "sequence": list(answer),
    }


def differing(answer: Sequence[int], plain: Sequence[int]) -> int:
    """Tokens of an answer that are not plain decoding's, or are missing."""
    return sum(one != other for one, other in itertools.zip_longest(answer, plain))


def whole(row: Row, peer: str, version: str | None) -> Row:
    """A row with every field of the schema, in its order.

    Raises:
      ValueError: for a field that is not in it.
    """
    unknown = sorted(row.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"{peer} answered {', '.join(unknown)}; a row has {', '.join(FIELDS)}")
    return {name: {"peer": peer, "version": version}.get(name, row.get(name)) for name in FIELDS}


def merged_texts(rows: Sequence[Row], plain: Sequence[Row]) -> list[Row]:
    """One row for the texts of each context and temperature, next to plain decoding's of the peer.

    Tokens a second are all tokens over all seconds; ``ms`` and ``tau`` are means over rounds.
    """
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        places.setdefault((row["context"], row["temperature"]), []).append(row)
    expected = {(row["context"], row["temperature"], row["text"]): row for row in plain}
    found = []
    for (context, temperature), texts in places.items():
        emitted = [len(row["sequence"]) - 1 for row in texts]
        seconds = [n / row["tokens_per_second"] for n, row in zip(emitted, texts, strict=True)]
        rounds = sum(1e3 * s / row["ms"] for s, row in zip(seconds, texts, strict=True))
        beside = [expected.get((context, temperature, row["text"])) for row in texts]
        pairs = [(row, other) for row, other in zip(texts, beside, strict=True) if other]
        found.append(
            {
                **{name: texts[0][name] for name in ("what", "shape", "drafter")},
                "context": context,
                "temperature": temperature,
                "batch": 1,
                "tau": None if texts[0]["tau"] is None else rounded(sum(emitted) / rounds),
                **timed([sum(seconds)], rounds, sum(emitted)),
                "prefill_ms": rounded(statistics.median(row["prefill_ms"] for row in texts)),
                "differing_tokens": None
                if len(pairs) < len(texts)
                else sum(differing(row["sequence"], other["sequence"]) for row, other in pairs),
                "new_tokens": sum(len(row["sequence"]) for row in texts),
            }
        )
    return found
