"""The table a report begins with: what every method gives, from its worst task to its best."""

from collections.abc import Sequence
from functools import partial

from .blocks import Block, all_temperatures
from .counting import DEFINITIONS, acceptance, figure, speed, speed_up
from .intervals import Estimate
from .table import (
    ABSENT,
    Body,
    Cell,
    Format,
    Group,
    Table,
    length,
    lines,
    pace,
    said,
    slug,
    temperature_words,
    times,
    with_figures,
)

COLUMNS = ("speed-up", "τ", "tokens/s")


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One table of all temperatures."""
    temperatures = all_temperatures(blocks)
    bodies = tuple(
        Body(block.label, lines(block.methods, temperatures, partial(_cells, block)))
        for block in blocks
    )
    table = Table(
        key=slug("brief"),
        caption="In brief: from the worst task to the best",
        corner="method",
        groups=tuple(Group(temperature_words(value), COLUMNS) for value in temperatures),
        bodies=bodies,
        notes=(
            "The least and the greatest of the tasks' figures, which the tables below have one by "
            "one with their intervals.",
            *(f"{name}: {DEFINITIONS[name]}." for name in COLUMNS),
        ),
    )
    return with_figures([table])


def _cells(block: Block, method: str, temperature: float) -> tuple[Cell, ...]:
    gains = [speed_up(block, task, method, temperature) for task in block.tasks]
    records = [block.of(task, method, temperature) for task in block.tasks]
    return (
        _span(gains, times),
        _span([figure(block, each, acceptance) for each in records], length),
        _span([figure(block, each, speed) for each in records], pace),
    )


def _span(estimates: Sequence[Estimate | None], words: Format) -> Cell:
    values = [estimate.value for estimate in estimates if estimate is not None]
    if not values:
        return Cell(ABSENT)
    ends = dict.fromkeys(words(value) for value in (min(values), max(values)))
    return said(" to ".join(ends))
