"""The LongSpec paper's Table 1: tokens per pass, speed and speed-up, by method and task."""

from collections.abc import Sequence

from .blocks import Block, all_tasks, all_temperatures
from .counting import DEFINITIONS, acceptance, figure, speed, speed_up
from .table import (
    Body,
    Cell,
    Group,
    Line,
    Table,
    length,
    lines,
    mark_best,
    pace,
    shown,
    slug,
    temperature_words,
    times,
    with_figures,
)

COLUMNS = ("τ", "tokens/s", "speed-up")


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One for every temperature (the paper's table is of T = 0, its Figure 3 of T = 1)."""
    return with_figures(_table(blocks, value) for value in all_temperatures(blocks))


def _table(blocks: Sequence[Block], temperature: float) -> Table:
    tasks = all_tasks(blocks)
    return Table(
        key=slug("main", temperature),
        caption=f"Tokens per pass, speed and speed-up by task, {temperature_words(temperature)}",
        corner="method",
        groups=tuple(Group(task, COLUMNS) for task in tasks),
        bodies=tuple(
            Body(block.label, _lines(block, tasks, temperature))
            for block in blocks
            if temperature in block.temperatures
        ),
        notes=(
            "The layout of the LongSpec paper's Table 1 and Figure 3. Bold: the best of a column.",
            *(f"{name}: {DEFINITIONS[name]}." for name in COLUMNS),
        ),
    )


def _lines(block: Block, tasks: Sequence[str], temperature: float) -> tuple[Line, ...]:
    def cells(method: str, task: str) -> tuple[Cell, ...]:
        records = block.of(task, method, temperature)
        return (
            shown(figure(block, records, acceptance), length),
            shown(figure(block, records, speed), pace),
            shown(speed_up(block, task, method, temperature), times),
        )

    return mark_best(lines(block.methods, tasks, cells), range(len(COLUMNS) * len(tasks)))
