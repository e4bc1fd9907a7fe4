"""How far a call has got: the tokens and counts of its rows, and the seconds of its phases."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from longspec_jax.decoding import ahead
from longspec_jax.decoding.continuous import Gained
from longspec_jax.decoding.policy import Measurement
from longspec_jax.decoding.record import SpecState
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN
from longspec_jax.drafters.base import Drafter, NoDraft
from longspec_jax.generation.job import Job
from longspec_jax.generation.result import Stats, TreeUse
from longspec_jax.ops.placement import tree_bytes


class Progress(NamedTuple):
    """The small arrays of a state, on the host.

    Those of the runs after it share ``output``, ``drafted`` and ``histogram`` with it, and write
    behind what it has seen: read a progress before the run goes on.
    """

    output: np.ndarray
    drafted: np.ndarray
    emitted: np.ndarray
    done: np.ndarray
    rounds: np.ndarray
    histogram: np.ndarray

    @classmethod
    def of(cls, state: SpecState) -> "Progress":
        """Fetch them in one transfer."""
        record = state.record
        counts = record.emitted, state.rows.done, record.rounds, record.histogram
        return cls(*map(np.array, jax.device_get((record.output, record.drafted, *counts))))

    @classmethod
    def none(cls, rows: int, max_emitted: int, height: int) -> "Progress":
        """That of rows which have not begun.

        Args:
          rows: how many.
          max_emitted: most tokens of a row.
          height: most tokens that a round emits in a row.
        """
        counts = [np.zeros(rows, np.int32) for _ in range(2)]
        return cls(
            output=np.zeros((rows, max_emitted), np.int32),
            drafted=np.zeros((rows, max_emitted), bool),
            emitted=counts[0],
            done=np.zeros(rows, bool),
            rounds=counts[1],
            histogram=np.zeros((rows, height), np.int32),
        )

    def after(self, report: ahead.Report) -> "Progress":
        """The progress one round later, as the device's own state counts it."""
        progress = self
        for row, count in enumerate(report.count):
            if count:
                tokens, drafted = report.tokens[row, :count], report.drafted[row, :count]
                ended = bool(report.done[row])
                progress = progress.with_gained(Gained(row, tokens, drafted, False, ended))
        return progress

    def with_gained(self, gained: Gained) -> "Progress":
        """The progress after a row, the one of the key's number, has gained tokens."""
        row, count = gained.key, len(gained.tokens)
        emitted, done, rounds = self.emitted.copy(), self.done.copy(), self.rounds.copy()
        fresh = slice(emitted[row], emitted[row] + count)
        self.output[row, fresh], self.drafted[row, fresh] = gained.tokens, gained.drafted
        if not gained.first:
            self.histogram[row, np.count_nonzero(gained.drafted)] += 1
            rounds[row] += 1
        emitted[row] += count
        done[row] = gained.ended
        return self._replace(emitted=emitted, done=done, rounds=rounds)

    def check_finite(self, job: Job) -> "Progress":
        """Return itself; raise if the target's logits were not finite somewhere, and say where."""
        for row, (tokens, count) in enumerate(zip(self.output, self.emitted, strict=True)):
            if count and tokens[count - 1] == NO_TOKEN:
                where = f"of row {row} " if len(self.emitted) > 1 else ""
                dtype = job.target.config.dtype
                remedy = "" if dtype == "float32" else "dtype float32, which has more range, or "
                raise FloatingPointError(
                    f"the target's logits {where}behind {len(job.prompts[row]) + count - 1} "
                    "tokens are not finite, so that no token can be drawn: its weights or norms "
                    f"overflow {dtype}; try {remedy}another checkpoint"
                )
        return self


@dataclass(frozen=True)
class Timing:
    """Seconds of a call's phases so far."""

    compile: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Run(NamedTuple):
    """A call at one point of its way."""

    progress: Progress
    timing: Timing
    rows: Rows
    """The live rows; donated when the run goes on, and a round ahead where that was launched."""
    totals: tuple[Measurement, ...]
    """What every drafter of the job has done so far."""


def _shown(drafter: Drafter) -> str:
    """A drafter's name; without a tree it is that of plain decoding."""
    return drafter.name if drafter.tree.widths else NoDraft().name


def statistics(job: Job, run: Run) -> Stats:
    """The counts of a run so far."""
    progress, timing = run.progress, run.timing
    used = zip(job.drafters, run.totals, strict=True)
    return Stats(
        prompt_tokens=tuple(len(row) for row in job.prompts),
        new_tokens=tuple(progress.emitted.tolist()),
        target_passes=tuple(progress.rounds.tolist()),
        histograms=tuple(map(tuple, progress.histogram.tolist())),
        trees=tuple(
            TreeUse(_shown(drafter), drafter.tree, total.rounds, total.tokens, total.seconds)
            for drafter, total in used
        ),
        prefill_seconds=timing.prefill,
        decode_seconds=timing.decode,
        compile_seconds=timing.compile,
        draft_state_bytes=tree_bytes(run.rows.draft),
        memory=job.memory,
        lossless=all(drafter.lossless for drafter in job.drafters),
    )
