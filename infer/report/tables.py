"""The tables of a report: every section divides rows of the frame by bodies, rows and groups.

:data:`SECTIONS` has them in their order. The layouts follow the LongSpec paper (Tables 1 and 4,
Figures 3, 5 and 7) and SpecExtend (Table 2). A finished table is a data frame with a row for every
cell that has a figure.
"""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from longspec_jax.generation.result import ACCEPTANCE_DEFINITION

from ..eval.scores import METRICS
from .frame import (
    DRAWS,
    FEWEST,
    LEVEL,
    Estimate,
    Of,
    beside,
    difference,
    estimate,
    gain,
    in_ranges,
    quotient,
    rounds_of,
    sums_by_unit,
    temperature_words,
    value_of,
)

PAPER_EDGES = (0, 5_000, 10_000, 15_000, 20_000, 25_000, 32_000)
"""Ends of the ranges of lengths in the LongSpec paper's Table 4."""
EDGES = (*PAPER_EDGES, 64_000, 128_000, 256_000, 512_000, 1_024_000)
DEFINITIONS = {
    "τ": f"{ACCEPTANCE_DEFINITION}; sums over samples",
    "tokens/s": "tokens of the decode rounds / their seconds, without prefill, the token drawn "
    "from it, compilation and detokenisation; sums over samples; of a batch all rows together",
    "speed-up": "tokens/s / tokens/s of plain decoding by this library (its own flash decoding, "
    "not an eager implementation), on the same samples and seeds",
    "draft, target, verify time": "the drafter proposes a tree; the target's forward over it; "
    "draws, acceptance, commit, drafter update and the host in between. They are measured in a "
    "run of its own that waits for every part, so their sum exceeds an untouched round",
    "small figures": f"{LEVEL:.0%} bootstrap intervals (expanded percentile, "
    f"{DRAWS} resamples of the samples). All seeds of a sample, and all rows that ever "
    f"shared a call, are resampled together. Fewer than {FEWEST} samples have no "
    "interval",
}
"""The figures of all tables, printed once in a report."""


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table."""

    text: str
    interval: str = ""
    """As it is read; empty without one."""
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    samples: int | None = None
    bold: bool = False
    """Whether it stands out, in the sense that the table's notes give."""


@dataclass(frozen=True)
class Figure:
    """A column of numbers: a function of the sums of columns of the frame."""

    name: str
    columns: tuple[str, ...]
    words: Callable[[float], str]
    of: Of = quotient
    neutral: float = math.nan
    """A value; figures whose interval excludes it are bold."""

    def value(self, rows: pd.DataFrame) -> float | None:
        """The figure of some rows; None if there is none."""
        return value_of(sums_by_unit(rows, self.columns), self.of)

    def cell(self, rows: pd.DataFrame) -> Cell | None:
        """The figure of some rows, with its interval; None if there is none."""
        found = estimate(sums_by_unit(rows, self.columns), self.of)
        return None if found is None else shown(found, self.words, self.neutral)


def shown(found: Estimate, words: Callable[[float], str], neutral: float = math.nan) -> Cell:
    """A figure as a cell."""
    text, interval = words(found.value), ""
    if not math.isnan(found.low):
        ends = words(found.low), words(found.high)
        # An interval that rounds to the figure itself says nothing, as that of plain decoding's τ.
        interval = " to ".join(ends) if {*ends} != {text} else ""
    bold = neutral < found.low or neutral > found.high
    return Cell(text, interval, found.value, found.low, found.high, found.samples, bold)


@dataclass(frozen=True)
class Words:
    """A column of texts."""

    name: str
    text: Callable[[pd.DataFrame], str]
    """Empty if there is nothing to say."""

    def cell(self, rows: pd.DataFrame) -> Cell | None:
        """The text about some rows; None if there is none."""
        text = self.text(rows)
        return Cell(text) if text else None


@dataclass(frozen=True)
class Chart:
    """What the charts of a table show: of every body, a series for every row."""

    unit: str
    place_unit: str = ""
    """What the names along the other axis are; empty if they say it."""
    is_joined: bool = True
    """Whether lines join the points of a series."""
    level: float = math.nan
    """A value to compare with, drawn as a line across."""
    of: tuple[str, str] | None = None
    """Section and column to draw, whose places are its groups; all columns of the table if None."""


@dataclass(frozen=True)
class Section:
    """A question of the report: how its tables divide rows, and the charts of them.

    ``body``, ``row`` and ``group`` name columns of the rows, whose values head the table's.
    """

    title: str
    caption: str
    columns: Sequence[Figure | Words]
    group: str = ""
    """Empty for one group of columns."""
    row: str = "method"
    body: str = "block"
    heading: str | None = None
    """Of the one group; or of all groups, each of which then is the one column of its rows."""
    rows: Callable[[pd.DataFrame, Sequence[int]], pd.DataFrame] = lambda frame, edges: frame
    """What is divided, from the frame and the edges of ranges of lengths."""
    notes: tuple[str, ...] = ()
    """What this table alone has to explain."""
    corner: str = "method"
    """Heading of the rows' names."""
    marks_best: bool = False
    """Whether the greatest figure of a column is bold."""
    at_each_temperature: bool = True
    """Whether there is a table for every temperature."""
    chart: Chart | None = None


@dataclass(frozen=True)
class Table:
    """A finished table."""

    key: str
    caption: str
    section: Section
    cells: pd.DataFrame = field(repr=False)
    """Columns ``body``, ``row``, ``group``, ``column``, and the fields of :class:`Cell`."""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The group and the name of every column, in their order."""
        ordered = self.cells.sort_values("place", kind="stable")
        return list(dict.fromkeys(zip(ordered["group"], ordered["column"], strict=True)))

    @property
    def bodies(self) -> dict[str, dict[str, dict[tuple[str, str], Any]]]:
        """The cells by body, by row, and by group and column."""
        found: dict[str, dict[str, dict[tuple[str, str], Any]]] = {}
        for cell in self.cells.itertuples():
            row = found.setdefault(str(cell.body), {}).setdefault(str(cell.row), {})
            row[str(cell.group), str(cell.column)] = cell
        return found


def tables_of(key: str, frame: pd.DataFrame, edges: Sequence[int]) -> list[Table]:
    """The tables of a section, as far as they have a figure."""
    section = SECTIONS[key]
    if not section.at_each_temperature:
        tables = [Table(key, section.caption, section, _cells(section, frame, edges))]
    else:
        tables = [
            Table(
                slug(key, temperature),
                f"{section.caption}, {temperature_words(temperature)}",
                section,
                _cells(section, frame[frame["temperature"] == temperature], edges),
            )
            for temperature in sorted(frame["temperature"].unique())
        ]
    return [table for table in tables if len(table.cells)]


def _cells(section: Section, frame: pd.DataFrame, edges: Sequence[int]) -> pd.DataFrame:
    """The cells of a table that have a figure, row by row."""
    rows = section.rows(frame, edges).assign(one=section.heading or "")
    group = section.group or "one"
    groups = [each for each, _ in rows.groupby(group, observed=True)]
    found = []
    by = [section.body, section.row, group]
    for (body, row, each), part in rows.groupby(by, observed=True):
        for number, column in enumerate(section.columns):
            cell = column.cell(part)
            if cell is not None:
                heads = (each, column.name) if section.heading is None else (section.heading, each)
                place = {
                    "body": str(body),
                    "row": str(row),
                    "group": str(heads[0]),
                    "column": str(heads[1]) if section.group else column.name,
                    "place": groups.index(each) * len(section.columns) + number,
                }
                found.append({**place, **asdict(cell)})
    cells = pd.DataFrame(found)
    if section.marks_best and found:
        for _, values in cells.groupby(["body", "group", "column"])["value"]:
            if values.count() > 1:
                cells.loc[values.idxmax(), "bold"] = True
    return cells


def slug(*words: object) -> str:
    """A name for links within a page and for files."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, words)).lower()).strip("-")


two_digits = "{:.2f}".format
times = "{:.2f}×".format
signed = "{:+.2f}".format


def rate(value: float) -> str:
    """Tokens per second, with three digits at least."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Seconds, to the millisecond if they are few."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %"


def milliseconds(value: float) -> str:
    """Seconds as milliseconds."""
    return f"{1000 * value:.2f}"


def hundredfold(value: float) -> str:
    """A score from 0 to 1, as papers print it."""
    return f"{100 * value:.1f}"


TOKENS, WITH_PREFILL = ("tokens", "seconds"), ("new_tokens", "all_seconds")
OF_PLAIN = ("tokens_other", "seconds_other")
"""Those of plain decoding; in pairs of methods those of the second."""
TAU = Figure("τ", ("tokens", "passes"), two_digits)
SPEED = Figure("tokens/s", TOKENS, rate)
SPEED_UP = Figure("speed-up", (*TOKENS, *OF_PLAIN), times, of=gain)
PARTS = (
    Figure("draft time", ("draft_s", "parts"), milliseconds),
    Figure("target time", ("verify_s", "parts"), milliseconds),
    Figure("verify time", ("other_s", "parts"), milliseconds),
)
"""By the names that the LongSpec paper's Table 4 gives them."""


def _span(figure: Figure) -> Words:
    """The least and the greatest of the tasks' figures."""

    def text(rows: pd.DataFrame) -> str:
        found = [figure.value(each) for _, each in rows.groupby("task", observed=True)]
        values = sorted(value for value in found if value is not None)
        ends = [figure.words(value) for value in (*values[:1], *values[-1:])]
        return " to ".join(dict.fromkeys(ends))

    return Words(figure.name, text)


def _identical(rows: pd.DataFrame) -> str:
    verdicts = rows["is_identical"].dropna()
    return f"{int(verdicts.sum())} of {len(verdicts)}" if len(verdicts) else ""


def _identical_share(rows: pd.DataFrame) -> str:
    verdicts = rows["is_identical"].dropna().astype(bool)
    # Rounded down: never 100 % unless all are identical.
    share = math.floor(10_000 * verdicts.sum() / len(verdicts)) / 100 if len(verdicts) else 0
    return f"{share:.4g} %" if len(verdicts) else ""


def _first_difference(rows: pd.DataFrame) -> str:
    found = rows["differs_at"].dropna()
    return f"token {found.median():g}" if len(found) else ""


def _widest_gap(rows: pd.DataFrame) -> str:
    gaps = rows["gap"].dropna()
    return f"{gaps.max():.3g}" if len(gaps) else ""


def _pairs(rows: pd.DataFrame, edges: Sequence[int]) -> pd.DataFrame:
    """Every two methods; the later one first, since others are compared with plain decoding."""
    pairs = beside(rows, rows)
    pairs = pairs[pairs["method"].cat.codes > pairs["method_other"].cat.codes]
    names = pairs["method"].astype(str) + " : " + pairs["method_other"].astype(str)
    both = itertools.combinations(rows["method"].cat.categories, 2)
    known = [f"{later} : {earlier}" for earlier, later in both]
    return pairs.assign(pair=pd.Categorical(names, known, ordered=True))


def _depths(rows: pd.DataFrame, edges: Sequence[int]) -> pd.DataFrame:
    """A row for every depth, with the rounds of a unit that accepted a draft token there."""
    by = ["block", "method", "unit", "accepted"]
    counts = rounds_of(rows).groupby(by, observed=True, as_index=False, sort=False)["rounds"].sum()
    deepest = int(counts["accepted"].max()) if len(counts) else 0
    found = counts.merge(pd.DataFrame({"depth": range(1, deepest + 1)}), how="cross")
    return found.assign(reached=found["rounds"].where(found["accepted"] >= found["depth"], 0))


def _positions(rows: pd.DataFrame, edges: Sequence[int]) -> pd.DataFrame:
    rounds = rounds_of(rows)
    return rounds.assign(range=in_ranges(rounds["position"], edges))


SECTIONS = {
    "brief": Section(
        "In brief",
        "In brief: from the worst task to the best",
        (_span(SPEED_UP), _span(TAU), _span(SPEED)),
        group="at",
        notes=("The least and the greatest figure of any task.",),
        at_each_temperature=False,
        chart=Chart("speed-up", is_joined=False, level=1.0, of=("main", "speed-up")),
    ),
    "lossless": Section(
        "Losslessness",
        "Is the text that of plain decoding?",
        (
            Words("identical", _identical),
            Words("share", _identical_share),
            Words("first differs at", _first_difference),
            Words("widest gap", _widest_gap),
        ),
        group="at",
        notes=(
            "Identical: equal, token for token, to plain decoding of the same sample, temperature "
            "and seed; of the texts that were compared.",
            "In float32 all are, and in bfloat16 and float16 where the device's kernels add in one "
            "order. Elsewhere sums of another shape may flip a near-tie. Widest gap: how much "
            "plain decoding's own scores prefer its token at the first difference, noise and "
            "temperature included; the greatest of the texts whose gap is known. First differs at: "
            "the median of the texts that differ.",
        ),
        at_each_temperature=False,
    ),
    "main": Section(
        "Tasks and methods",
        "τ, speed and speed-up by task",
        (TAU, SPEED, SPEED_UP),
        group="task",
        notes=("LongSpec, Table 1 and Figure 3. Bold: the best of a column.",),
        marks_best=True,
    ),
    "pairs": Section(
        "Methods against each other",
        "Methods against each other on the same samples",
        (
            Figure("speed ratio", (*TOKENS, *OF_PLAIN), times, of=gain, neutral=1),
            Figure(
                "τ difference",
                ("tokens", "passes", "tokens_other", "passes_other"),
                signed,
                of=difference,
                neutral=0,
            ),
        ),
        group="task",
        row="pair",
        rows=_pairs,
        notes=(
            "Speed ratio: tokens/s of the first method / that of the second. τ difference: τ of "
            "the first minus that of the second. Both are over the samples and seeds that both "
            "decoded, and a resample takes a sample for both methods.",
            "Bold: the interval excludes 1, or 0. Of many pairs some do by chance.",
        ),
        corner="first : second",
    ),
    "lengths": Section(
        "Length of the prompt",
        "By the length of the prompt in tokens",
        (Words("samples", lambda rows: str(len(rows))), TAU, SPEED, SPEED_UP, *PARTS),
        group="length",
        body="task_and_block",
        notes=(
            "LongSpec, Table 4; SpecExtend, Table 2, whose own τ counts accepted draft tokens "
            "alone and is smaller by one. Ranges without a sample are left out. Draft, target and "
            "verify time: milliseconds per round.",
        ),
    ),
    "depth": Section(
        "Acceptance by depth",
        "Acceptance by depth",
        (Figure("share", ("reached", "rounds"), percent),),
        group="depth",
        heading="rounds that accept a draft token at depth",
        rows=_depths,
        notes=(
            "Share of all rounds whose accepted path reaches the depth. One plus the sum of a line "
            "is τ, except for last rounds that end inside the draft. A share / the one before is "
            "the chance that a path continues.",
        ),
        chart=Chart("share of rounds", "depth"),
    ),
    "context": Section(
        "Acceptance along the context",
        "Acceptance by position in the context",
        (Figure("τ", ("emitted", "rounds"), two_digits),),
        group="range",
        heading="τ of rounds at position",
        rows=_positions,
        notes=(
            "τ of the rounds whose first new token stands in the range, counted from the beginning "
            "of the prompt.",
        ),
        chart=Chart("τ", "position"),
    ),
    "parts": Section(
        "Parts of a round",
        "Where the time of a round goes",
        (
            *PARTS,
            Figure("their sum", ("parts_s", "parts"), milliseconds),
            Figure("untouched round", ("untouched_s", "untouched_rounds"), milliseconds),
        ),
        heading="ms per round",
        notes=(
            "LongSpec, Figure 5, without its split of the target's time into attention and the "
            "rest. Untouched round: decode seconds / rounds of the run that all other tables show.",
        ),
        chart=Chart("seconds per round", is_joined=False),
    ),
    "batches": Section(
        "Batches",
        "Throughput by batch",
        (SPEED,),
        group="batch_name",
        body="task_and_condition",
        heading="tokens/s at batch",
        notes=("LongSpec, Figure 7. The last call of a run may have fewer rows.",),
        chart=Chart("tokens/s", "batch"),
    ),
    "quality": Section(
        "Quality",
        "Quality of the answers",
        (Figure("score", ("score", "texts"), hundredfold),),
        group="scored",
        heading="",
        notes=(
            "100 x the mean over texts of the best score against any reference. A lossless method "
            "has plain decoding's score; only texts that are not identical differ.",
            *(f"{metric.name}: {metric.meaning}." for metric in METRICS.values()),
        ),
    ),
    "times": Section(
        "What a user waits for",
        "Seconds, and speed with the prefill",
        (
            Words("texts", lambda rows: str(len(rows))),
            Words("prompt tokens", lambda rows: f"{rows['prompt_tokens'].mean():.0f}"),
            Words("new tokens", lambda rows: f"{rows['new_tokens'].mean():.0f}"),
            Figure("prefill (s)", ("prefill_share", "texts"), seconds),
            Figure("decoding (s)", ("decode_share", "texts"), seconds),
            SPEED,
            Figure("tokens/s with prefill", WITH_PREFILL, rate),
            Figure(
                "speed-up with prefill",
                (*WITH_PREFILL, "new_tokens_other", "all_seconds_other"),
                times,
                of=gain,
            ),
            Figure("ended by a stop token", ("stopped", "texts"), percent),
        ),
        body="task_and_block",
        notes=(
            "Tokens and seconds are means of a text; of a batch, a row's share of its call. "
            "Compilation and detokenisation are excluded.",
            "With prefill: all new tokens / seconds of prefill and decoding. Spec-Bench counts so "
            "too, but averages the rates of questions.",
        ),
    ),
}
"""What every section of a report shows, by keys."""
