"""Throughput by the rows of a batch (the LongSpec paper's Figure 7)."""

from collections.abc import Sequence

from .blocks import Block, all_tasks, all_temperatures
from .counting import DEFINITIONS, figure, speed
from .intervals import Estimate
from .table import (
    Body,
    Group,
    Line,
    Table,
    filled,
    pace,
    shown,
    slug,
    temperature_words,
    with_figures,
)


def tables(blocks: Sequence[Block]) -> list[Table]:
    """One for every temperature and condition of which there are several batches."""
    return with_figures(
        _table(number, sizes, temperature)
        for number, sizes in enumerate(families(blocks))
        for temperature in all_temperatures(sizes)
    )


def families(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks that differ in their batch alone, from the smallest on, where there are several."""
    found = []
    for condition in dict.fromkeys(block.condition for block in blocks):
        chosen = [block for block in blocks if block.condition == condition]
        if len(chosen) > 1:
            found.append(sorted(chosen, key=lambda block: block.batch))
    return found


def throughput(
    blocks: Sequence[Block], task: str, method: str, temperature: float
) -> list[Estimate | None]:
    """Tokens/s of all rows together, one a block.

    Args:
      blocks: whose batches differ.
      task: of the samples.
      method: that decoded them.
      temperature: of the draws.
    """
    return [figure(block, block.of(task, method, temperature), speed) for block in blocks]


def _table(number: int, sizes: Sequence[Block], temperature: float) -> Table:
    methods = tuple(dict.fromkeys(method for block in sizes for method in block.methods))
    tasks = all_tasks(sizes)
    bodies = [
        Body(
            task,
            tuple(
                Line(
                    method,
                    tuple(
                        shown(value, pace) for value in throughput(sizes, task, method, temperature)
                    ),
                )
                for method in methods
            ),
        )
        for task in tasks
    ]
    return Table(
        key=slug("batches", number, temperature),
        caption=f"Throughput by batch of {sizes[0].condition}, {temperature_words(temperature)}",
        corner="method",
        groups=(Group("tokens/s at batch", tuple(block.batch_words for block in sizes)),),
        bodies=tuple(filter(filled, bodies)),
        notes=(
            "The figures of the LongSpec paper's Figure 7.",
            f"tokens/s: {DEFINITIONS['tokens/s']}. The last call of a run may have fewer rows.",
        ),
    )
