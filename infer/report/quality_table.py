"""How good the answers are: what the tasks' own benchmarks count."""

from collections.abc import Mapping, Sequence
from functools import cache

from ..eval.records import SampleRecord
from ..eval.scores import score, what_is_missing
from ..eval.suite import SUITE
from ..eval.tasks import NEEDLE, TASKS
from .blocks import Block, all_tasks, all_temperatures
from .counting import figure
from .intervals import Fraction
from .table import Body, Cell, Group, Line, Table, shown, slug, temperature_words, with_figures

HIDDEN = (NEEDLE, "demo_needle")
"""Tasks whose answer is a code."""
METRIC: Mapping[str, str] = {
    **dict.fromkeys(SUITE, "whole_similarity"),
    **dict.fromkeys(HIDDEN, "found"),
    **{name: task.metric for name, task in TASKS.items() if task.metric},
}
"""What is counted in a task."""
NAMES = {
    "rouge_l": "ROUGE-L",
    "edit_similarity": "edit similarity",
    "whole_similarity": "similarity",
    "exact_match": "exact match",
    "found": "found",
}
MEANINGS = {
    "rouge_l": "LongBench's, F measure over distinct words, which is far above the usual one for "
    "long texts",
    "edit_similarity": "LongBench's, of the first line without a comment",
    "whole_similarity": "edit similarity of the whole answer",
    "exact_match": "share of answers whose last boxed number, or last number, is the reference",
    "found": "share of answers that begin with the hidden code",
}


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One for every temperature at which a task has references and a score."""
    return with_figures(_table(blocks, value) for value in all_temperatures(blocks))


def unscored(block: Block) -> list[str]:
    """Tasks that have references and no score, and why, in sentences."""
    told = []
    for task in block.tasks:
        if not any(record.references for record in block.records if record.task == task):
            continue
        if task not in METRIC:
            told.append(f"{task} has references, but no score of its own.")
        elif missing := what_is_missing(METRIC[task]):
            told.append(f"{task} has no score: {missing}.")
    return told


def _table(blocks: Sequence[Block], temperature: float) -> Table:
    tasks = [task for task in all_tasks(blocks) if _scored(blocks, task)]
    metrics = dict.fromkeys(METRIC[task] for task in tasks)
    return Table(
        key=slug("quality", temperature),
        caption=f"Quality of the answers, {temperature_words(temperature)}",
        corner="method",
        groups=tuple(Group(task, (NAMES[METRIC[task]],)) for task in tasks),
        bodies=tuple(
            Body(
                block.label,
                tuple(
                    Line(method, tuple(_cell(block, task, method, temperature) for task in tasks))
                    for method in block.methods
                ),
            )
            for block in blocks
        ),
        notes=(
            "100 x the mean over texts of the best score against any reference. A method that is "
            "lossless has plain decoding's; differences are of texts that are not identical.",
            *(f"{NAMES[metric]}: {MEANINGS[metric]}." for metric in metrics),
        ),
    )


def _scored(blocks: Sequence[Block], task: str) -> bool:
    return (
        task in METRIC
        and what_is_missing(METRIC[task]) is None
        and any(
            record.references for block in blocks for record in block.records if record.task == task
        )
    )


def _cell(block: Block, task: str, method: str, temperature: float) -> Cell:
    return shown(figure(block, block.of(task, method, temperature), _quality), _hundred)


def _quality(block: Block, record: SampleRecord) -> Fraction | None:
    if not record.references:
        return None
    return Fraction(_score(METRIC[record.task], record.text, record.references), 1)


@cache
def _score(metric: str, text: str, references: tuple[str, ...]) -> float:
    """Methods that are lossless have one text, and ROUGE-L of long ones takes its time."""
    return score(metric, text, references)


def _hundred(value: float) -> str:
    return f"{100 * value:.1f}"
