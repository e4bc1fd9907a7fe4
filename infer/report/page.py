"""A report as files: one HTML page that needs nothing else, Markdown, and CSV.

The page runs no script. Texts of models and names from files are escaped.
"""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import io
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from longspec_jax import files
from longspec_jax.cli import counted

from ..eval.records import PLAIN_METHOD, RoundTree, Run, SampleRecord
from .frame import blocks_of, frame_of, methods
from .missing import missing_or_doubtful, source_of
from .tables import DEFINITIONS, EDGES, SECTIONS, Chart, Section, Table, tables_of

TEMPLATE = "page.html.jinja"
NAME = "report"
"""Of the files in a folder."""
ABSENT = "–"
"""Stands where there is no figure."""
CSV_COLUMNS = "table caption body row group column text value low high samples".split()
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of texts that a spreadsheet would compute."""
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")
"""What Markdown, or HTML within it, would read as more than itself."""
DEEPEST_SHADE = 8
"""Deeper tokens share the colour of this depth."""
REASONS = {
    "not proposed": "the draft had not proposed what the target drew",
    "nothing below": "the tree has nothing below the last accepted node",
    "ended": "the text ended",
}
"""Why the accepted path ended, by the records' words."""
PLAIN_STYLE = ("#7d8590", "o")
COLOURS = "#2f81d8 #d9622b #2a9d4f #a855c7 #b08800 #1292a8 #e0405e".split()
"""Of the other methods; they can be told apart on light and on dark ground."""
MARKS = "sD^vPXo"
"""So that series differ in more than colour."""
INK = "#000000"
"""In place of the page's own text colour, while a chart is drawn."""
LETTER = 0.085
"""Inches that a letter takes in a chart, at most."""
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Report:
    """Everything that is written, in whatever form."""

    title: str
    sources: Mapping[str, Mapping[str, str]]
    """Names and values of what is known of every run, by the run's name."""
    tables: Mapping[str, Sequence[Table]]
    """Of every section, by its key."""
    methods: Sequence[str]
    """Plain decoding first."""
    missing: Sequence[str]
    cases: Sequence[tuple[str, SampleRecord]]
    """The texts whose rounds were kept, each with its block."""

    @property
    def sections(self) -> list[tuple[str, Section, Sequence[Table]]]:
        """The sections that have a table, by key."""
        return [(key, SECTIONS[key], found) for key, found in self.tables.items() if found]


def report(runs: Sequence[Run], edges: Sequence[int] = EDGES) -> Report:
    """Compute a report.

    Args:
      runs: each with a sample.
      edges: of the ranges of prompt lengths, ascending from 0.
    """
    blocks = blocks_of(runs)
    frame = frame_of(blocks, edges)
    texts = zip(frame["block"].astype(str), frame["record"], strict=True)
    return Report(
        title=f"Evaluation of {', '.join(dict.fromkeys(run.header.target for run in runs))}",
        sources={run.name: source_of(run) for run in runs},
        tables={key: tables_of(key, frame, edges) for key in SECTIONS},
        methods=methods(blocks),
        missing=missing_or_doubtful(blocks, frame),
        cases=[(block, r) for block, r in texts if r.rounds is not None and r.pieces is not None],
    )


def rounds_by_token(record: SampleRecord) -> list[list[tuple[str, int]]]:
    """The tokens of every round as they are shown, each with its depth in the draft's tree.

    The first round is the prefill's token. Every other emits the draft tokens that the target's own
    draws accept, at depth 1, 2, ..., and the bonus, the draw behind the last of them, of depth 0.

    Raises:
      ValueError: if the counts of the record contradict each other.
    """
    pieces = record.pieces or ("",)
    if len(pieces) != 1 + sum(record.emitted_by_round):
        raise ValueError(
            f"{record.task}, sample {record.sample}, {record.method}: {len(pieces)} pieces of text "
            f"for {1 + sum(record.emitted_by_round)} tokens by round; remove the line, and the run "
            "measures it again"
        )
    shown = iter([piece.replace("\n", "↵\n") or "∅" for piece in pieces])
    counts = zip(record.emitted_by_round, record.accepted_by_round, strict=True)
    return [
        [(next(shown), 0)],
        *(
            [(next(shown), depth if depth <= accepted else 0) for depth in range(1, emitted + 1)]
            for emitted, accepted in counts
        ),
    ]


def why_ended(tree: RoundTree) -> str:
    """Why the accepted path of a round ended."""
    why, below = REASONS[tree.stop], tree.parents.count(tree.path[-1])
    return f"{why} (among {counted(below, 'candidate')})" if tree.stop == "not proposed" else why


def below(tree: RoundTree, node: int) -> list[int]:
    """The children of a node, the accepted one first."""
    children = [child for child, parent in enumerate(tree.parents) if parent == node]
    return sorted(children, key=lambda child: child not in tree.path)


def readable(text: str) -> str:
    """A token's text, with signs for white space and for half a character."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "∅"


def charts(report: Report, key: str) -> Iterator[tuple[str, Markup]]:
    """The charts of a section, one for every body, each with its title."""
    chart = SECTIONS[key].chart
    if chart is None:
        return
    drafting = [method for method in report.methods if method != PLAIN_METHOD]
    styles = {
        name: (COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)])
        for index, name in enumerate(drafting)
    }
    source, column = chart.of or (key, "")
    for table in report.tables[source]:
        cells = table.cells[table.cells["value"].notna()]
        if column:
            cells = cells[cells["column"] == column].assign(column=lambda rows: rows["group"])
        for number, (body, rows) in enumerate(cells.groupby("body", sort=False)):
            title, name = f"{table.caption}: {body}", f"{key}-{table.key}-{number}"
            yield title, draw(name, title, chart, rows, {**styles, PLAIN_METHOD: PLAIN_STYLE})


def draw(
    key: str,
    title: str,
    chart: Chart,
    cells: pd.DataFrame,
    styles: Mapping[str, tuple[str, str]],
) -> Markup:
    """A chart as an SVG element: points with their intervals along the places ``column``.

    Args:
      key: begins the names of its parts, which are those of one page.
      title: for readers who cannot see it, with all values in words.
      chart: what it shows.
      cells: of one body of a table, all with a value.
      styles: colour and mark by the names of rows.
    """
    places = list(cells.sort_values("place", kind="stable")["column"].unique())
    series = [(str(name), rows) for name, rows in cells.groupby("row", sort=False)]
    widest_place, widest_name = (LETTER * max(map(len, names)) for names in (places, dict(series)))
    width = max(4.0, 1.0 + len(places) * max(1.0, 0.2 + widest_place), 1.0 + widest_name)
    in_line = max(1, int(width / (0.7 + widest_name)))
    height = 3.0 + 0.22 * math.ceil(len(series) / in_line)
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.add_subplot()
    for number, (name, rows) in enumerate(series):
        aside = 0.09 * (number - (len(series) - 1) / 2)
        colour, mark = styles[name]
        where = [places.index(place) + aside for place in rows["column"]]
        line = "-" if chart.is_joined else "none"
        axis.plot(where, rows["value"], color=colour, marker=mark, linestyle=line, label=name)
        # An interval need not hold its figure, as error bars would have to.
        axis.vlines(where, rows["low"], rows["high"], colors=INK, linewidth=1.0)
    axis.axhline(chart.level, color="#d1242f", linestyle="--", linewidth=1.2)
    axis.set_xticks(range(len(places)), places, parse_math=False)
    axis.set_xlim(-0.5, len(places) - 0.5)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(chart.place_unit)
    axis.set_ylabel(chart.unit)
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=in_line, frameon=False)
    words = [
        f"{name}: " + ", ".join(f"{cell.column} {cell.value:.3g}" for cell in rows.itertuples())
        for name, rows in series
    ]
    return _svg(figure, key, title, f"{chart.unit}. {'; '.join(words)}.")


def _svg(figure: Figure, key: str, title: str, words: str) -> Markup:
    """A figure as an element of a page: named, described, and in the page's text colour."""
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", SVG[1:-1])
    root = ElementTree.fromstring(out.getvalue())
    # Names of parts are those of the whole page: two charts must not share them.
    for part in root.iter():
        for name, value in part.attrib.items():
            if name == "id":
                value = f"{key}-{value}"
            elif name.endswith("href"):
                value = value.replace("#", f"#{key}-", 1)
            else:
                value = value.replace("url(#", f"url(#{key}-").replace(INK, "currentColor")
            part.set(name, value)
    for place, (tag, text) in enumerate((("title", title), ("desc", words))):
        said = ElementTree.Element(f"{SVG}{tag}", id=f"{key}-{tag}")
        said.text = text
        root.insert(place, said)
    root.set("role", "img")
    root.set("aria-labelledby", f"{key}-title {key}-desc")
    root.set("class", "chart")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def html(report: Report) -> str:
    """The whole page: style and charts are within it."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((Path(__file__).parent / TEMPLATE).read_text("utf-8"))
    accepted = [count for _, record in report.cases for count in record.accepted_by_round]
    return template.render(
        report=report,
        definitions=DEFINITIONS,
        absent=ABSENT,
        charts=charts,
        rounds_by_token=rounds_by_token,
        why_ended=why_ended,
        below=below,
        readable=readable,
        deepest=DEEPEST_SHADE,
        depths=range(1, 1 + min(max(accepted, default=0), DEEPEST_SHADE)),
    )


def markdown(report: Report) -> str:
    """All tables; charts and case studies are in the page alone."""
    return "\n".join(_markdown_lines(report)) + "\n"


def _markdown_lines(report: Report) -> Iterator[str]:
    yield f"# {_plain(report.title)}"
    yield ""
    yield from (f"- **{_plain(name)}**: {_plain(text)}." for name, text in DEFINITIONS.items())
    for _, section, tables in report.sections:
        yield from ("", f"## {_plain(section.title)}")
        for table in tables:
            yield from ("", f"**{_plain(table.caption)}**", "", *_markdown_table(table))
            yield from ("", *(f"- {_plain(note)}" for note in section.notes))
    yield from ("", "## What is missing", "")
    yield from (f"- {_plain(sentence)}" for sentence in report.missing or ("Nothing.",))
    yield from ("", "## Where it is from")
    for name, facts in report.sources.items():
        yield from ("", f"### {_plain(name)}", "")
        yield from (f"- {_plain(fact)}: {_plain(value)}" for fact, value in facts.items())


def _markdown_table(table: Table) -> Iterator[str]:
    """Markdown has one line of headings and no bodies: their names go into the rows."""
    names = [f"{group}: {name}" if group else name for group, name in table.columns]
    several = len(table.bodies) > 1
    heads = [*([""] if several else []), table.section.corner]
    yield _row([*heads, *names])
    yield f"| {' | '.join([*(['---'] * len(heads)), *(['---:'] * len(names))])} |"
    for body, lines in table.bodies.items():
        for name, cells in lines.items():
            first = [body, name] if several else [name]
            yield _row(first, [cells.get(column) for column in table.columns])


def _row(names: Sequence[str], cells: Sequence[Any] = ()) -> str:
    return f"| {' | '.join([*map(_plain, names), *map(_markdown_cell, cells)])} |"


def _markdown_cell(cell: Any) -> str:
    if cell is None:
        return ABSENT
    text = f"**{_plain(cell.text)}**" if cell.bold else _plain(cell.text)
    return f"{text} ({_plain(cell.interval)})" if cell.interval else text


def _plain(text: str) -> str:
    """A text that reads as itself, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def csv_text(report: Report) -> str:
    """All figures of all tables, one a line."""
    cells = pd.concat(
        table.cells.assign(table=table.key, caption=table.caption)
        for tables in report.tables.values()
        for table in tables
    )
    texts = cells.select_dtypes(exclude="number").columns
    cells[texts] = cells[texts].map(_harmless)
    cells = cells.astype({"samples": "Int64"})
    return cells.to_csv(columns=CSV_COLUMNS, index=False, lineterminator="\n")


def _harmless(text: object) -> object:
    """A text that a spreadsheet shows as it is."""
    return f"'{text}" if str(text).startswith(DANGEROUS) else text


FORMATS: Mapping[str, Callable[[Report], str]] = {
    ".html": html,
    ".md": markdown,
    ".csv": csv_text,
}
"""By the end of a file's name."""
SIGNS = ("<title>Evaluation of ", "# Evaluation of ", ",".join(CSV_COLUMNS))
"""Near the beginnings of reports: an earlier one is replaced, another file is not."""


def targets(out: str) -> list[Path]:
    """The files that a report goes to, checked to be writable before anything is computed.

    Raises:
      ValueError: for a file of another format, one that is no report, and an unwritable place.
    """
    path = Path(out).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir() or not suffix:
        found = [path / f"{NAME}{each}" for each in FORMATS]
        try:
            path.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise ValueError(f"--out={out}: its folder does not exist; make it first") from None
        except OSError as error:
            raise ValueError(
                f"--out={out} cannot be written ({error.strerror}); name another place"
            ) from None
    elif suffix in FORMATS:
        found = [path]
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
    return not beginning or any(sign in beginning for sign in SIGNS)


def write(report: Report, paths: Sequence[Path]) -> None:
    """Write every file, whole or not at all.

    Raises:
      OSError: if one cannot be written.
    """
    for path in paths:
        text = FORMATS[path.suffix.lower()](report)
        # Half a character of a model's text becomes its escape.
        files.replace(path, text.encode("utf-8", "backslashreplace"))
