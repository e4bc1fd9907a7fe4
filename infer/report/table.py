"""A table as it is meant, apart from how it is written: names, figures, intervals, definitions."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from .intervals import Estimate

Each = TypeVar("Each")
ABSENT = "–"
"""Stands where there is no figure."""


@dataclass(frozen=True)
class Cell:
    """One figure."""

    text: str
    interval: str = ""
    """Its interval as it is read; empty without one."""
    estimate: Estimate | None = None
    bold: bool = False
    """Whether it stands out, in the sense that the table's notes say."""


@dataclass(frozen=True)
class Group:
    """Columns under a common heading."""

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
    """Empty where a table has one body."""
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    """A table with its definitions."""

    key: str
    """A name for links and for files."""
    caption: str
    corner: str
    """Heading of the rows' names."""
    groups: tuple[Group, ...]
    bodies: tuple[Body, ...]
    notes: tuple[str, ...]
    """What its figures mean, and what it lacks."""


Format = Callable[[float], str]


def shown(estimate: Estimate | None, words: Format, bold: bool = False) -> Cell:
    """A figure as a cell."""
    if estimate is None:
        return Cell(ABSENT)
    interval = ""
    if estimate.low is not None and estimate.high is not None:
        ends = words(estimate.low), words(estimate.high)
        # One that is no wider than what is shown says nothing, as that of plain decoding's τ.
        interval = " to ".join(ends) if {*ends} != {words(estimate.value)} else ""
    return Cell(words(estimate.value), interval, estimate, bold)


def said(text: str) -> Cell:
    """Words as a cell."""
    return Cell(text)


def length(value: float) -> str:
    """Tokens per pass."""
    return f"{value:.2f}"


def pace(value: float) -> str:
    """Tokens per second: three digits at least."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def times(value: float) -> str:
    """A ratio of speeds."""
    return f"{value:.2f}×"


def milliseconds(value: float) -> str:
    """Of a value in seconds."""
    return f"{1000 * value:.2f}"


def percent(value: float) -> str:
    """Of a share."""
    return f"{100 * value:.1f} %"


def signed(value: float) -> str:
    """A difference."""
    return f"{value:+.2f}"


def temperature_words(temperature: float) -> str:
    """As captions have it."""
    return f"T = {temperature:g}"


def lines(
    names: Iterable[str], parts: Iterable[Each], cells: Callable[[str, Each], Iterable[Cell]]
) -> tuple[Line, ...]:
    """A line for every name: the cells of all parts, such as temperatures or tasks, in a row."""
    parts = tuple(parts)
    return tuple(
        Line(name, tuple(cell for part in parts for cell in cells(name, part))) for name in names
    )


def mark_best(lines: Iterable[Line], columns: Iterable[int]) -> tuple[Line, ...]:
    """Mark the greatest figures of some columns, where there is more than one to choose from."""
    marked = [list(line.cells) for line in lines]
    names = [line.name for line in lines]
    for column in columns:
        values = {
            row: cell.estimate.value
            for row, cells in enumerate(marked)
            if (cell := cells[column]).estimate is not None
        }
        if len(values) > 1:
            best = max(values, key=lambda row: values[row])
            marked[best][column] = dataclasses.replace(marked[best][column], bold=True)
    return tuple(Line(name, tuple(cells)) for name, cells in zip(names, marked, strict=True))


def filled(body: Body) -> bool:
    """Whether a body has a figure at all."""
    return any(cell.text != ABSENT for line in body.lines for cell in line.cells)


def with_figures(tables: Iterable[Table]) -> list[Table]:
    """The tables that have a figure, without those of their bodies that have no line."""
    return [
        dataclasses.replace(table, bodies=tuple(body for body in table.bodies if body.lines))
        for table in tables
        if any(map(filled, table.bodies))
    ]


def slug(*words: object) -> str:
    """A name for links within a page and for files."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, words)).lower()).strip("-")
