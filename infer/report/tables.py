"""The tables of a report as one data frame, a row for every figure, and what is missing from them.

The layouts follow the LongSpec paper (Tables 1 and 4, Figure 3) and SpecExtend (Table 2).
"""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from longspec_jax.cli import counted
from longspec_jax.generation.result import ACCEPTANCE_DEFINITION

from ..eval.records import PLAIN_METHOD, Run
from ..eval.scores import METRICS
from ..eval.tasks import metric_of
from .frame import (
    DRAWS,
    FEWEST,
    LEVEL,
    TEXT,
    Block,
    Of,
    depths_of,
    estimate,
    gain,
    in_ranges,
    quotient,
    rounds_of,
    sums_by_unit,
)

PAPER_EDGES = (0, 5_000, 10_000, 15_000, 20_000, 25_000, 32_000)
"""Ends of the ranges of lengths in the LongSpec paper's Table 4."""
EDGES = (*PAPER_EDGES, 64_000, 128_000, 256_000, 512_000, 1_024_000)
ALL_TASKS = "all tasks"
TOLERANCE = 1.25
"""A speed-up above τ times this is no effect of speculation: a round costs a plain step at least,
and timings vary by less."""
DEFINITIONS = {
    "τ": f"{ACCEPTANCE_DEFINITION}; sums over samples",
    "tokens/s": "tokens of the decode rounds / their seconds, without prefill, the token drawn "
    "from it, compilation and detokenisation; sums over samples; of a batch all rows together",
    "speed-up": "tokens/s / tokens/s of plain decoding by this library (its own flash decoding, "
    "not an eager implementation), on the same samples and seeds",
    "identical": "share of the texts that equal plain decoding of the same sample, temperature and "
    "seed, token for token. In float32 all do, and in 16 bits where the device's kernels add in "
    "one order; elsewhere sums of another shape may flip a near-tie",
    "widest gap": "how much plain decoding's own scores prefer its token at the first difference, "
    "noise and temperature included; the greatest of the texts whose gap is known",
    "prefill, decoding": "seconds of a text; of a batch, a row's share of its call; without "
    "compilation",
    "score": "mean over texts of the best score against any reference. A lossless method has plain "
    "decoding's",
    "depth": "share of all rounds whose accepted path reaches the depth. One plus the sum of a "
    "line is τ, except for last rounds that end inside the draft",
    "position": "τ of the rounds whose first new token stands in the range, counted from the "
    "beginning of the prompt",
    "in brackets": f"{LEVEL:.0%} bootstrap intervals (expanded percentile, {DRAWS} resamples of "
    "the samples). All seeds of a sample, and all rows that ever shared a call, are resampled "
    f"together. Fewer than {FEWEST} samples have no interval",
}
"""The figures of all tables, printed once in a report."""


@dataclass(frozen=True)
class Figure:
    """A column of numbers: a function of the sums of columns of the frame."""

    name: str
    columns: tuple[str, ...]
    words: str = "{:.2f}"
    of: Of = quotient

    def value(self, rows: pd.DataFrame) -> float | None:
        """The figure of some rows; None if there is none."""
        found = estimate(sums_by_unit(rows, self.columns), self.of)
        return None if found is None else found.value


TAU = Figure("τ", ("tokens", "passes"))
SPEED = Figure("tokens/s", ("tokens", "seconds"), "{:.1f}")
SPEED_UP = Figure("speed-up", ("tokens", "seconds", "tokens_plain", "seconds_plain"), of=gain)
FIGURES = (
    TAU,
    SPEED,
    SPEED_UP,
    Figure("prompt tokens", ("prompt_tokens", "texts"), "{:.0f}"),
    Figure("new tokens", ("new_tokens", "texts"), "{:.0f}"),
    Figure("prefill (s)", ("prefill_s", "texts"), "{:.3f}"),
    Figure("decoding (s)", ("decode_s", "texts"), "{:.3f}"),
    Figure("score", ("score", "texts"), "{:.1%}"),
)
SHARE = Figure("share", ("reached", "rounds"), "{:.1%}")
EMITTED = Figure("τ", ("emitted", "rounds"))
BY_TASK, BY_LENGTH = "Tasks and methods", "By the length of the prompt in tokens"
BY_DEPTH, BY_POSITION = "Acceptance by depth", "Acceptance by position in the context"


def cells_of(frame: pd.DataFrame, edges: Sequence[int] = EDGES) -> pd.DataFrame:
    """All figures of all tables, a row each.

    Args:
      frame: of :func:`.frame.frame_of`.
      edges: of the ranges of lengths, ascending from 0.

    Returns:
      ``table``, ``block``, ``temperature``, ``task``, ``method``, ``column`` and ``text`` say where
      a figure stands and how it reads; ``value``, ``low``, ``high`` and ``samples`` are numbers.
    """
    texts = frame.assign(length=in_ranges(frame["prompt_tokens"], edges))
    rounds = rounds_of(frame).assign(task=ALL_TASKS)
    rounds["range"] = in_ranges(rounds["position"], edges)
    depths = depths_of(rounds).assign(task=ALL_TASKS)
    found = [
        *_cells(BY_TASK, texts, None, FIGURES, _verdicts),
        *_cells(BY_LENGTH, texts, "length", (TAU, SPEED_UP)),
        *_cells(BY_DEPTH, depths, "depth", (SHARE,)),
        *_cells(BY_POSITION, rounds, "range", (EMITTED,)),
    ]
    cells = pd.DataFrame(found)
    for name, more in (("task", [ALL_TASKS]), ("method", [])):
        order = [*frame[name].cat.categories, *more]
        cells[name] = pd.Categorical(cells[name], order, ordered=True)
    return cells


def _nothing(rows: pd.DataFrame) -> Iterator[tuple[str, str]]:
    yield from ()


def _cells(
    table: str,
    rows: pd.DataFrame,
    group: str | None,
    figures: Sequence[Figure],
    words: Callable[[pd.DataFrame], Iterator[tuple[str, str]]] = _nothing,
) -> Iterator[dict[str, Any]]:
    """The figures of the rows that agree in block, temperature, task, method and group.

    A table without groups has a column for every figure and for every name of ``words``; one with
    groups has a column for each of them, and where there are several figures a table for each.
    """
    by = ["block", "temperature", "task", "method", *([group] if group else [])]
    for key, part in rows.groupby(by, observed=True):
        assert isinstance(key, tuple), "rows are grouped by several columns"
        names = dict(zip(by, key, strict=True))
        place = names.pop(group) if group else None
        for figure in figures:
            found = estimate(sums_by_unit(part, figure.columns), figure.of)
            if found is not None:
                yield {
                    "table": f"{table}: {figure.name}" if group and len(figures) > 1 else table,
                    **names,
                    "column": str(place) if group else figure.name,
                    "text": read_as(figure, found.value, found.low, found.high),
                    **asdict(found),
                }
        for name, text in words(part):
            yield {"table": table, **names, "column": name, "text": text}


def read_as(figure: Figure, value: float, low: float, high: float) -> str:
    """A figure and its interval in words."""
    text, ends = figure.words.format(value), (figure.words.format(low), figure.words.format(high))
    # An interval that rounds to the figure itself says nothing, as that of plain decoding's τ.
    return text if math.isnan(low) or {*ends} == {text} else f"{text} ({' to '.join(ends)})"


def _verdicts(rows: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """How many texts there are, whether they are plain decoding's, and if not, how they differ."""
    yield "texts", str(len(rows))
    verdicts, differs, gaps = (
        rows[name].dropna() for name in ("is_identical", "differs_at", "gap")
    )
    if len(verdicts):
        yield "identical", f"{int(verdicts.sum())} of {len(verdicts)}"
    if len(differs):
        yield "first differs at", f"token {differs.median():g}"
    if len(gaps):
        yield "widest gap", f"{gaps.max():.3g}"


def missing_or_doubtful(blocks: Sequence[Block], frame: pd.DataFrame) -> list[str]:
    """Everything that is doubtful, missing or left out, in sentences, the gravest first."""
    found = []
    for block in blocks:
        rows = frame[frame["block"] == block.label]
        of_block = (*_commits(block), *_sessions(rows), *_implausible(rows), *_absent(block, rows))
        found += [f"{block.label}: {sentence}" for sentence in of_block]
    for block in blocks:
        for run in block.runs:
            found += [f"{run.name}: {sentence}" for sentence in _of_run(run)]
    return found


def _commits(block: Block) -> Iterator[str]:
    """Figures that are compared and were measured with different code."""
    headers = [run.header for run in block.runs]
    starts = [each for header in headers for each in (header.provenance, *header.continued)]
    commits = sorted({str(each.get("commit", "unknown"))[:12] for each in starts})
    if len(commits) > 1:
        yield (
            f"measured at several commits ({', '.join(commits)}). Speeds compare only if no "
            "change between them affects speed."
        )


def _sessions(rows: pd.DataFrame) -> Iterator[str]:
    """Plain decoding that was timed in another run, or before the run was resumed."""
    plain = rows.loc[rows["method"] == PLAIN_METHOD, [*TEXT, "session"]]
    both = rows.merge(plain, on=TEXT, suffixes=("", "_of_plain"))
    apart = both.loc[both["session"] != both["session_of_plain"], "method"].astype(str)
    if len(apart):
        counts = apart.value_counts(sort=False)
        words = ", ".join(f"{method} ({counted(n, 'text')})" for method, n in counts.items())
        yield (
            f"plain decoding was timed in another session than {words}. The speed-ups hold only "
            "if the machine's load was the same; measure both in one session to be sure."
        )


def _implausible(rows: pd.DataFrame) -> Iterator[str]:
    """Speed-ups that speculation cannot give."""
    drafted = rows[rows["method"] != PLAIN_METHOD]
    by = ["temperature", "method", "task"]
    for (temperature, method, task), part in drafted.groupby(by, observed=True):
        gain, tau = SPEED_UP.value(part), TAU.value(part)
        if gain and tau and gain > TOLERANCE * tau:
            yield (
                f"{method} has a speed-up of {gain:.2f} at τ {tau:.2f} on {task}, "
                f"T = {temperature:g}. More than τ is no effect of speculation: plain decoding "
                "was timed under another load. Measure both again on an idle machine."
            )


def _absent(block: Block, rows: pd.DataFrame) -> Iterator[str]:
    """Samples that one method decoded and another did not, and figures that do not exist."""
    temperatures = sorted({value for run in block.runs for value in run.header.temperatures})
    texts = rows.assign(text=list(zip(rows["sample"], rows["seed"], strict=True)))
    for task in block.tasks:
        of_task = texts[texts["task"] == task]
        expected = set(of_task["text"])
        if not expected:
            yield f"task {task} has no sample at all."
            continue
        for temperature in temperatures:
            for method in block.methods:
                here = (of_task["temperature"] == temperature) & (of_task["method"] == method)
                lacking = expected - set(of_task.loc[here, "text"])
                if lacking:
                    yield (
                        f"{method} lacks {len(lacking)} of the {len(expected)} texts of {task} at "
                        f"T = {temperature:g} (the command that began the run continues it)."
                    )
        if of_task["unit"].nunique() < FEWEST:
            yield f"fewer than {FEWEST} independent samples of {task}: no interval."
        metric = metric_of(task)
        if metric is not None and (missing := METRICS[metric].missing):
            yield f"{task} has no score: {missing}."
    if PLAIN_METHOD not in block.methods:
        yield "plain decoding did not run, so that there is no speed-up."


def _of_run(run: Run) -> Iterator[str]:
    """What a run left out."""
    if run.torn:
        yield (
            f"the last line was cut short in writing ({run.torn} bytes) and is not counted; the "
            "run measures it again when it continues."
        )
    for (task, reason), number in Counter((s.task, s.reason) for s in run.skipped).items():
        yield f"{counted(number, 'sample')} of {task} skipped: {reason}."
