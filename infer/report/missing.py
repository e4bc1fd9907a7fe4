"""What a report says is missing, doubtful or left out, and where its runs are from.

Nothing is left out of a table without a sentence.
"""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from longspec_jax.cli import counted

from ..eval.records import PLAIN_METHOD, Run, Setting
from ..eval.scores import METRICS
from ..eval.tasks import metric_of
from .frame import FEWEST, TEXT, Block, temperature_words
from .tables import SPEED_UP, TAU

TOLERANCE = 1.25
"""A speed-up above τ times this is no effect of speculation: a round costs a plain step at least,
and timings vary by less."""


def missing_or_doubtful(blocks: Sequence[Block], frame: pd.DataFrame) -> list[str]:
    """Everything that is doubtful, missing or left out, the gravest first."""
    views = [(block, frame[frame["block"] == block.label]) for block in blocks]
    found = []
    for block, rows in views:
        of_block = (*_commits(block), *_sessions(rows), *_implausible(rows), *_absent(block, rows))
        found += [f"{block.label}: {sentence}" for sentence in of_block]
    for block in blocks:
        for run in block.runs:
            found += [f"{run.name}: {sentence}" for sentence in _of_run(run)]
    for block, rows in views:
        found += [f"{block.label}: {sentence}" for sentence in _without_figures(block, rows)]
    return found


def _commits(block: Block) -> Iterator[str]:
    """Figures that are compared and were measured with different code."""
    headers = [run.header for run in block.runs]
    starts = [each for header in headers for each in (header.provenance, *header.continued)]
    commits = sorted({str(each.get("commit", "unknown"))[:12] for each in starts})
    if len(commits) > 1:
        yield (
            f"measured at several commits ({', '.join(commits)}). Speeds compare only if no "
            "change between them affects speed."
        )


def _sessions(rows: pd.DataFrame) -> Iterator[str]:
    """Plain decoding that was timed in another run, or before the run was resumed."""
    plain = rows.loc[rows["method"] == PLAIN_METHOD, [*TEXT, "session"]]
    both = rows.merge(plain, on=TEXT, suffixes=("", "_of_plain"))
    apart = both.loc[both["session"] != both["session_of_plain"], "method"].astype(str)
    if len(apart):
        counts = apart.value_counts(sort=False)
        words = ", ".join(f"{method} ({counted(n, 'text')})" for method, n in counts.items())
        yield (
            f"plain decoding was timed in another session than {words}. The speed-ups hold only "
            "if the machine's load was the same; measure both in one session to be sure."
        )


def _implausible(rows: pd.DataFrame) -> Iterator[str]:
    """Speed-ups that speculation cannot give."""
    drafted = rows[rows["method"] != PLAIN_METHOD]
    for (temperature, method, task), part in drafted.groupby(
        ["temperature", "method", "task"], observed=True
    ):
        gain, tau = SPEED_UP.value(part), TAU.value(part)
        if gain and tau and gain > TOLERANCE * tau:
            yield (
                f"{method} has a speed-up of {gain:.2f}× at τ {tau:.2f} on {task}, "
                f"{temperature_words(temperature)}. More than τ is no effect of speculation: plain "
                "decoding was timed under another load. Measure both again on an idle machine."
            )


def _absent(block: Block, rows: pd.DataFrame) -> Iterator[str]:
    """Samples that one method decoded and another did not."""
    texts = rows.assign(text=list(zip(rows["sample"], rows["seed"], strict=True)))
    temperatures = sorted({value for run in block.runs for value in run.header.temperatures})
    for task in block.tasks:
        of_task = texts[texts["task"] == task]
        expected = set(of_task["text"])
        if not expected:
            yield f"task {task} has no sample at all."
            continue
        for temperature in temperatures:
            for method in block.methods:
                here = (of_task["temperature"] == temperature) & (of_task["method"] == method)
                lacking = expected - set(of_task.loc[here, "text"])
                if lacking:
                    yield (
                        f"{method} lacks {len(lacking)} of the {len(expected)} texts of {task} at "
                        f"{temperature_words(temperature)} (the command that began the run "
                        "continues it)."
                    )


def _of_run(run: Run) -> Iterator[str]:
    """What a run left out or cut."""
    if run.torn:
        yield (
            f"the last line was cut short in writing ({run.torn} bytes) and is not counted; the "
            "run measures it again when it continues."
        )
    for (task, reason), number in Counter((s.task, s.reason) for s in run.skipped).items():
        yield f"{counted(number, 'sample')} of {task} skipped: {reason}."
    cut = {(record.task, record.sample) for record in run.samples if record.truncated}
    for task, number in Counter(task for task, _ in sorted(cut)).items():
        yield (
            f"the protocol cut the prompts of {counted(number, 'sample')} of {task}; they are "
            "counted with the length that was left."
        )


def _without_figures(block: Block, rows: pd.DataFrame) -> Iterator[str]:
    """Which figures do not exist, and why."""
    if PLAIN_METHOD not in block.methods:
        yield "plain decoding did not run, so that there is no speed-up."
    units = rows.groupby("task", observed=True)["unit"].nunique()
    few = [str(task) for task, count in units.items() if count < FEWEST]
    if few:
        yield (
            f"fewer than {FEWEST} independent samples of {', '.join(few)}, so that their figures "
            "have no interval."
        )
    if rows["parts"].isna().all():
        yield "no round was timed in parts."
    with_references = {record.task for record in rows["record"] if record.references}
    if not with_references:
        yield "no sample has references, so that there are no scores."
    for task in sorted(with_references):
        metric = metric_of(task)
        if metric is None:
            yield f"{task} has references, but no score of its own."
        elif missing := METRICS[metric].missing:
            yield f"{task} has no score: {missing}."
    if not any(record.rounds for record in rows["record"]):
        yield "no round was kept as a tree, so that there is no case study."


def source_of(run: Run) -> dict[str, str]:
    """Where, with what and how a run was made, and what it holds: names and values."""
    header = run.header
    provenance = header.provenance
    commit = str(provenance.get("commit", "unknown"))
    if provenance.get("dirty"):
        commit += ", with changed files"
    starts = [f"{each.get('date')} (commit {each.get('commit')})" for each in header.continued]
    settings = {f"method {name}": _given(each) for name, each in header.methods.items()}
    facts: dict[str, Any] = {
        "command": header.command,
        "target": header.target,
        "dtype": header.dtype,
        "protocol": header.protocol,
        "device": provenance.get("device", "unknown"),
        "commit": commit,
        "begun": provenance.get("date", "unknown"),
        "continued": ", ".join(starts),
        "versions": provenance.get("versions", {}),
        "tasks": ", ".join(header.tasks),
        "temperatures": ", ".join(f"{value:g}" for value in header.temperatures),
        "seeds": ", ".join(map(str, header.seeds)),
        "batch": header.batch,
        **settings,
        "options": header.options,
        "records": f"{len(run.samples)} samples",
    }
    return {name: _words(value) for name, value in facts.items() if value != ""}


def _given(setting: Setting) -> dict[str, Any]:
    """The fields of a setting that say anything."""
    values = dataclasses.asdict(setting)
    return {name: value for name, value in values.items() if value not in (None, {})}


def _words(value: object) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    said = [
        f"{key} {item if isinstance(item, str) else json.dumps(item)}"
        for key, item in value.items()
    ]
    return ", ".join(said) or "none"
