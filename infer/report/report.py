"""A report in its order: sections of tables and charts, what is missing, and the sources.

What is missing also names figures to distrust. Nothing is left out of a table without a sentence.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspec_jax.cli import counted

from ..eval.records import PLAIN_METHOD, SampleRecord
from ..eval.run_folder import Run
from .blocks import Block, blocks
from .case_study import CaseStudy, case_studies, shades
from .charts import Chart, charts, colours
from .figures import DEFINITIONS, EDGES, FEWEST, Selection, acceptance, speed
from .table import Table, build, temperature_words
from .tables import SPECS, unscored

MANY = 4
"""Most tables of a section that are shown open."""
TOLERANCE = 1.25
"""A speed-up above τ times this is no effect of speculation: a round costs a plain step at least,
and timings vary by less."""


@dataclass(frozen=True)
class Section:
    """Tables and charts of one question."""

    key: str
    title: str
    tables: Sequence[Table]
    charts: Sequence[Chart]

    @property
    def unfolded(self) -> int:
        """Number of first tables that are shown open; a reader opens the others by hand."""
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
    definitions: tuple[tuple[str, str], ...]
    """Names of figures, and what they are."""
    sections: tuple[Section, ...]
    """Those that have a table."""
    missing: tuple[str, ...]
    cases: tuple[CaseStudy, ...]
    shades: Sequence[int]
    """Depths that the legend of the case studies explains."""


def report(runs: Sequence[Run], edges: Sequence[int] = EDGES) -> Report:
    """Compute a report."""
    compared = blocks(runs)
    tables = build(SPECS, compared, edges)
    sections, methods = [], colours(compared)
    for key, spec in SPECS.items():
        # The brief table holds ranges as text, so its chart draws the main table.
        drawn = tables["main" if key == "brief" else key]
        found = charts(drawn, methods, spec.chart) if spec.chart is not None else []
        sections.append(Section(key, spec.title, tables[key], found))
    targets = dict.fromkeys(run.header.target for run in runs)
    cases = tuple(case_studies(compared))
    return Report(
        title=f"Evaluation of {', '.join(targets)}",
        sources=tuple(map(_source, runs)),
        definitions=tuple(DEFINITIONS.items()),
        sections=tuple(section for section in sections if section.tables),
        missing=tuple(missing_or_doubtful(runs, compared)),
        cases=cases,
        shades=shades(cases),
    )


def missing_or_doubtful(runs: Sequence[Run], blocks: Sequence[Block]) -> list[str]:
    """Everything that is doubtful, missing or left out, the gravest first."""
    found = []
    for block in blocks:
        found += [*_commits(runs, block), *_sessions(block), *_implausible(block), *_absent(block)]
    for run in runs:
        found += _of_run(run)
    for block in blocks:
        found += [f"{block.label}: {sentence}" for sentence in _without_figures(block)]
    return found


def _commits(runs: Sequence[Run], block: Block) -> Iterator[str]:
    """Figures that are compared and were measured with different code."""
    commits = {
        str(provenance.get("commit", "unknown"))
        for run in runs
        if run.name in block.names
        for provenance in (run.header.provenance, *run.header.continued)
    }
    if len(commits) > 1:
        words = ", ".join(commit[:12] for commit in sorted(commits))
        yield (
            f"{block.label}: measured at several commits ({words}). Speeds compare only if no "
            "change between them affects speed."
        )


def _sessions(block: Block) -> Iterator[str]:
    """Plain decoding that was timed in another run, or before the run was resumed."""
    plain = {_text_of(r): _session(r) for r in block.records if r.method == PLAIN_METHOD}
    apart = Counter(
        record.method
        for record in block.records
        if plain.get(_text_of(record), _session(record)) != _session(record)
    )
    if apart:
        words = ", ".join(f"{method} ({counted(n, 'text')})" for method, n in apart.items())
        yield (
            f"{block.label}: plain decoding was timed in another session than {words}. The "
            "speed-ups hold only if the machine's load was the same; measure both in one session "
            "to be sure."
        )


def _text_of(record: SampleRecord) -> tuple[str, str, float, int]:
    """What two methods have in common of a text."""
    return record.task, record.sample, record.temperature, record.seed


def _session(record: SampleRecord) -> tuple[str, int]:
    """The run of a record and its start: a block begins the names of calls with the run."""
    return record.call.partition("/")[0], record.start


def _implausible(block: Block) -> Iterator[str]:
    """Speed-ups that speculation cannot give."""
    for temperature in block.temperatures:
        for method in block.speculative:
            for task in block.tasks:
                records = Selection(block, temperature, method, task)
                gain, tau = records.ratio(speed), records.figure(acceptance)
                if gain and tau and gain.value > TOLERANCE * tau.value:
                    yield (
                        f"{block.label}: {method} has a speed-up of {gain.value:.2f}× at τ "
                        f"{tau.value:.2f} on {task}, {temperature_words(temperature)}. More than τ "
                        "is no effect of speculation: plain decoding was timed under another "
                        "load. Measure both again on an idle machine."
                    )


def _absent(block: Block) -> Iterator[str]:
    """Samples that one method decoded and another did not."""
    for task in block.tasks:
        expected = {
            (record.sample, record.seed)
            for method in block.methods
            for temperature in block.temperatures
            for record in block.of(task, method, temperature)
        }
        if not expected:
            yield f"{block.label}: task {task} has no sample at all."
            continue
        for temperature in block.temperatures:
            for method in block.methods:
                found = {(r.sample, r.seed) for r in block.of(task, method, temperature)}
                if found != expected:
                    yield (
                        f"{block.label}: {method} lacks {len(expected - found)} of the "
                        f"{len(expected)} texts of {task} at {temperature_words(temperature)} (the "
                        "command that began the run continues it)."
                    )


def _of_run(run: Run) -> Iterator[str]:
    """What a run left out or cut."""
    if run.torn:
        yield (
            f"{run.name}: the last line was cut short in writing ({run.torn} bytes) and is not "
            "counted; the run measures it again when it continues."
        )
    skipped = Counter((sample.task, sample.reason) for sample in run.skipped)
    for (task, reason), number in skipped.items():
        yield f"{run.name}: {counted(number, 'sample')} of {task} skipped: {reason}."
    cut = {(r.task, r.sample) for r in run.samples if r.truncated}
    for task, number in Counter(task for task, _ in cut).items():
        yield (
            f"{run.name}: the protocol cut the prompts of {counted(number, 'sample')} of {task}; "
            "they are counted with the length that was left."
        )


def _without_figures(block: Block) -> Iterator[str]:
    """Which figures do not exist, and why."""
    records = block.records
    if PLAIN_METHOD not in block.methods:
        yield "plain decoding did not run, so that there is no speed-up."
    few = [
        task
        for task in block.tasks
        if 0 < len({block.units[r.task, r.sample] for r in records if r.task == task}) < FEWEST
    ]
    if few:
        yield (
            f"fewer than {FEWEST} independent samples of {', '.join(few)}, so that their figures "
            "have no interval."
        )
    if not any(record.breakdown for record in records):
        yield "no round was timed in parts."
    if not any(record.references for record in records):
        yield "no sample has references, so that there are no scores."
    yield from unscored(block)
    if not any(record.rounds for record in records):
        yield "no round was kept as a tree, so that there is no case study."


def _source(run: Run) -> Source:
    """Where, with what and how a run was made, and what it holds."""
    header = run.header
    provenance = header.provenance
    commit = str(provenance.get("commit", "unknown"))
    if provenance.get("dirty"):
        commit += ", with changed files"
    starts = (f"{each.get('date')} (commit {each.get('commit')})" for each in header.continued)
    facts: list[tuple[str, Any]] = [
        ("command", header.command),
        ("target", header.target),
        ("dtype", header.dtype),
        ("protocol", header.protocol),
        ("device", provenance.get("device", "unknown")),
        ("commit", commit),
        ("begun", provenance.get("date", "unknown")),
        ("continued", ", ".join(starts)),
        ("versions", provenance.get("versions", {})),
        ("tasks", ", ".join(header.tasks)),
        ("temperatures", ", ".join(f"{value:g}" for value in header.temperatures)),
        ("seeds", ", ".join(map(str, header.seeds))),
        ("batch", header.batch),
        *((f"method {name}", _given(setting)) for name, setting in header.methods.items()),
        ("options", header.options),
        ("records", f"{len(run.samples)} samples"),
    ]
    return Source(run.name, tuple((fact, _words(value)) for fact, value in facts if value != ""))


def _given(setting: Any) -> dict[str, Any]:
    """The fields of a setting that say anything."""
    values = dataclasses.asdict(setting)
    return {name: value for name, value in values.items() if value not in (None, {})}


def _words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    items = (
        f"{key} {item if isinstance(item, str) else json.dumps(item)}"
        for key, item in value.items()
    )
    return ", ".join(items) or "none"
