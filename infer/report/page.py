"""A report as files: one HTML page that needs nothing else, and CSV.

The page runs no script. Names from files are escaped.
"""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import base64
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from longspec_jax import files

from ..eval.records import PLAIN_METHOD, Run
from .frame import blocks_of, frame_of
from .tables import BY_TASK, DEFINITIONS, EDGES, SPEED_UP, cells_of, missing_or_doubtful

TEMPLATE = "page.html.jinja"
NAME = "report"
"""Of the files in a folder."""
ABSENT = "–"
"""Stands where there is no figure."""
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that a spreadsheet would compute."""
PLAIN_STYLE = ("#7d8590", "o")
COLOURS = "#2f81d8 #d9622b #2a9d4f #a855c7 #b08800 #1292a8 #e0405e".split()
"""Of the other methods."""
MARKS = "sD^vPXo"
"""So that series differ in more than colour."""
LETTER = 0.085
"""Inches that a letter takes in a chart, at most."""


@dataclass(frozen=True)
class Table:
    """A table of texts, and the chart of it."""

    title: str
    texts: pd.DataFrame
    """Indexed by task and method."""
    chart: str
    """An SVG file as a ``data:`` address."""
    words: str
    """What the chart shows, for readers who cannot see it."""


@dataclass(frozen=True)
class Report:
    """Everything that is written, in whatever form."""

    title: str
    sources: Mapping[str, Mapping[str, object]]
    """Names and values of what is known of every run, by the run's name."""
    cells: pd.DataFrame
    """Of :func:`.tables.cells_of`."""
    tables: Sequence[Table]
    missing: Sequence[str]


def report(runs: Sequence[Run], edges: Sequence[int] = EDGES) -> Report:
    """Compute a report.

    Args:
      runs: each with a sample.
      edges: of the ranges of prompt lengths, ascending from 0.
    """
    blocks = blocks_of(runs)
    frame = frame_of(blocks)
    cells = cells_of(frame, edges)
    methods = [*frame["method"].cat.categories]
    return Report(
        title=f"Evaluation of {', '.join(dict.fromkeys(run.header.target for run in runs))}",
        sources={run.name: source_of(run) for run in runs},
        cells=cells,
        tables=[*_tables(cells, styles_of(methods), len(blocks) > 1)],
        missing=missing_or_doubtful(blocks, frame),
    )


def source_of(run: Run) -> dict[str, object]:
    """Where, with what and how a run was made: the fields of its header, and its samples."""
    header = dataclasses.asdict(run.header)
    header |= header.pop("provenance")
    return {**header, "samples": len(run.samples)}


def styles_of(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and mark of every method."""
    drafting = [method for method in methods if method != PLAIN_METHOD]
    styles = {
        name: (COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)])
        for index, name in enumerate(drafting)
    }
    return {**styles, PLAIN_METHOD: PLAIN_STYLE}


def _tables(
    cells: pd.DataFrame, styles: Mapping[str, tuple[str, str]], several: bool
) -> Iterator[Table]:
    """The tables of a report, each of a block at a temperature."""
    by = ["table", "block", "temperature"]
    for (name, block, temperature), rows in cells.groupby(by, observed=True, sort=False):
        title = f"{name}, {block}" if several else str(name)
        title = f"{title}, T = {temperature:g}"
        columns = pd.Categorical(rows["column"], rows["column"].unique(), ordered=True)
        texts = rows.assign(column=columns).pivot_table(
            "text", ["task", "method"], "column", "first", observed=True
        )
        if name == BY_TASK:  # The tasks' speed-ups next to each other.
            drawn = rows[rows["column"] == SPEED_UP.name]
            drawn = drawn.assign(column=drawn["task"], task=SPEED_UP.name)
        else:
            drawn = rows
        chart, words = draw(title, drawn[drawn["value"].notna()], styles, name != BY_TASK)
        yield Table(title, texts.fillna(ABSENT), chart, words)


def draw(
    title: str, cells: pd.DataFrame, styles: Mapping[str, tuple[str, str]], joined: bool
) -> tuple[str, str]:
    """A chart of every task next to each other, points with their intervals, and all in words.

    Args:
      title: of the table.
      cells: with values; ``column`` says where along the axis, ``method`` which series.
      styles: colour and mark by the names of methods.
      joined: whether lines join the points of a series.
    """
    panels = [*cells.groupby("task", observed=True, sort=False)]
    if not panels:
        return "", ""
    width, longest = max(6.0, 4.5 * len(panels)), max(map(len, cells["method"].astype(str)))
    in_line = max(1, int(width / (0.8 + LETTER * longest)))
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    words = []
    for axis, (task, rows) in zip(axes, panels, strict=True):
        places = [*dict.fromkeys(rows["column"].astype(str))]
        series = [*rows.groupby("method", observed=True)]
        for number, (method, part) in enumerate(series):
            colour, mark = styles[str(method)]
            aside = 0.09 * (number - (len(series) - 1) / 2)
            where = [places.index(each) + aside for each in part["column"].astype(str)]
            line = "-" if joined else "none"
            axis.plot(
                where, part["value"], color=colour, marker=mark, linestyle=line, label=str(method)
            )
            # An interval need not hold its figure, as error bars would have to.
            axis.vlines(where, part["low"], part["high"], colors=colour, linewidth=1.0)
            said = ", ".join(
                f"{c} {v:.3g}" for c, v in part[["column", "value"]].itertuples(index=False)
            )
            words.append(f"{task}, {method}: {said}")
        axis.set_xticks(range(len(places)), places, parse_math=False, rotation=20)
        axis.set_xlim(-0.5, len(places) - 0.5)
        axis.set_title(str(task), parse_math=False, fontsize="medium")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    figure.legend(handles=[*lines.values()], loc="outside lower center", ncols=in_line)
    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": title}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    address = f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}"
    return address, f"{title}. {'; '.join(words)}."


def html(report: Report) -> str:
    """The whole page: style and charts are within it."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((Path(__file__).parent / TEMPLATE).read_text("utf-8"))
    return template.render(report=report, definitions=DEFINITIONS)


def csv_text(report: Report) -> str:
    """All figures of all tables, one a line."""
    cells = report.cells.astype({"block": str, "task": str, "method": str, "samples": "Int64"})
    texts = cells.select_dtypes(exclude="number").columns
    cells[texts] = cells[texts].map(_harmless)
    return cells.to_csv(index=False, lineterminator="\n")


def _harmless(text: object) -> object:
    """A text that a spreadsheet shows as it is."""
    return f"'{text}" if str(text).startswith(DANGEROUS) else text


FORMATS: Mapping[str, Callable[[Report], str]] = {
    ".html": html,
    ".csv": csv_text,
}
"""By the end of a file's name."""


def targets(out: str) -> list[Path]:
    """The files that a report goes to, checked to be writable before anything is computed.

    Raises:
      ValueError: for a file of another format, and an unwritable place.
    """
    path = Path(out).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir() or not suffix:
        files.make_folder(path, "--out")
        found = [path / f"{NAME}{each}" for each in FORMATS]
    elif suffix in FORMATS:
        found = [path]
    else:
        raise ValueError(
            f"--out={out} ends in {suffix}; name a folder, or a file that ends in "
            f"{', '.join(FORMATS)}"
        )
    for each in found:
        files.writable(each, f"--out={each}", of_results=False)
    return found


def write(report: Report, paths: Sequence[Path]) -> None:
    """Write every file, whole or not at all.

    Raises:
      OSError: if one cannot be written.
    """
    for path in paths:
        text = FORMATS[path.suffix.lower()](report)
        files.replace(path, text.encode("utf-8", "backslashreplace"))
