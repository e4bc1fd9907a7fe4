"""Charts as SVG elements of a page, whose style sheet colours them for light and dark.

Every text is escaped: names come from files.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from .chart import Bars, Chart, Lines, Stack
from .intervals import Estimate

LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 14.0, 50.0
"""Margins around the field of values, in pixels."""
FIELD = 230.0
"""Height of the field."""
BAR, GAP = 18.0, 26.0
"""Width of a bar, and the gap between places."""
PLACE = 92.0
"""Width of a place of lines, and the least of one of bars."""
LETTER, ROW = 6.9, 20.0
"""Width of a letter, about, since SVG does not measure text; height of a row of the legend."""
SHAPES = 4
"""Marks of lines, so that they differ in more than colour."""

Height = Callable[[float], float]
"""From a value to its place, from the top."""


class Drawn(NamedTuple):
    """What stands in the field."""

    place: float
    """Width of a place."""
    parts: list[Markup]


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An element.

    Args:
      name: of the element.
      *children: elements, and texts, which are escaped.
      **attributes: with an underscore for a hyphen, and one behind it for a word of Python.
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _plain(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(name, given, inner)


def _plain(value: object) -> object:
    return f"{value:.1f}" if isinstance(value, float) else value


def draw(chart: Chart) -> Markup:
    """A chart as one SVG element, with its title and its values in words."""
    top, ticks = _ticks(_highest(chart))

    def height(value: float) -> float:
        return TOP + FIELD * (1 - value / top)

    place, parts = _painter(chart)(height)
    width = LEFT + place * len(chart.places) + RIGHT
    legend, rows = _legend(chart, width)
    below = TOP + FIELD + BOTTOM
    whole = below + ROW * rows
    names = [f"{chart.key}-title", f"{chart.key}-words"]
    return element(
        "svg",
        element("title", chart.title, id=names[0]),
        element("desc", chart.words, id=names[1]),
        *_axes(chart, place, width, ticks, height),
        *parts,
        element("g", *legend, transform=f"translate(0 {below:.0f})"),
        role="img",
        aria_labelledby=" ".join(names),
        viewBox=f"0 0 {width:.0f} {whole:.0f}",
        width=f"{width:.0f}",
        height=f"{whole:.0f}",
        class_="chart",
    )


def _painter(chart: Chart) -> Callable[[Height], Drawn]:
    if isinstance(chart, Bars):
        return lambda height: _bars(chart, height)
    if isinstance(chart, Stack):
        return lambda height: _stack(chart, height)
    assert isinstance(chart, Lines), chart
    return lambda height: _lines(chart, height)


def _highest(chart: Chart) -> float:
    """The highest point that is drawn."""
    if isinstance(chart, Stack):
        totals = [
            sum(value.value for value in values if value)
            for values in zip(*(series.values for series in chart.series), strict=True)
        ]
        return max([*totals, *(mark for mark in chart.marks if mark)], default=1)
    values = [value for series in chart.series for value in series.values if value]
    tops = [value.value if value.high is None else value.high for value in values]
    level = [chart.level] if isinstance(chart, Bars) and chart.level else []
    return max([*tops, *level], default=1)


def _ticks(highest: float) -> tuple[float, list[float]]:
    """The end of an axis from 0, a little above the highest value, and its ticks."""
    highest = highest if highest > 0 and math.isfinite(highest) else 1.0
    rough = highest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough)
    number = math.ceil(1.04 * highest / step)
    return number * step, [step * index for index in range(number + 1)]


def _axes(
    chart: Chart, place: float, width: float, ticks: Sequence[float], height: Height
) -> Iterator[Markup]:
    """Lines across with their values, the unit, and the names of the places."""
    for tick in ticks:
        y = height(tick)
        yield element("line", x1=LEFT, x2=width - RIGHT, y1=y, y2=y, class_="grid")
        yield element("text", f"{tick:g}", x=LEFT - 7, y=y + 4, class_="tick end")
    middle = TOP + FIELD / 2
    turned = f"rotate(-90 13 {middle:.0f})"
    yield element("text", chart.unit, x=13.0, y=middle, transform=turned, class_="unit middle")
    for index, name in enumerate(chart.places):
        x = LEFT + place * (index + 0.5)
        yield element("text", name, x=x, y=TOP + FIELD + 18, class_="middle")
    if chart.place_unit:
        x = LEFT + place * len(chart.places) / 2
        yield element("text", chart.place_unit, x=x, y=TOP + FIELD + 37, class_="unit middle")


def _least_place(chart: Chart, least: float) -> float:
    """Width of a place that its name fits into."""
    return max([least, *(LETTER * len(name) + 12 for name in chart.places)])


def _bars(chart: Bars, height: Height) -> Drawn:
    place = _least_place(chart, BAR * len(chart.series) + GAP)
    parts: list[Markup] = []
    for number, series in enumerate(chart.series):
        for index, value in enumerate(series.values):
            if value is None:
                continue
            x = LEFT + place * (index + 0.5) + BAR * (number - len(chart.series) / 2)
            tip = element("title", f"{chart.places[index]}, {series.name}: {_told(value)}")
            parts.append(_bar(x + 1, BAR - 2, height(value.value), height(0), series.colour, tip))
            parts += _whisker(x + BAR / 2, value, height)
    if chart.level is not None:
        y, right = height(chart.level), LEFT + place * len(chart.places)
        parts.append(element("line", x1=LEFT, x2=right, y1=y, y2=y, class_="level"))
    return Drawn(place, parts)


def _stack(chart: Stack, height: Height) -> Drawn:
    place = _least_place(chart, 2.5 * BAR + GAP)
    parts: list[Markup] = []
    for index, name in enumerate(chart.places):
        middle, bottom = LEFT + place * (index + 0.5), 0.0
        for series in chart.series:
            value = series.values[index]
            if value is None:
                continue
            tip = element("title", f"{name}, {series.name}: {value.value:.3g} {chart.unit}")
            top = bottom + value.value
            box = height(top), height(bottom)
            parts.append(_bar(middle - BAR, 2 * BAR, *box, series.colour, tip))
            bottom = top
        mark = chart.marks[index] if chart.marks else None
        if mark is not None:
            y = height(mark)
            ends = {"x1": middle - 1.5 * BAR, "x2": middle + 1.5 * BAR}
            tip = element("title", f"{name}, {chart.mark_name}: {mark:.3g} {chart.unit}")
            parts.append(element("line", tip, y1=y, y2=y, **ends, class_="mark"))
    return Drawn(place, parts)


def _bar(x: float, width: float, top: float, bottom: float, colour: int, tip: Markup) -> Markup:
    size = {"width": width, "height": max(bottom - top, 0.0)}
    return element("rect", tip, x=x, y=top, **size, class_=f"bar s{colour}")


def _whisker(x: float, value: Estimate, height: Height) -> list[Markup]:
    """The interval of a bar or a mark."""
    if value.low is None or value.high is None:
        return []
    low, high = height(max(value.low, 0)), height(value.high)
    path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
    return [element("path", d=path, class_="whisker")]


def _lines(chart: Lines, height: Height) -> Drawn:
    place = _least_place(chart, PLACE)
    parts: list[Markup] = []
    for number, series in enumerate(chart.series):
        # Beside each other, so that intervals of several lines can be told apart.
        aside = 5.0 * (number - (len(chart.series) - 1) / 2)
        points = [
            (LEFT + place * (index + 0.5) + aside, value)
            for index, value in enumerate(series.values)
            if value is not None
        ]
        way = "L".join(f"{x:.1f} {height(value.value):.1f}" for x, value in points)
        if points:
            parts.append(element("path", d=f"M{way}", class_=f"line s{series.colour}"))
        for x, value in points:
            parts += _whisker(x, value, height)
            tip = element("title", f"{series.name}: {_told(value)}")
            parts.append(_mark(series.colour, x, height(value.value), tip))
    return Drawn(place, parts)


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


def _legend(chart: Chart, width: float) -> tuple[list[Markup], int]:
    """The names of the series beside their colours, and the rows they take."""
    entries: list[tuple[str, Callable[[float, float], Markup]]] = [
        (series.name, _swatch(chart, series.colour)) for series in chart.series
    ]
    if isinstance(chart, Stack) and chart.mark_name:
        entries.append((chart.mark_name, _line_swatch("mark")))
    parts, x, y = [], LEFT, 0.0
    for name, swatch in entries:
        size = 24 + LETTER * len(name) + 16
        if x > LEFT and x + size > max(width, 320):
            x, y = LEFT, y + ROW
        parts += [swatch(x, y), element("text", name, x=x + 22, y=y + 11)]
        x += size
    return parts, 1 + round(y / ROW)


def _swatch(chart: Chart, colour: int) -> Callable[[float, float], Markup]:
    if isinstance(chart, Lines):
        return lambda x, y: _mark(colour, x + 9, y + 7)
    return lambda x, y: element("rect", x=x, y=y, width=16.0, height=13.0, class_=f"bar s{colour}")


def _line_swatch(kind: str) -> Callable[[float, float], Markup]:
    return lambda x, y: element("line", x1=x, x2=x + 16, y1=y + 7, y2=y + 7, class_=kind)


def _told(value: Estimate) -> str:
    """A value and its interval."""
    if value.low is None or value.high is None:
        return f"{value.value:.3g}"
    return f"{value.value:.3g} ({value.low:.3g} to {value.high:.3g})"
