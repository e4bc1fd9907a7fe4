"""A report as Markdown: its tables, what is missing, and where it is from."""

import re
from collections.abc import Iterable, Iterator

from .sections import Report
from .table import Body, Cell, Table

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")
"""What Markdown, or HTML within it, would read as more than itself."""


def markdown(report: Report) -> str:
    """The whole text; charts and case studies are in the page alone."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {_plain(report.title)}"
    yield from ("", f"Figures in brackets are intervals: {_plain(report.intervals)}.")
    for section in report.sections:
        if not section.tables:
            continue
        yield from ("", f"## {_plain(section.title)}")
        for table in section.tables:
            yield from ("", f"**{_plain(table.caption)}**", "")
            yield from _table(table)
            yield ""
            yield from (f"- {_plain(note)}" for note in table.notes)
    yield from ("", "## What is missing", "")
    yield from (f"- {_plain(sentence)}" for sentence in report.missing or ("Nothing.",))
    yield from ("", "## Where it is from")
    for source in report.sources:
        yield from ("", f"### {_plain(source.name)}", "")
        yield from (f"- {_plain(name)}: {_plain(value)}" for name, value in source.facts)


def _table(table: Table) -> Iterator[str]:
    """Markdown has one line of headings and no bodies: their names go into the rows."""
    names = [
        f"{group.name}: {column}" if group.name else column
        for group in table.groups
        for column in group.columns
    ]
    heads = [*["" for _ in table.bodies[1:2]], table.corner, *names]
    yield _row(map(_plain, heads))
    yield _row(["---"] * (len(heads) - len(names)) + ["---:"] * len(names))
    for body in table.bodies:
        yield from _body(body, len(table.bodies) > 1)


def _body(body: Body, named: bool) -> Iterator[str]:
    for line in body.lines:
        first = [_plain(body.name)] if named else []
        yield _row([*first, _plain(line.name), *map(_cell, line.cells)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = f"**{_plain(cell.text)}**" if cell.bold else _plain(cell.text)
    return f"{text} ({_plain(cell.interval)})" if cell.interval else text


def _plain(text: str) -> str:
    """A text that reads as itself, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
