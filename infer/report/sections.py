"""A report in its order: sections of charts and tables, what is missing, and where it is from."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import (
    acceptance_tables,
    batch_table,
    brief,
    figures,
    length_tables,
    lossless_table,
    main_table,
    missing,
    pairs_table,
    quality_table,
    round_parts,
    times_table,
)
from .blocks import Block, NamedRun, blocks
from .case_study import CaseStudy, case_studies, spread
from .chart import Chart
from .context_bins import EDGES
from .counting import INTERVALS
from .table import Table


@dataclass(frozen=True)
class Section:
    """Charts and tables of one question."""

    key: str
    title: str
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]

    @property
    def unfolded(self) -> int:
        """Tables from the first on that are open; others of a long section are opened by hand."""
        return len(self.tables) if len(self.tables) <= MANY else 1


@dataclass(frozen=True)
class Source:
    """A run as the report names it."""

    name: str
    facts: tuple[tuple[str, str], ...]
    """Names and values, in the order they are shown."""


@dataclass(frozen=True)
class Report:
    """Everything that is written, in whatever form."""

    title: str
    sources: tuple[Source, ...]
    intervals: str
    """What those beside figures are."""
    sections: tuple[Section, ...]
    """Those that have anything."""
    missing: tuple[str, ...]
    """Sentences."""
    cases: tuple[CaseStudy, ...]


MANY = 4
"""Tables of a section that are shown at once."""


def report(
    runs: Sequence[NamedRun], edges: Sequence[int] = EDGES, most_cases: int | None = None
) -> Report:
    """Compute a report.

    Args:
      runs: in the order they were named.
      edges: of ranges of context lengths, ascending from 0.
      most_cases: how many texts are studied; all whose rounds were kept if absent.
    """
    compared = blocks(runs)
    cases = list(case_studies(compared))
    shown = spread(cases, most_cases)
    left_out = (
        [f"{len(shown)} of the {len(cases)} texts whose rounds were kept are shown."]
        if len(shown) < len(cases)
        else []
    )
    targets = dict.fromkeys(run.run.header.target for run in runs)
    return Report(
        title=f"Evaluation of {', '.join(targets)}",
        sources=tuple(_source(run) for run in runs),
        intervals=INTERVALS,
        sections=tuple(
            section for section in _sections(compared, edges) if section.charts or section.tables
        ),
        missing=(*missing.sentences(runs, compared), *left_out),
        cases=tuple(shown),
    )


def _sections(compared: Sequence[Block], edges: Sequence[int]) -> list[Section]:
    depth, context = acceptance_tables.depth_tables, acceptance_tables.context_tables
    lengths = [
        *length_tables.by_range(compared, edges),
        *length_tables.by_nominal_length(compared),
    ]
    plan: list[tuple[str, str, list[Chart], list[Table]]] = [
        ("brief", "In brief", figures.speed_ups(compared), brief.tables(compared)),
        ("lossless", "Losslessness", [], lossless_table.tables(compared)),
        ("main", "Tasks and methods", [], main_table.tables(compared)),
        ("pairs", "Methods against each other", [], pairs_table.tables(compared)),
        ("lengths", "Length of the prompt", [], lengths),
        ("depth", "Acceptance by depth", figures.depths(compared), depth(compared)),
        (
            "context",
            "Acceptance along the context",
            figures.contexts(compared, edges),
            context(compared, edges),
        ),
        (
            "parts",
            "Parts of a round",
            figures.latency_parts(compared),
            round_parts.tables(compared),
        ),
        ("batches", "Batches", figures.throughputs(compared), batch_table.tables(compared)),
        ("quality", "Quality", [], quality_table.tables(compared)),
        ("times", "What a user waits for", [], times_table.tables(compared)),
    ]
    return [
        Section(key, title, tuple(charts), tuple(tables)) for key, title, charts, tables in plan
    ]


def _source(run: NamedRun) -> Source:
    """Where, with what and how a run was made, and what it holds."""
    header = run.run.header
    provenance = header.provenance
    facts: list[tuple[str, Any]] = [
        ("command", header.command),
        ("target", header.target),
        ("dtype", header.dtype),
        ("protocol", header.protocol),
        ("device", provenance.get("device", "unknown")),
        ("commit", provenance.get("commit", "unknown")),
        ("begun", provenance.get("date", "unknown")),
        ("continued", _dates(header.continued)),
        ("versions", provenance.get("versions", {})),
        ("tasks", ", ".join(header.tasks)),
        ("temperatures", ", ".join(f"{value:g}" for value in header.temperatures)),
        ("seeds", ", ".join(map(str, header.seeds))),
        ("batch", header.batch),
        *((f"method {name}", _plain(setting)) for name, setting in header.methods.items()),
        ("options", header.options),
        ("records", f"{len(run.run.samples)}, and {len(run.run.skipped)} samples skipped"),
    ]
    return Source(run.name, tuple((name, _words(value)) for name, value in facts if value != ""))


def _plain(setting: Any) -> dict[str, Any]:
    given = dataclasses.asdict(setting)
    return {name: value for name, value in given.items() if value not in (None, {})}


def _dates(starts: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{each.get('date')} (commit {each.get('commit')})" for each in starts)


def _words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    items = (
        f"{key} {item if isinstance(item, str) else json.dumps(item)}"
        for key, item in value.items()
    )
    return ", ".join(items) or "none"
