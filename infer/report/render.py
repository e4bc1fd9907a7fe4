"""A report as files: one HTML page that needs nothing else, Markdown, and CSV.

Texts of models and names from files are escaped, and reach the page's script as data only.
"""

import base64
import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
from markupsafe import Markup

from longspec_jax import files

from .charts import draw
from .report import Report
from .table import ABSENT, Cell, Table

TEMPLATE, STYLE, SCRIPT = "page.html.jinja", "page.css", "page.js"
NAME = "report"
"""Of the files in a folder."""
CSV_COLUMNS = tuple("table caption body row group column text value low high samples".split())
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that a spreadsheet would compute."""
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")
"""What Markdown, or HTML within it, would read as more than itself."""


def html(report: Report) -> str:
    """The whole page: style, script and charts are within it."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = _beside(STYLE), _beside(SCRIPT)
    return environment.from_string(_beside(TEMPLATE)).render(
        report=report,
        draw=draw,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(script)}",
    )


def _beside(name: str) -> str:
    """A file beside this one, wherever it is installed."""
    return (Path(__file__).parent / name).read_text("utf-8")


def _digest(text: str) -> str:
    """What allows a browser this script or style, and no other."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def markdown(report: Report) -> str:
    """All tables; charts and case studies are in the page alone."""
    return "\n".join(_markdown_lines(report)) + "\n"


def _markdown_lines(report: Report) -> Iterator[str]:
    yield f"# {_plain(report.title)}"
    yield ""
    yield from (f"- **{_plain(name)}**: {_plain(text)}." for name, text in report.definitions)
    for section in report.sections:
        if section.tables:
            yield from ("", f"## {_plain(section.title)}")
        for table in section.tables:
            yield from ("", f"**{_plain(table.caption)}**", "", *_markdown_table(table))
            yield from ["", *(f"- {_plain(note)}" for note in table.notes)] if table.notes else ()
    yield from ("", "## What is missing", "")
    yield from (f"- {_plain(sentence)}" for sentence in report.missing or ("Nothing.",))
    yield from ("", "## Where it is from")
    for source in report.sources:
        yield from ("", f"### {_plain(source.name)}", "")
        yield from (f"- {_plain(name)}: {_plain(value)}" for name, value in source.facts)


def _markdown_table(table: Table) -> Iterator[str]:
    """Markdown has one line of headings and no bodies: their names go into the rows."""
    names = [f"{group}: {name}" if group else name for group, name in table.columns]
    several = len(table.bodies) > 1
    heads = [*([""] if several else []), table.corner, *names]
    yield _row(map(_plain, heads))
    yield _row(["---"] * (len(heads) - len(names)) + ["---:"] * len(names))
    for body in table.bodies:
        for line in body.lines:
            first = [_plain(body.name)] if several else []
            yield _row([*first, _plain(line.name), *map(_markdown_cell, line.cells)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: Cell) -> str:
    text = f"**{_plain(cell.text)}**" if cell.bold else _plain(cell.text)
    return f"{text} ({_plain(cell.interval)})" if cell.interval else text


def _plain(text: str) -> str:
    """A text that reads as itself, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def csv_text(report: Report) -> str:
    """All figures of all tables, one per line; figures that do not exist have no line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in (table for section in report.sections for table in section.tables):
        for body in table.bodies:
            for line in body.lines:
                for (group, column), cell in zip(table.columns, line.cells, strict=True):
                    if cell.text != ABSENT:
                        names = (table.key, table.caption, body.name, line.name, group, column)
                        writer.writerow([*map(_harmless, (*names, cell.text)), *_numbers(cell)])
    return out.getvalue()


def _numbers(cell: Cell) -> tuple[float | None, ...]:
    found = cell.estimate
    return (None,) * 4 if found is None else (found.value, found.low, found.high, found.samples)


def _harmless(text: str) -> str:
    """A text that a spreadsheet shows as it is."""
    return f"'{text}" if text.startswith(DANGEROUS) else text


class Format(NamedTuple):
    """A kind of file."""

    text: Callable[[Report], str]
    mark: str
    """What stands near the beginning of every report of this kind."""


FORMATS: Mapping[str, Format] = {
    ".html": Format(html, "<title>Evaluation of "),
    ".md": Format(markdown, "# Evaluation of "),
    ".csv": Format(csv_text, ",".join(CSV_COLUMNS)),
}
"""By the end of a file's name."""


def targets(out: str) -> tuple[Path, ...]:
    """The files that a report goes to, checked to be writable before anything is computed.

    Raises:
      ValueError: for a file of another format, one that is no report, and an unwritable place.
    """
    path = Path(out).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir() or not suffix:
        found = tuple(path / f"{NAME}{each}" for each in FORMATS)
        try:
            path.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise ValueError(f"--out={out}: its folder does not exist; make it first") from None
        except OSError as error:
            raise ValueError(
                f"--out={out} cannot be written ({error.strerror}); name another place"
            ) from None
    elif suffix in FORMATS:
        found = (path,)
    else:
        raise ValueError(
            f"--out={out} ends in {suffix}; name a folder, or a file that ends in "
            f"{', '.join(FORMATS)}"
        )
    for each in found:
        files.writable(each, f"--out={each}", of_results=False)
        if each.exists() and not _is_report(each):
            raise ValueError(
                f"--out={out}: {each} exists and is no report; move it, or name another place"
            )
    return found


def _is_report(path: Path) -> bool:
    """Whether a file is empty or an earlier report."""
    with path.open("rb") as file:
        beginning = file.read(1024).decode("utf-8", "replace")
    return not beginning or FORMATS[path.suffix.lower()].mark in beginning


def write(report: Report, paths: Sequence[Path]) -> None:
    """Write every file, whole or not at all.

    Raises:
      OSError: if one cannot be written.
    """
    for path in paths:
        text = FORMATS[path.suffix.lower()].text(report)
        # Half a character of a model's text becomes its escape.
        files.replace(path, text.encode("utf-8", "backslashreplace"))
