"""How speed, acceptance and the parts of a round change with the length of the prompt.

The layouts are the LongSpec paper's Table 4 (ranges of lengths as columns) and SpecExtend's Table 2
(nominal lengths as columns, tasks as bodies).
"""

from collections.abc import Sequence

from ..eval.records import PLAIN_METHOD, SampleRecord
from . import intervals
from .blocks import Block, all_tasks, all_temperatures
from .context_bins import Bin, nominal, occupied
from .counting import DEFINITIONS, Part, acceptance, figure, pairs, speed
from .round_parts import PART_NAMES, PART_NOTES, part_of_round
from .table import (
    Body,
    Cell,
    Format,
    Group,
    Line,
    Table,
    filled,
    length,
    mark_best,
    milliseconds,
    pace,
    said,
    shown,
    slug,
    temperature_words,
    times,
    with_figures,
)

SPECEXTEND_COLUMNS = ("τ", "tokens/s", "speed-up")


def by_range(blocks: Sequence[Block], edges: Sequence[int]) -> list[Table]:
    """The paper's Table 4, one for every task and temperature.

    Args:
      blocks: of the report.
      edges: of the ranges, ascending from 0.
    """
    return with_figures(
        _range_table(blocks, task, temperature, edges)
        for temperature in all_temperatures(blocks)
        for task in all_tasks(blocks)
    )


def _range_table(
    blocks: Sequence[Block], task: str, temperature: float, edges: Sequence[int]
) -> Table:
    of_task = [
        record
        for block in blocks
        for method in block.methods
        for record in block.of(task, method, temperature)
    ]
    ranges = occupied((record.prompt_tokens for record in of_task), edges)
    bodies = [
        Body(
            f"{block.label}: {method}" if len(blocks) > 1 else method,
            _range_lines(block, block.of(task, method, temperature), ranges),
        )
        for block in blocks
        for method in block.methods
        if block.of(task, method, temperature)
    ]
    return Table(
        key=slug("lengths", task, temperature),
        caption=f"{task} by the length of the prompt, {temperature_words(temperature)}",
        corner="prompt tokens",
        groups=(Group("", tuple(each.name for each in ranges)),),
        bodies=tuple(bodies),
        notes=(
            "The layout of the LongSpec paper's Table 4; ranges without a sample are left out.",
            *(f"{name}: {DEFINITIONS[name]}." for name in ("τ", "tokens/s")),
            *PART_NOTES,
        ),
    )


def _range_lines(
    block: Block, records: Sequence[SampleRecord], ranges: Sequence[Bin]
) -> tuple[Line, ...]:
    columns = [[record for record in records if record.prompt_tokens in each] for each in ranges]
    lines = [
        Line("samples", tuple(said(str(len(column))) for column in columns)),
        Line("decoding speed (tokens/s)", _figures(block, columns, speed, pace)),
        Line("acceptance length τ", _figures(block, columns, acceptance, length)),
    ]
    if any(record.breakdown for record in records):
        lines += [
            Line(f"{name} (ms)", _figures(block, columns, part_of_round(part), milliseconds))
            for part, name in PART_NAMES.items()
        ]
    return tuple(lines)


def _figures(
    block: Block, columns: Sequence[Sequence[SampleRecord]], part: Part, words: Format
) -> tuple[Cell, ...]:
    return tuple(shown(figure(block, column, part), words) for column in columns)


def by_nominal_length(blocks: Sequence[Block]) -> list[Table]:
    """SpecExtend's Table 2, one for every temperature."""
    return with_figures(_nominal_table(blocks, value) for value in all_temperatures(blocks))


def _nominal_table(blocks: Sequence[Block], temperature: float) -> Table:
    lengths = sorted(
        {
            nominal(record.prompt_tokens)
            for block in blocks
            for record in block.records
            if record.temperature == temperature
        }
    )
    bodies = (
        Body(
            f"{task}, {block.label}" if len(blocks) > 1 else task,
            _nominal_lines(block, task, temperature, lengths),
        )
        for task in all_tasks(blocks)
        for block in blocks
    )
    return Table(
        key=slug("nominal", temperature),
        caption=f"By task and nominal length of the prompt, {temperature_words(temperature)}",
        corner="method",
        groups=tuple(Group(_power(each), SPECEXTEND_COLUMNS) for each in lengths),
        bodies=tuple(filter(filled, bodies)),
        notes=(
            "The layout of SpecExtend's Table 2; a prompt stands under the power of two that its "
            "length is nearest to.",
            *(f"{name}: {DEFINITIONS[name]}." for name in SPECEXTEND_COLUMNS),
            "SpecExtend's own τ counts accepted draft tokens alone: it is smaller by one.",
        ),
    )


def _power(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def _nominal_lines(
    block: Block, task: str, temperature: float, lengths: Sequence[int]
) -> tuple[Line, ...]:
    def near(method: str, tokens: int) -> list[SampleRecord]:
        records = block.of(task, method, temperature)
        return [record for record in records if nominal(record.prompt_tokens) == tokens]

    lines = []
    for method in block.methods:
        cells: list[Cell] = []
        for tokens in lengths:
            records, plain = near(method, tokens), near(PLAIN_METHOD, tokens)
            gain = intervals.ratio_of_ratios(pairs(block, records, plain, speed))
            cells += [
                shown(figure(block, records, acceptance), length),
                shown(figure(block, records, speed), pace),
                shown(gain, times),
            ]
        lines.append(Line(method, tuple(cells)))
    return mark_best(lines, range(len(SPECEXTEND_COLUMNS) * len(lengths)))
