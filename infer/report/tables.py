"""The tables of a report, each specified by its columns.

:data:`SPECS` has the sections of a report in their order. The layouts follow the LongSpec
paper (Tables 1 and 4, Figures 3, 5 and 7) and SpecExtend (Table 2).
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from ..eval.records import PLAIN_METHOD, compared_with_plain
from ..eval.scores import METRICS
from ..eval.tasks import metric_of
from .blocks import Block
from .figures import (
    PART_NAMES,
    Estimate,
    Part,
    Selection,
    acceptance,
    at_depth,
    occupied,
    part_of_round,
    positions,
    quality,
    seconds_of,
    speed,
    stopped,
    untouched_round,
    whole_speed,
    within,
)
from .table import (
    ChartSpec,
    Figure,
    Format,
    Groups,
    Rows,
    TableSpec,
    View,
    Words,
    by_task_and_block,
    hundredfold,
    length,
    milliseconds,
    percent,
    rate,
    seconds,
    signed,
    speculative_methods,
    times,
)


def _column(name: str, part: Part, words: Format) -> Figure:
    """A column of one figure."""
    return Figure(name, lambda records: records.figure(part), words)


TAU = _column("τ", acceptance, length)
SPEED = _column("tokens/s", speed, rate)
SPEED_UP = Figure("speed-up", lambda records: records.ratio(speed), times)
PARTS = tuple(
    _column(name, partial(part_of_round, [field]), milliseconds)
    for field, name in PART_NAMES.items()
)


def _pairs(records: Selection) -> Rows:
    """Every two methods; the later one first, since others are compared with plain decoding."""
    return [
        (f"{first} : {second}", replace(records, method=first, baseline=second))
        for second, first in itertools.combinations(records.block.methods, 2)
    ]


def _by_length(view: View) -> Groups:
    parts = PARTS if any(record.breakdown for record in view.records) else ()
    columns = (Words("samples", _count), TAU, SPEED, SPEED_UP, *parts)
    ranges = occupied((record.prompt_tokens for record in view.records), view.edges)
    return [(each.name, columns, partial(replace, lengths=each)) for each in ranges]


def _by_depth(view: View) -> Groups:
    deepest = max((n for each in view.records for n in each.accepted_by_round), default=0)
    depths = range(1, deepest + 1)
    columns = [_column(str(depth), partial(at_depth, depth), percent) for depth in depths]
    return view.one_group("rounds that accept a draft token at depth", *columns)


def _by_position(view: View) -> Groups:
    drafted = [record for record in view.records if record.method != PLAIN_METHOD]
    places = itertools.chain.from_iterable(map(positions, drafted))
    ranges = occupied(places, view.edges)
    columns = [_column(place.name, partial(within, place), length) for place in ranges]
    return view.one_group("τ of rounds at position", *columns)


def _by_batch(view: View) -> Groups:
    """A column for every batch; its block is the one that differs from the row's in batch alone."""
    columns = []
    for batch in sorted({block.batch for block in view.blocks}):
        blocks = [block for block in view.blocks if block.batch == batch]
        name = blocks[0].batch_words if len(blocks) == 1 else str(batch)
        columns.append(Figure(name, partial(_speed_at, blocks), rate))
    return view.one_group("tokens/s at batch", *columns)


def _speed_at(blocks: Sequence[Block], records: Selection) -> Estimate | None:
    found = [block for block in blocks if block.condition == records.block.condition]
    return replace(records, block=found[0]).figure(speed) if found else None


def _conditions(view: View) -> Rows:
    """A body for every task and condition that was measured at several batches."""
    found = []
    for condition in dict.fromkeys(block.condition for block in view.blocks):
        sizes = [block for block in view.blocks if block.condition == condition]
        if len(sizes) > 1:
            most = max(sizes, key=lambda block: len(block.methods))
            found += [
                (f"{task}, {condition}", Selection(most, view.temperature, task=task))
                for task in view.tasks
            ]
    return found


def _by_metric(view: View) -> Groups:
    tasks = [task for task in view.tasks if _is_scored(view.blocks, task)]
    return [
        (
            task,
            (_column(METRICS[metric_of(task) or ""].name, quality, hundredfold),),
            partial(replace, task=task),
        )
        for task in tasks
    ]


def _is_scored(blocks: Sequence[Block], task: str) -> bool:
    metric = metric_of(task)
    return (
        metric is not None
        and METRICS[metric].missing is None
        and any(r.references for block in blocks for r in block.records if r.task == task)
    )


def unscored(block: Block) -> list[str]:
    """Why tasks that have references have no score, in sentences."""
    found = []
    for task in block.tasks:
        metric = metric_of(task)
        if not any(record.references for record in block.records if record.task == task):
            continue
        if metric is None:
            found.append(f"{task} has references, but no score of its own.")
        elif missing := METRICS[metric].missing:
            found.append(f"{task} has no score: {missing}.")
    return found


def _span(column: Figure) -> Words:
    """The least and the greatest of the tasks' figures."""

    def text(records: Selection) -> str:
        estimates = [column.estimate(replace(records, task=task)) for task in records.block.tasks]
        values = [estimate.value for estimate in estimates if estimate is not None]
        ends = dict.fromkeys(map(column.words, (min(values), max(values)) if values else ()))
        return " to ".join(ends)

    return Words(column.name, text)


def _identical(records: Selection) -> str:
    same, compared = compared_with_plain(records.records)
    return f"{same} of {compared}" if compared else ""


def _identical_share(records: Selection) -> str:
    same, compared = compared_with_plain(records.records)
    # Rounded down: never 100 % unless all are identical.
    return f"{math.floor(10_000 * same / compared) / 100:.4g} %" if compared else ""


def _first_difference(records: Selection) -> str:
    found = [record.divergence.index for record in records.records if record.divergence]
    return f"token {statistics.median(found):g}" if found else ""


def _widest_gap(records: Selection) -> str:
    found = [record.divergence for record in records.records if record.divergence]
    gaps = [divergence.gap for divergence in found if divergence.gap is not None]
    return f"{max(gaps):.3g}" if gaps else ""


def _count(records: Selection) -> str:
    return str(len(records.records) or "")


def _mean(values: Iterable[int]) -> str:
    values = list(values)
    return f"{statistics.mean(values):.0f}" if values else ""


SPECS = {
    "brief": TableSpec(
        "In brief",
        "In brief: from the worst task to the best",
        lambda view: view.by_temperature(_span(SPEED_UP), _span(TAU), _span(SPEED)),
        notes=("The least and the greatest figure of any task.",),
        at_each_temperature=False,
        chart=ChartSpec("speed-up", column="speed-up", joined=False, level=1.0),
    ),
    "lossless": TableSpec(
        "Losslessness",
        "Is the text that of plain decoding?",
        lambda view: view.by_temperature(
            Words("identical", _identical),
            Words("share", _identical_share),
            Words("first differs at", _first_difference),
            Words("widest gap", _widest_gap),
        ),
        notes=(
            "Identical: equal, token for token, to plain decoding of the same sample, temperature "
            "and seed; of the texts that were compared.",
            "In float32 all are, and in bfloat16 and float16 where the device's kernels add in one "
            "order. Elsewhere sums of another shape may flip a near-tie. Widest gap: how much "
            "plain decoding's own scores prefer its token at the first difference, noise and "
            "temperature included; the greatest of the texts whose gap is known. First differs at: "
            "the median of the texts that differ.",
        ),
        at_each_temperature=False,
    ),
    "main": TableSpec(
        "Tasks and methods",
        "τ, speed and speed-up by task",
        lambda view: view.by_task(TAU, SPEED, SPEED_UP),
        notes=("LongSpec, Table 1 and Figure 3. Bold: the best of a column.",),
        marks_best=True,
    ),
    "pairs": TableSpec(
        "Methods against each other",
        "Methods against each other on the same samples",
        lambda view: view.by_task(
            Figure("speed ratio", SPEED_UP.estimate, times, neutral=1),
            Figure("τ difference", lambda each: each.difference(acceptance), signed, neutral=0),
        ),
        rows=_pairs,
        corner="first : second",
        notes=(
            "Speed ratio: tokens/s of the first method / that of the second. τ difference: τ of "
            "the first minus that of the second. Both are over the samples and seeds that both "
            "decoded, and a resample takes a sample for both methods.",
            "Bold: the interval excludes 1, or 0. Of many pairs some do by chance.",
        ),
    ),
    "lengths": TableSpec(
        "Length of the prompt",
        "By the length of the prompt in tokens",
        _by_length,
        bodies=by_task_and_block,
        notes=(
            "LongSpec, Table 4; SpecExtend, Table 2, whose own τ counts accepted draft tokens "
            "alone and is smaller by one. Ranges without a sample are left out. Draft, target and "
            "verify time: milliseconds per round.",
        ),
    ),
    "depth": TableSpec(
        "Acceptance by depth",
        "Acceptance by depth",
        _by_depth,
        rows=speculative_methods,
        notes=(
            "Share of all rounds whose accepted path reaches the depth. One plus the sum of a line "
            "is τ, except for last rounds that end inside the draft. A share / the one before is "
            "the chance that a path continues.",
        ),
        chart=ChartSpec("share of rounds", "depth"),
    ),
    "context": TableSpec(
        "Acceptance along the context",
        "Acceptance by position in the context",
        _by_position,
        rows=speculative_methods,
        notes=(
            "τ of the rounds whose first new token stands in the range, counted from the beginning "
            "of the prompt.",
        ),
        chart=ChartSpec("τ", "position"),
    ),
    "parts": TableSpec(
        "Parts of a round",
        "Where the time of a round goes",
        lambda view: view.one_group(
            "ms per round",
            *PARTS,
            _column("their sum", partial(part_of_round, [*PART_NAMES]), milliseconds),
            _column("untouched round", untouched_round, milliseconds),
        ),
        notes=(
            "LongSpec, Figure 5, without its split of the target's time into attention and the "
            "rest. Untouched round: decode seconds / rounds of the run that all other tables show.",
        ),
        chart=ChartSpec("seconds per round", joined=False),
    ),
    "batches": TableSpec(
        "Batches",
        "Throughput by batch",
        _by_batch,
        bodies=_conditions,
        notes=("LongSpec, Figure 7. The last call of a run may have fewer rows.",),
        chart=ChartSpec("tokens/s", "batch"),
    ),
    "quality": TableSpec(
        "Quality",
        "Quality of the answers",
        _by_metric,
        notes=(
            "100 x the mean over texts of the best score against any reference. A lossless method "
            "has plain decoding's score; only texts that are not identical differ.",
            *(f"{metric.name}: {metric.meaning}." for metric in METRICS.values()),
        ),
    ),
    "times": TableSpec(
        "What a user waits for",
        "Seconds, and speed with the prefill",
        lambda view: view.one_group(
            "",
            Words("texts", _count),
            Words("prompt tokens", lambda each: _mean(r.prompt_tokens for r in each.records)),
            Words("new tokens", lambda each: _mean(r.new_tokens for r in each.records)),
            _column("prefill (s)", partial(seconds_of, "prefill_s"), seconds),
            _column("decoding (s)", partial(seconds_of, "decode_s"), seconds),
            SPEED,
            _column("tokens/s with prefill", whole_speed, rate),
            Figure("speed-up with prefill", lambda each: each.ratio(whole_speed), times),
            _column("ended by a stop token", stopped, percent),
        ),
        bodies=by_task_and_block,
        notes=(
            "Tokens and seconds are means of a text; of a batch, a row's share of its call. "
            "Compilation and detokenisation are excluded.",
            "With prefill: all new tokens / seconds of prefill and decoding. Spec-Bench counts so "
            "too, but averages the rates of questions.",
        ),
    ),
}
"""What every section of a report shows of its records."""
