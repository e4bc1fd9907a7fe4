"""The charts of a report, drawn from its tables as SVG elements.

All charts are of one kind: points with their intervals, a series for every method, joined by lines
where the places have an order. A style sheet colours them for light and dark. Every text is
escaped: names come from files.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ..eval.records import PLAIN_METHOD
from .blocks import Block
from .figures import Estimate
from .table import ChartSpec, Table

LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 14.0, 50.0
"""Margins around the field of values, in pixels."""
FIELD = 230.0
PLACE, ASIDE = 92.0, 9.0
"""Least width of a place, and the distance between series within it."""
LETTER, ROW = 6.9, 20.0
"""Approximate width of a letter, since SVG measures no text; height of a row of the legend."""
LEGEND = 320.0
SHAPES = 4
"""Marks, so that series differ in more than colour."""
PLAIN_COLOUR = 7
"""Grey, the last of the style sheet's colours."""


@dataclass(frozen=True)
class Series:
    """Values of one name, one per place; None where there is none."""

    name: str
    values: tuple[Estimate | None, ...]
    colour: int = 0
    """Of the style sheet; a method has the same in every chart."""


@dataclass(frozen=True)
class Chart:
    """Points of several series along places."""

    key: str
    title: str
    spec: ChartSpec
    places: tuple[str, ...]
    """Names along the other axis."""
    series: tuple[Series, ...]

    @property
    def words(self) -> str:
        """All values, for readers who cannot see the chart."""
        found = []
        for series in self.series:
            values = [
                f"{place} {value.value:.3g}"
                for place, value in zip(self.places, series.values, strict=True)
                if value is not None
            ]
            found.append(f"{series.name}: {', '.join(values) or 'no value'}")
        return f"{self.spec.unit}. {'; '.join(found)}."


def colours(blocks: Iterable[Block]) -> dict[str, int]:
    """The colour of every method, the last for plain decoding."""
    numbers = itertools.cycle(range(PLAIN_COLOUR))
    methods = dict.fromkeys(method for block in blocks for method in block.methods)
    return {name: PLAIN_COLOUR if name == PLAIN_METHOD else next(numbers) for name in methods}


def charts(tables: Iterable[Table], colours: Mapping[str, int], spec: ChartSpec) -> list[Chart]:
    """A chart for every body of some tables."""
    found = []
    for table in tables:
        for number, body in enumerate(table.bodies):
            places = [
                (index, name if spec.column is None else group)
                for index, (group, name) in enumerate(table.columns)
                if spec.column in (None, name)
                and any(line.cells[index].estimate for line in body.lines)
            ]
            series = [
                Series(line.name, values, colours[line.name])
                for line in body.lines
                if any(values := tuple(line.cells[index].estimate for index, _ in places))
            ]
            if series:
                found.append(
                    Chart(
                        key=f"{table.key}-chart-{number}",
                        title=f"{table.caption}: {body.name}",
                        spec=spec,
                        places=tuple(name for _, name in places),
                        series=tuple(series),
                    )
                )
    return found


def draw(chart: Chart) -> Markup:
    """A chart as one SVG element, with its title and its values in words."""
    values = [value for series in chart.series for value in series.values if value]
    tops = [value.value if value.high is None else value.high for value in values]
    top, ticks = _ticks(max([*tops, chart.spec.level or 0]))
    least = max(PLACE, ASIDE * (len(chart.series) + 2))
    place = max([least, *(LETTER * len(name) + 12 for name in chart.places)])
    field = LEFT + place * len(chart.places) + RIGHT
    legend, right, rows = _legend(chart.series, field)
    width, below = max(field, right), TOP + FIELD + BOTTOM
    whole = below + ROW * rows
    names = [f"{chart.key}-title", f"{chart.key}-words"]
    return element(
        "svg",
        element("title", chart.title, id=names[0]),
        element("desc", chart.words, id=names[1]),
        *_axes(chart, place, field, ticks),
        *(part for index in range(len(chart.series)) for part in _points(chart, index, place, top)),
        element("g", *legend, transform=f"translate(0 {below:.0f})"),
        role="img",
        aria_labelledby=" ".join(names),
        viewBox=f"0 0 {width:.0f} {whole:.0f}",
        width=f"{width:.0f}",
        height=f"{whole:.0f}",
        class_="chart",
    )


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An element.

    Args:
      name: of the element.
      *children: elements, and texts, which are escaped.
      **attributes: with an underscore for a hyphen, and one behind it for a word of Python.
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else value
        )
        for key, value in attributes.items()
    )
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(name, given, inner)


def _ticks(highest: float) -> tuple[float, list[float]]:
    """The end of an axis from 0, a little above the highest value, and its ticks."""
    highest = highest if highest > 0 and math.isfinite(highest) else 1.0
    rough = highest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough)
    number = math.ceil(1.04 * highest / step)
    return number * step, [step * index for index in range(number + 1)]


def _height(value: float, top: float) -> float:
    """The place of a value, from the top."""
    return TOP + FIELD * (1 - value / top)


def _axes(chart: Chart, place: float, width: float, ticks: Sequence[float]) -> Iterator[Markup]:
    """Lines across with their values, the unit, and the names of the places."""
    across = {"x1": LEFT, "x2": width - RIGHT}
    for tick in ticks:
        y = _height(tick, ticks[-1])
        yield element("line", **across, y1=y, y2=y, class_="grid")
        yield element("text", f"{tick:g}", x=LEFT - 7, y=y + 4, class_="tick end")
    if chart.spec.level is not None:
        y = _height(chart.spec.level, ticks[-1])
        yield element("line", **across, y1=y, y2=y, class_="level")
    middle = TOP + FIELD / 2
    turned = f"rotate(-90 13 {middle:.0f})"
    yield element("text", chart.spec.unit, x=13.0, y=middle, transform=turned, class_="unit middle")
    for index, name in enumerate(chart.places):
        x = LEFT + place * (index + 0.5)
        yield element("text", name, x=x, y=TOP + FIELD + 18, class_="middle")
    if chart.spec.place_unit:
        x = LEFT + place * len(chart.places) / 2
        yield element("text", chart.spec.place_unit, x=x, y=TOP + FIELD + 37, class_="unit middle")


def _points(chart: Chart, number: int, place: float, top: float) -> Iterator[Markup]:
    """The line, the intervals and the points of a series, beside those of the others."""
    series = chart.series[number]
    aside = ASIDE * (number - (len(chart.series) - 1) / 2)
    points = [
        (LEFT + place * (index + 0.5) + aside, name, value)
        for index, (name, value) in enumerate(zip(chart.places, series.values, strict=True))
        if value is not None
    ]
    if chart.spec.joined:
        way = "L".join(f"{x:.1f} {_height(value.value, top):.1f}" for x, _, value in points)
        yield element("path", d=f"M{way}", class_=f"line s{series.colour}")
    for x, name, value in points:
        words = f"{name}, {series.name}: {value.value:.3g}"
        if value.low is not None and value.high is not None:
            low, high = _height(max(value.low, 0), top), _height(value.high, top)
            path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
            yield element("path", d=path, class_="whisker")
            words += f" ({value.low:.3g} to {value.high:.3g})"
        yield _mark(series.colour, x, _height(value.value, top), element("title", words))


def _mark(colour: int, x: float, y: float, *tip: Markup) -> Markup:
    """Circle, square, triangle or diamond."""
    paths = {
        1: f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        2: f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
        3: f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    }
    shape = colour % SHAPES
    if shape in paths:
        return element("path", *tip, d=paths[shape], class_=f"point s{colour}")
    return element("circle", *tip, cx=x, cy=y, r=4.5, class_=f"point s{colour}")


def _legend(series: Iterable[Series], width: float) -> tuple[list[Markup], float, int]:
    """Names beside their marks, the right end of the longest row, and the number of rows."""
    parts, x, y, right = [], LEFT, 0.0, 0.0
    for each in series:
        size = 24 + LETTER * len(each.name) + 16
        if x > LEFT and x + size > max(width, LEGEND):
            x, y = LEFT, y + ROW
        parts += [_mark(each.colour, x + 9, y + 7), element("text", each.name, x=x + 22, y=y + 11)]
        x += size
        right = max(right, x)
    return parts, right, 1 + round(y / ROW)
