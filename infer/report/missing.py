"""What a report lacks, in sentences: nothing is left out of a table without being told here."""

from collections import Counter
from collections.abc import Sequence

from longspec_jax.cli import counted

from ..eval.records import PLAIN_METHOD
from .blocks import Block, NamedRun
from .intervals import FEWEST
from .quality_table import unscored
from .table import temperature_words


def sentences(runs: Sequence[NamedRun], blocks: Sequence[Block]) -> list[str]:
    """Everything that is missing or was left out, the gravest first.

    Args:
      runs: that were read.
      blocks: they were put into.
    """
    told = [sentence for block in blocks for sentence in (*_mixed(runs, block), *_absent(block))]
    for run in runs:
        told += _of_run(run)
    told += [sentence for block in blocks for sentence in _without_figures(block)]
    return told


def _mixed(runs: Sequence[NamedRun], block: Block) -> list[str]:
    """Whether figures that are compared were measured with code that may differ."""
    commits = {
        str(provenance.get("commit", "unknown"))
        for run in runs
        if run.name in block.names
        for provenance in (run.run.header.provenance, *run.run.header.continued)
    }
    if len(commits) < 2:
        return []
    words = ", ".join(commit[:12] for commit in sorted(commits))
    return [
        f"{block.label}: one commit for all; it was measured at {words}, whose speeds compare as "
        "far as nothing changed that they depend on."
    ]


def _absent(block: Block) -> list[str]:
    """Samples that one method decoded and another did not, or none."""
    told = []
    for task in block.tasks:
        expected = {
            (record.sample, record.seed)
            for method in block.methods
            for temperature in block.temperatures
            for record in block.of(task, method, temperature)
        }
        if not expected:
            told.append(f"{block.label}: task {task} has no sample at all.")
            continue
        for temperature in block.temperatures:
            for method in block.methods:
                found = {(r.sample, r.seed) for r in block.of(task, method, temperature)}
                if found != expected:
                    told.append(
                        f"{block.label}: {method} lacks {len(expected - found)} of the "
                        f"{len(expected)} texts of {task} at {temperature_words(temperature)} (the "
                        "run goes on with the command that began it)."
                    )
    return told


def _of_run(run: NamedRun) -> list[str]:
    """What a run left out or cut."""
    told = []
    if run.run.torn:
        told.append(
            f"{run.name}: the last line was cut short in writing ({run.run.torn} bytes) and counts "
            "for nothing; the run makes it anew when it goes on."
        )
    skipped = Counter((sample.task, sample.reason) for sample in run.run.skipped)
    for (task, reason), number in skipped.items():
        told.append(f"{run.name}: {counted(number, 'sample')} of {task} skipped: {reason}.")
    cut = {(r.task, r.sample) for r in run.run.samples if r.truncated}
    for task, number in Counter(task for task, _ in cut).items():
        told.append(
            f"{run.name}: the prompts of {counted(number, 'sample')} of {task} were cut, as the "
            "protocol says, and are counted with the length that was left."
        )
    return told


def _without_figures(block: Block) -> list[str]:
    """Which figures do not exist, and why."""
    told = []
    if PLAIN_METHOD not in block.methods:
        told.append(f"{block.label}: plain decoding did not run, so that there is no speed-up.")
    uncounted = {record.method for record in block.records if record.target_passes is None}
    for method in sorted(uncounted):
        told.append(
            f"{block.label}: {method} does not tell its target passes, so that it has no τ; its "
            "records count for speed alone."
        )
    few = [
        task
        for task in block.tasks
        if 0
        < len({block.units[r.task, r.sample] for r in block.records if r.task == task})
        < FEWEST
    ]
    if few:
        told.append(
            f"{block.label}: fewer than {FEWEST} independent samples of {', '.join(few)}, so that "
            "figures of theirs have no interval."
        )
    if not any(record.breakdown for record in block.records):
        told.append(f"{block.label}: no round was timed in parts.")
    if not any(record.references for record in block.records):
        told.append(f"{block.label}: no sample has references, so that there are no scores.")
    told += [f"{block.label}: {sentence}" for sentence in unscored(block)]
    if not any(record.rounds for record in block.records):
        told.append(
            f"{block.label}: no round was kept as a tree, so that there is no case to study."
        )
    return told
