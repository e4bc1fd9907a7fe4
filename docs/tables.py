"""Render the tables of results from their raw files: ``python docs/tables.py``.

A page says where a table belongs by ``<!-- table: NAME -->`` and ``<!-- end -->``. What stands
between the two is written by this command, and a test renders it again and compares. The tables
are described in ``docs/results/tables.toml``: raw files, the rows that are shown, and a template
for each column. The README's picture is drawn from the rows of its table.
"""

import json
import os
import re
import string
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FIGURE = ROOT / "docs" / "figures" / "speed.svg"
PAGES = (ROOT / "README.md", *sorted(RESULTS.parent.rglob("*.md")))
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DESCRIBED = tomllib.loads((RESULTS / "tables.toml").read_text())

Row = dict[str, Any]
Where = Mapping[str, Any]
"""Values of fields; a list holds several that may be."""


class Words(string.Formatter):
    """``str.format`` with the forms that tables need, such as ``3`` for significant digits."""

    def get_value(self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A field of a row; none where the row has no such field."""
        return kwargs.get(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Raise KeyError for a value that is missing."""
        match format_spec:
            case "nodes":
                return f"best {value}" if value else "all"
            case "draft":
                return "8 bits" if value else "bfloat16"
            case "options":
                return ", ".join(f"`{name}={each}`" for name, each in (value or {}).items())
            case "mesh":
                return ", ".join(f"`{axis}={size}`" for axis, size in value.items()) or "one GPU"
            case "axes":
                return f"`{value}`" if value else "one GPU"
        if value is None:
            raise KeyError(format_spec)
        match format_spec:
            case "shape":
                return DESCRIBED["names"].get(value, value)
            case "tree":
                return ",".join(map(str, value))
            case "k":
                if value < 1000:
                    return str(value)
                return f"{value / 1024 if value % 1024 == 0 else value / 1000:g}k"
            case "GB":
                values = value if isinstance(value, list) else [value]
                return " + ".join(f"{each / 1e9:.3g}" for each in values)
        if format_spec.isdigit():
            return f"{value:#.{format_spec}g}".rstrip(".")
        return format(value, format_spec)


def rows_of(name: str) -> list[Row]:
    """All rows of a raw file, each with its ``header``, its ``run`` and its place (``row``)."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    if "runs" in data:
        found = []
        for run, part in enumerate(data["runs"]):
            # A run of ``infer.decode`` is a row itself, and its rows are texts.
            rows = [part["setting"] | part] if "acceptance_definition" in part else part["rows"]
            found += [{"header": part["header"], **row, "run": run} for row in rows]
    elif "acceptance_definition" in data:
        found = [data["setting"] | data]
    elif "headers" in data:
        found = [{**row, "header": data["headers"][row["run"]]} for row in data["rows"]]
    else:
        rows = data.get("summary", data["rows"])
        found = [{**row, "header": data.get("header", data)} for row in rows]
    return [{"header": data, **row, "row": place, "file": name} for place, row in enumerate(found)]


def _matches(row: Row, where: Where) -> bool:
    return all(
        row.get(name) in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in where.items()
    )


def chosen_rows(table: Mapping[str, Any]) -> list[Row]:
    """The rows that a table shows, in its order.

    Where it names a ``baseline``, rows with tokens/s have ``gain``, over the plain step of the row
    of their line that matches it; those without such a row are left out.
    """
    rows = [
        row
        for file, where in table["rows"].items()
        for row in rows_of(file)
        if _matches(row, where)
    ]
    if "baseline" not in table:
        return rows
    steps = {
        _line_of(table, row): row["plain_ms_per_token"]
        for row in rows
        if _matches(row, table["baseline"])
    }
    faster = [
        {**row, "gain": row["tokens_per_second"] * steps[_line_of(table, row)] / 1e3}
        for row in rows
        if "tokens_per_second" in row and _line_of(table, row) in steps
    ]
    lines = {_line_of(table, row) for row in faster}
    plain = [
        {**row, "baseline_tokens_per_second": 1e3 / row["plain_ms_per_token"]}
        for row in rows
        if _matches(row, table["baseline"]) and _line_of(table, row) in lines
    ]
    return faster + plain


def _line_of(table: Mapping[str, Any], row: Row) -> tuple[str, ...]:
    """The fields in which the rows of one line agree."""
    return tuple(str(row.get(each)) for each in table.get("by", ()))


def render(name: str, page: Path) -> str:
    """A table as Markdown, and a line that says where it is from.

    Raises:
      KeyError: for a name that is not in ``tables.toml``.
      ValueError: for a column without a single figure.
    """
    table = DESCRIBED[name]
    columns = table["columns"]
    if isinstance(columns, str):
        columns = DESCRIBED["columns"][columns]
    rows = chosen_rows(table)
    lines: dict[Any, list[Row]] = {}
    for place, row in enumerate(rows):
        key = _line_of(table, row) or place
        lines.setdefault(key, []).append(row)
    cells = [[_cell(column, line) for column in columns.values()] for line in lines.values()]
    for header, column in zip(columns, zip(*cells, strict=True), strict=True):
        if not any(column):
            raise ValueError(f"table {name}: the column {header!r} is empty")
    head = [list(columns), ["---"] * len(columns)]
    return "\n".join(
        [*(f"| {' | '.join(line)} |" for line in (*head, *cells)), "", *_origin(rows, page)]
    )


def _cell(column: str | Mapping[str, Any], line: Sequence[Row]) -> str:
    """What a column shows of the rows of one line.

    A bare template is a name that the rows share. Otherwise all rows that match are shown, or the
    smallest and the largest figure (``to``), the mean (``mean``), or it and its standard error
    (``±``).
    """
    where = {} if isinstance(column, str) else {**column}
    template, join = where.pop("show", column), where.pop("join", " / ")
    shown = []
    for row in line:
        if _matches(row, where):
            try:
                shown.append(Words().vformat(template, (), row))
            except KeyError:  # The row has no such figure.
                continue
    if join == "to":
        shown = sorted(set(shown), key=float)
        return " to ".join([*shown[:1], *shown[1:][-1:]])
    if join == "mean" and shown:
        return f"{fmean(map(float, shown)):.2f}"
    if join == "±" and shown:
        values = [float(each) for each in shown]
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        return f"{fmean(values):+.3f}" + ("" if error is None else f" ± {error:.3f}")
    return join.join(dict.fromkeys(shown) if isinstance(column, str) else shown)


def _origin(rows: Sequence[Row], page: Path) -> Iterator[str]:
    """Links to the raw files, with device, and dates and commits of the rows that are shown.

    Files of one device, date and commit share a line.
    """
    links: dict[str, list[str]] = {}
    for file in dict.fromkeys(row["file"] for row in rows):
        days: dict[str, dict[str, None]] = {}
        devices: dict[str, list[int]] = {}
        for row in (row for row in rows if row["file"] == file):
            header = row["header"] | row["header"].get("provenance", {})
            devices.setdefault(header["device"], []).append(header.get("devices", 1))
            commit = row.get("commit", header["commit"])
            days.setdefault(row.get("date", header["date"])[:10], {})[commit[:7]] = None
        named = [
            device if max(counts) == 1 else f"{_range(counts)} x {device}"
            for device, counts in devices.items()
        ]
        when = "; ".join(f"{day} at {', '.join(commits)}" for day, commits in days.items())
        link = os.path.relpath(RESULTS / f"{file}.json", page.parent)
        links.setdefault(f"{', '.join(named)}, {when}", []).append(f"[{file}.json]({link})")
    for where, files in links.items():
        source = f"Raw: {', '.join(files)}, {where}."
        yield textwrap.fill(source, 100, break_long_words=False, break_on_hyphens=False)


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(high) if low == high else f"{low} to {high}"


def chart() -> str:
    """The README's picture: a bar for each speed of the table ``speed``."""
    table = DESCRIBED["speed"]
    lines: dict[tuple[str, ...], Row] = {}
    for row in chosen_rows(table):
        key = _line_of(table, row)
        lines[key] = row | lines.get(key, {})
    rows = list(lines.values())
    largest, drawn = max(row["tokens_per_second"] for row in rows), []
    for place, row in enumerate(rows):
        top = 44 + 46 * place
        name = Words().vformat("{shape:shape}, {context:k}", (), row)
        drawn.append(f'<text x="128" y="{top + 20}" text-anchor="end">{name}</text>')
        for field, color, note in (
            ("baseline_tokens_per_second", "#9aa0a6", ""),
            ("tokens_per_second", "#1a73e8", f" ({row['gain']:.1f}×)"),
        ):
            width = 400 * row[field] / largest
            drawn += [
                f'<rect x="136" y="{top}" width="{width:.0f}" height="15" fill="{color}"/>',
                f'<text x="{142 + width:.0f}" y="{top + 12}">{row[field]:.0f}{note}</text>',
            ]
            top += 16
    height = 50 + 46 * len(rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" width="640"',
            '  font-family="sans-serif" font-size="13" role="img">',
            "<title>Tokens per second on one H200, simulated acceptance</title>",
            f'<rect width="640" height="{height}" fill="#ffffff"/>',
            '<text x="136" y="26">tokens/s, one H200, simulated: '
            "fastest plain (grey), LongSpec (blue)</text>",
            *drawn,
            "</svg>\n",
        ]
    )


def written(page: Path) -> str:
    """A page with its tables rendered anew."""
    return BLOCK.sub(
        lambda block: f"{block[1]}{render(block[2], page)}\n{block[3]}", page.read_text()
    )


def main() -> None:
    """Write all tables and the chart, and name what has changed."""
    for path, text in [*((page, written(page)) for page in PAGES), (FIGURE, chart())]:
        if not path.is_file() or text != path.read_text():
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
