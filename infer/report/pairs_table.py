"""Methods against each other on the same samples: ratios of speed and differences of τ."""

import itertools
from collections.abc import Sequence

from . import intervals
from .blocks import Block, all_tasks, all_temperatures
from .counting import DEFINITIONS, acceptance, pairs, speed
from .table import (
    Body,
    Cell,
    Group,
    Line,
    Table,
    lines,
    shown,
    signed,
    slug,
    temperature_words,
    times,
    with_figures,
)

COLUMNS = ("speed ratio", "τ difference")


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One for every temperature at which a block has two methods."""
    return with_figures(_table(blocks, value) for value in all_temperatures(blocks))


def _table(blocks: Sequence[Block], temperature: float) -> Table:
    tasks = all_tasks(blocks)
    return Table(
        key=slug("pairs", temperature),
        caption=f"Methods against each other on the same samples, {temperature_words(temperature)}",
        corner="first : second",
        groups=tuple(Group(task, COLUMNS) for task in tasks),
        bodies=tuple(Body(block.label, _lines(block, tasks, temperature)) for block in blocks),
        notes=(
            "Speed ratio: tokens/s of the first method / that of the second; τ difference: τ of "
            "the first minus that of the second; over the samples and seeds that both decoded. "
            "Bold: the interval leaves out 1, or 0; of many pairs some do by chance.",
            *(f"{name}: {DEFINITIONS[name]}." for name in ("τ", "tokens/s")),
            "For an interval a sample is drawn for both methods at once.",
        ),
    )


def _lines(block: Block, tasks: Sequence[str], temperature: float) -> tuple[Line, ...]:
    """All pairs; what ran later comes first, since plain decoding is what others are held to."""
    named = {
        f"{first} : {second}": (first, second)
        for second, first in itertools.combinations(block.methods, 2)
    }
    return lines(named, tasks, lambda name, task: _cells(block, task, *named[name], temperature))


def _cells(
    block: Block, task: str, first: str, second: str, temperature: float
) -> tuple[Cell, Cell]:
    one, other = (block.of(task, method, temperature) for method in (first, second))
    ratio = intervals.ratio_of_ratios(pairs(block, one, other, speed))
    difference = intervals.difference_of_ratios(pairs(block, one, other, acceptance))
    return (
        shown(ratio, times, bold=ratio is not None and ratio.excludes(1)),
        shown(difference, signed, bold=difference is not None and difference.excludes(0)),
    )
