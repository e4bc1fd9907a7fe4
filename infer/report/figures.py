"""The charts of a report: what its tables have, to be seen at once."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..eval.records import PLAIN_METHOD
from . import acceptance_tables, batch_table, round_parts
from .blocks import Block, all_tasks, all_temperatures
from .chart import Bars, Chart, Lines, Series, Stack
from .counting import figure, speed_up
from .intervals import Estimate
from .table import slug, temperature_words

PLAIN_COLOUR = 7
"""Grey, the last of the style sheet's colours."""


def speed_ups(blocks: Sequence[Block]) -> list[Chart]:
    """Speed-up over plain decoding by task."""
    return _drawable(
        Bars(
            key=slug("speed-ups", place, temperature),
            title=_title("Speed-up over plain decoding", block, temperature),
            unit="speed-up",
            places=block.tasks,
            place_unit="",
            series=tuple(
                Series(
                    method,
                    tuple(speed_up(block, task, method, temperature) for task in block.tasks),
                )
                for method in block.speculative
            ),
            level=1.0,
        )
        for place, block, temperature in _each(blocks)
    )


def latency_parts(blocks: Sequence[Block]) -> list[Chart]:
    """The paper's Figure 5: the parts of a round, a bar for every method."""
    return _drawable(
        _parts_of(place, block, temperature) for place, block, temperature in _each(blocks)
    )


def _parts_of(place: int, block: Block, temperature: float) -> Stack:
    records = {
        method: [r for r in block.all_tasks(method, temperature) if r.breakdown]
        for method in block.methods
    }
    methods = tuple(method for method in block.methods if records[method])
    untouched = [figure(block, records[name], round_parts.untouched_round) for name in methods]
    return Stack(
        key=slug("parts", place, temperature),
        title=_title("Where the time of a round goes", block, temperature),
        unit="ms a round",
        places=methods,
        place_unit="",
        series=tuple(
            Series(
                name,
                tuple(
                    _milliseconds(figure(block, records[method], round_parts.part_of_round(part)))
                    for method in methods
                ),
            )
            for part, name in round_parts.PART_NAMES.items()
        ),
        marks=tuple(1000 * each.value if each else None for each in untouched),
        mark_name="untouched round",
    )


def _milliseconds(seconds: Estimate | None) -> Estimate | None:
    """Without the interval: a stack has no room for it."""
    return seconds and Estimate(1000 * seconds.value, None, None, seconds.samples)


def throughputs(blocks: Sequence[Block]) -> list[Chart]:
    """The paper's Figure 7: tokens/s by batch, of every task that was run at several."""
    charts: list[Chart] = []
    for number, sizes in enumerate(batch_table.families(blocks)):
        methods = dict.fromkeys(method for block in sizes for method in block.methods)
        for task in all_tasks(sizes):
            for temperature in all_temperatures(sizes):
                charts.append(
                    Lines(
                        key=slug("throughput", number, task, temperature),
                        title=f"Throughput by batch: {task}, {temperature_words(temperature)}, "
                        f"{sizes[0].condition}",
                        unit="tokens/s",
                        places=tuple(block.batch_words for block in sizes),
                        place_unit="batch",
                        series=tuple(
                            Series(
                                method,
                                tuple(batch_table.throughput(sizes, task, method, temperature)),
                            )
                            for method in methods
                        ),
                    )
                )
    return _drawable(charts)


def depths(blocks: Sequence[Block]) -> list[Chart]:
    """Shares of rounds that accept a draft token at every depth."""
    charts: list[Chart] = []
    for place, block, temperature in _each(blocks):
        deepest = acceptance_tables.deepest([block], temperature)
        charts.append(
            Lines(
                key=slug("depths", place, temperature),
                title=_title("Acceptance by depth", block, temperature),
                unit="share of rounds",
                places=tuple(str(depth) for depth in range(1, deepest + 1)),
                place_unit="depth",
                series=tuple(
                    Series(
                        method,
                        tuple(acceptance_tables.depth_shares(block, method, temperature, deepest)),
                    )
                    for method in block.speculative
                ),
            )
        )
    return _drawable(charts)


def contexts(blocks: Sequence[Block], edges: Sequence[int]) -> list[Chart]:
    """τ of rounds by their position in the context.

    Args:
      blocks: of the report.
      edges: of the ranges, ascending from 0.
    """
    charts: list[Chart] = []
    for place, block, temperature in _each(blocks):
        ranges = acceptance_tables.context_ranges([block], temperature, edges)
        charts.append(
            Lines(
                key=slug("contexts", place, temperature),
                title=_title("Acceptance by position in the context", block, temperature),
                unit="τ",
                places=tuple(each.name for each in ranges),
                place_unit="position",
                series=tuple(
                    Series(
                        method,
                        tuple(
                            acceptance_tables.context_lengths(block, method, temperature, ranges)
                        ),
                    )
                    for method in block.speculative
                ),
            )
        )
    return _drawable(charts)


def _each(blocks: Sequence[Block]) -> Iterator[tuple[int, Block, float]]:
    for place, block in enumerate(blocks):
        for temperature in block.temperatures:
            yield place, block, temperature


def _title(what: str, block: Block, temperature: float) -> str:
    return f"{what}: {block.label}, {temperature_words(temperature)}"


def _drawable(charts: Iterable[Chart]) -> list[Chart]:
    """Charts of what there are values for, coloured, without the series that have none."""
    kept = []
    for chart in charts:
        coloured = _coloured(chart.series)
        series = tuple(each for each in coloured if any(v is not None for v in each.values))
        if series and chart.places:
            kept.append(dataclasses.replace(chart, series=series))
    return kept


def _coloured(series: Sequence[Series]) -> list[Series]:
    """Plain decoding in the last colour, all others one after another."""
    colours = itertools.cycle(range(PLAIN_COLOUR))
    return [
        dataclasses.replace(
            each, colour=PLAIN_COLOUR if each.name == PLAIN_METHOD else next(colours)
        )
        for each in series
    ]
