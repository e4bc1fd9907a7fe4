"""What a user waits for: prefill, decoding, and both together."""

import statistics
from collections.abc import Iterable, Sequence

from ..eval.records import PLAIN_METHOD, SampleRecord
from . import intervals
from .blocks import Block, all_tasks, all_temperatures
from .counting import DEFINITIONS, Part, figure, pairs, speed, whole_speed
from .intervals import Fraction
from .table import (
    Body,
    Group,
    Line,
    Table,
    pace,
    percent,
    said,
    shown,
    slug,
    temperature_words,
    times,
    with_figures,
)

COLUMNS = (
    "texts",
    "prompt tokens",
    "new tokens",
    "prefill (s)",
    "decoding (s)",
    "tokens/s",
    "tokens/s with prefill",
    "speed-up with prefill",
    "ended by a stop token",
)


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One for every temperature; a body for every block and task."""
    return with_figures(_table(blocks, value) for value in all_temperatures(blocks))


def _table(blocks: Sequence[Block], temperature: float) -> Table:
    return Table(
        key=slug("times", temperature),
        caption=f"Seconds, and speed with the prefill, {temperature_words(temperature)}",
        corner="method",
        groups=(Group("", COLUMNS),),
        bodies=tuple(
            Body(
                f"{task}, {block.label}" if len(blocks) > 1 else task,
                _lines(block, task, temperature),
            )
            for task in all_tasks(blocks)
            for block in blocks
        ),
        notes=(
            "Tokens and seconds are means of a text; of a batch, a row's share of its call. "
            "Compilation and detokenisation are in none of them.",
            f"tokens/s: {DEFINITIONS['tokens/s']}.",
            "With prefill: all new tokens / seconds of prefill and decoding (Spec-Bench counts so, "
            "but averages rates of questions); the speed-up is that by plain decoding's.",
        ),
    )


def _lines(block: Block, task: str, temperature: float) -> tuple[Line, ...]:
    plain = block.of(task, PLAIN_METHOD, temperature)
    lines = []
    for method in block.methods:
        records = block.of(task, method, temperature)
        if not records:
            continue
        gain = intervals.ratio_of_ratios(pairs(block, records, plain, whole_speed))
        prefill, decoding = (
            shown(figure(block, records, _share_of(field)), _seconds)
            for field in ("prefill_s", "decode_s")
        )
        cells = (
            said(str(len(records))),
            said(_mean(record.prompt_tokens for record in records)),
            said(_mean(record.new_tokens for record in records)),
            prefill,
            decoding,
            shown(figure(block, records, speed), pace),
            shown(figure(block, records, whole_speed), pace),
            shown(gain, times),
            shown(figure(block, records, _stopped), percent),
        )
        lines.append(Line(method, cells))
    return tuple(lines)


def _share_of(field: str) -> Part:
    """A row's share of its call's seconds, by texts."""

    def part(block: Block, record: SampleRecord) -> Fraction:
        return Fraction(getattr(record, field) / block.rows_of_call[record.call], 1)

    return part


def _stopped(block: Block, record: SampleRecord) -> Fraction:
    return Fraction(record.ended == "eos", 1)


def _mean(values: Iterable[int]) -> str:
    return f"{statistics.mean(values):.0f}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
