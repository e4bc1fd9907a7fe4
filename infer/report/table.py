"""A table: its columns as a specification, and its cells as they are read.

Every table of a report is a :class:`TableSpec`: groups of columns, each a function of the records
that a row selects. :func:`build` evaluates it, and leaves out rows and bodies without a figure.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ..eval.records import SampleRecord
from .blocks import Block, all_tasks, all_temperatures
from .figures import Estimate, Selection

ABSENT = "–"
"""Stands where there is no figure."""
Format = Callable[[float], str]


@dataclass(frozen=True)
class Cell:
    """One figure."""

    text: str
    interval: str = ""
    """As it is read; empty without one."""
    estimate: Estimate | None = None
    bold: bool = False
    """Whether it stands out, in the sense that the table's notes give."""


@dataclass(frozen=True)
class Figure:
    """A column of numbers."""

    name: str
    estimate: Callable[[Selection], Estimate | None]
    words: Format
    neutral: float | None = None
    """A value; figures whose interval excludes it are bold."""

    def cell(self, selection: Selection) -> Cell:
        """The figure of some records."""
        value = self.estimate(selection)
        bold = value is not None and self.neutral is not None and value.excludes(self.neutral)
        return shown(value, self.words, bold)


@dataclass(frozen=True)
class Words:
    """A column of texts."""

    name: str
    text: Callable[[Selection], str]
    """Empty if there is nothing to say."""

    def cell(self, selection: Selection) -> Cell:
        """The text about some records."""
        return Cell(self.text(selection) or ABSENT)


Column = Figure | Words
Rows = Sequence[tuple[str, Selection]]
"""Names, of rows or bodies, and the records of each."""
Groups = Sequence[tuple[str, Sequence[Column], Callable[[Selection], Selection]]]
"""Headings of groups, their columns, and how each narrows the records of a row."""


@dataclass(frozen=True)
class View:
    """The blocks of a report at one temperature."""

    blocks: Sequence[Block]
    temperature: float
    edges: Sequence[int]
    """Of ranges of lengths, ascending from 0."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks of all blocks."""
        return all_tasks(self.blocks)

    @cached_property
    def records(self) -> list[SampleRecord]:
        """The records of all blocks at the temperature."""
        records = (record for block in self.blocks for record in block.records)
        return [record for record in records if record.temperature == self.temperature]

    def by_task(self, *columns: Column) -> Groups:
        """The columns for every task."""
        return [(task, columns, partial(replace, task=task)) for task in self.tasks]

    def by_temperature(self, *columns: Column) -> Groups:
        """The columns for every temperature."""
        return [
            (temperature_words(value), columns, partial(replace, temperature=value))
            for value in all_temperatures(self.blocks)
        ]

    def one_group(self, name: str, *columns: Column) -> Groups:
        """The columns under one heading."""
        return [(name, columns, lambda records: records)]


def by_block(view: View) -> Rows:
    """A body for every block."""
    return [(block.label, Selection(block, view.temperature)) for block in view.blocks]


def by_task_and_block(view: View) -> Rows:
    """A body for every task and block."""
    return [
        (
            f"{task}, {block.label}" if len(view.blocks) > 1 else task,
            Selection(block, view.temperature, task=task),
        )
        for task in view.tasks
        for block in view.blocks
    ]


def all_methods(records: Selection) -> Rows:
    """A row for every method."""
    return [(name, replace(records, method=name)) for name in records.block.methods]


def speculative_methods(records: Selection) -> Rows:
    """A row for every method but plain decoding."""
    return [(name, replace(records, method=name)) for name in records.block.speculative]


@dataclass(frozen=True)
class ChartSpec:
    """What the charts of a table show: of every body, a series for every row."""

    unit: str
    place_unit: str = ""
    """What the names along the other axis are; empty if they say it."""
    column: str | None = None
    """The column of every group to draw, whose places are the groups; all columns if absent."""
    joined: bool = True
    """Whether lines join the points of a series."""
    level: float | None = None
    """A value to compare with, drawn as a line across."""


@dataclass(frozen=True)
class TableSpec:
    """What a section of the report shows: a table, and the charts of it."""

    title: str
    caption: str
    groups: Callable[[View], Groups]
    notes: tuple[str, ...]
    """What this table alone has to explain."""
    bodies: Callable[[View], Rows] = by_block
    rows: Callable[[Selection], Rows] = all_methods
    """From the records of a body to those of its rows."""
    corner: str = "method"
    """Heading of the rows' names."""
    marks_best: bool = False
    """Whether the greatest figure of a column is bold."""
    at_each_temperature: bool = True
    """Whether there is a table for every temperature."""
    chart: ChartSpec | None = None


@dataclass(frozen=True)
class Group:
    """Headings of some columns of a finished table."""

    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Body:
    """Rows under a common heading."""

    name: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    """A finished table."""

    key: str
    caption: str
    corner: str
    groups: tuple[Group, ...]
    bodies: tuple[Body, ...]
    notes: tuple[str, ...]

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The group and the name of every column."""
        return tuple((group.name, name) for group in self.groups for name in group.columns)


def build(
    specs: Mapping[str, TableSpec], blocks: Sequence[Block], edges: Sequence[int]
) -> dict[str, list[Table]]:
    """The tables of every specification, as far as they have a figure."""
    views = [View(blocks, temperature, edges) for temperature in all_temperatures(blocks)]
    return {
        name: [
            table
            for view in (views if spec.at_each_temperature else views[:1])
            if (table := _build(name, spec, view)) is not None
        ]
        for name, spec in specs.items()
    }


def _build(name: str, spec: TableSpec, view: View) -> Table | None:
    groups = spec.groups(view)
    bodies = []
    for body, records in spec.bodies(view):
        lines = [_line(groups, *row) for row in spec.rows(records)]
        lines = [line for line in lines if any(cell.text != ABSENT for cell in line.cells)]
        if lines:
            bodies.append(Body(body, mark_best(lines) if spec.marks_best else tuple(lines)))
    if not bodies:
        return None
    end = f", {temperature_words(view.temperature)}" if spec.at_each_temperature else ""
    return Table(
        key=slug(name, view.temperature) if spec.at_each_temperature else name,
        caption=f"{spec.caption}{end}",
        corner=spec.corner,
        groups=tuple(
            Group(name, tuple(each.name for each in columns)) for name, columns, _ in groups
        ),
        bodies=tuple(bodies),
        notes=spec.notes,
    )


def _line(groups: Groups, name: str, records: Selection) -> Line:
    cells = (column.cell(narrow(records)) for _, columns, narrow in groups for column in columns)
    return Line(name, tuple(cells))


def mark_best(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Make the greatest figure of every column bold, if the column has more than one."""
    marked = [list(line.cells) for line in lines]
    names = [line.name for line in lines]
    for column in range(len(marked[0]) if marked else 0):
        values = {
            row: cell.estimate.value
            for row, cells in enumerate(marked)
            if (cell := cells[column]).estimate is not None
        }
        if len(values) > 1:
            best = max(values, key=lambda row: values[row])
            marked[best][column] = replace(marked[best][column], bold=True)
    return tuple(Line(name, tuple(cells)) for name, cells in zip(names, marked, strict=True))


def shown(estimate: Estimate | None, words: Format, bold: bool = False) -> Cell:
    """A figure as a cell."""
    if estimate is None:
        return Cell(ABSENT)
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        ends = words(estimate.low), words(estimate.high)
        # An interval that rounds to the figure itself says nothing, as that of plain decoding's τ.
        interval = " to ".join(ends) if {*ends} != {words(estimate.value)} else ""
    return Cell(words(estimate.value), interval, estimate, bold)


length: Format = "{:.2f}".format
"""Tokens per forward pass."""
times: Format = "{:.2f}×".format
"""A ratio of speeds."""
signed: Format = "{:+.2f}".format
"""A difference."""


def rate(value: float) -> str:
    """Tokens per second, with three digits at least."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Seconds, to the millisecond if they are few."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def milliseconds(value: float) -> str:
    """Seconds as milliseconds."""
    return f"{1000 * value:.2f}"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.1f} %"


def hundredfold(value: float) -> str:
    """A score from 0 to 1, as papers print it."""
    return f"{100 * value:.1f}"


def temperature_words(temperature: float) -> str:
    """A temperature as captions have it."""
    return f"T = {temperature:g}"


def slug(*words: object) -> str:
    """A name for links within a page and for files."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, words)).lower()).strip("-")
