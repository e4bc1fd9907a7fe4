"""Charts are drawn to scale, and say in words what they show."""

import xml.etree.ElementTree as ElementTree

import pytest

from infer.report.chart import Bars, Chart, Lines, Series, Stack
from infer.report.intervals import Estimate
from infer.report.svg import FIELD, TOP, draw

from .made import HOSTILE


def estimates(*values: float | None, spread: float = 0) -> tuple[Estimate | None, ...]:
    return tuple(
        None if value is None else Estimate(value, value - spread, value + spread, 9)
        for value in values
    )


def drawn(chart: Chart) -> ElementTree.Element:
    """The chart as XML: it would not parse if a name were not escaped."""
    return ElementTree.fromstring(draw(chart))


def of_class(chart: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in chart.iter() if name in each.get("class", "").split()]


def value_of(chart: ElementTree.Element, y: float) -> float:
    """The value at a height, by the axis as it is labelled."""
    ticks = [each for each in of_class(chart, "tick") if "end" in (each.get("class") or "")]
    top = max(float(each.text or 0) for each in ticks)
    return top * (TOP + FIELD - y) / FIELD


NAMES = {"key": "a", "title": HOSTILE, "unit": "speed-up", "place_unit": "task"}


def test_bars_have_the_height_of_their_values() -> None:
    series = (
        Series(HOSTILE, estimates(2.0, None, 0.5, spread=0.25)),
        Series("b", estimates(None, 3.0, 1.0)),
    )
    chart = drawn(Bars(**NAMES, places=("x", "y", "z"), series=series, level=1.0))
    bars = [each for each in of_class(chart, "bar") if each.find("title") is not None]
    heights = [float(each.get("height", 0)) for each in bars]
    tops = [value_of(chart, float(each.get("y", 0))) for each in bars]
    assert tops == pytest.approx([2.0, 0.5, 3.0, 1.0], abs=0.02)
    assert heights == pytest.approx([heights[2] * each / 3 for each in (2, 0.5, 3, 1)], abs=0.2)
    [level] = of_class(chart, "level")
    assert value_of(chart, float(level.get("y1", 0))) == pytest.approx(1.0, abs=0.02)
    first = bars[0].find("title")
    assert first is not None and first.text == f"x, {HOSTILE}: 2 (1.75 to 2.25)"
    titles = [each.text for each in chart.findall("title")]
    [words] = [each.text or "" for each in chart.findall("desc")]
    assert titles == [HOSTILE]
    assert words == f"speed-up. {HOSTILE}: x 2, z 0.5; b: y 3, z 1."


def test_nothing_is_drawn_above_the_axis() -> None:
    """Neither intervals, nor the line to hold bars to, nor the sum of a stack."""
    high = Bars(**NAMES, places=("x",), series=(Series("a", estimates(1.0, spread=7)),), level=9.0)
    stack = Stack(
        **NAMES,
        places=("x",),
        series=(Series("a", estimates(4.0)), Series("b", estimates(5.0))),
        marks=(12.0,),
        mark_name="untouched",
    )
    for chart in (drawn(high), drawn(stack)):
        # The legend, which has a place of its own, is no child.
        ys = [float(value) for each in chart if (value := each.get("y1")) is not None]
        assert len(ys) > 3 and min(ys) >= TOP


def test_stacks_stand_on_each_other() -> None:
    series = (Series("draft", estimates(1.0)), Series("target", estimates(3.0)))
    chart = drawn(Stack(**NAMES, places=("m",), series=series, marks=(2.0,), mark_name="untouched"))
    lower, upper = (each for each in of_class(chart, "bar") if each.find("title") is not None)
    assert float(upper.get("y", 0)) + float(upper.get("height", 0)) == pytest.approx(
        float(lower.get("y", 0)), abs=0.11
    )
    assert value_of(chart, float(upper.get("y", 0))) == pytest.approx(4.0, abs=0.02)
    legend = [each.text for each in chart.iter() if each.tag == "text"]
    assert {"draft", "target", "untouched"} <= set(legend)


def test_lines_pass_over_what_is_missing() -> None:
    series = tuple(
        Series(str(number), estimates(1.0, None, 2.0), number % 8) for number in range(9)
    )
    chart = drawn(Lines(**NAMES, places=("1", "2", "4"), series=series))
    assert len(of_class(chart, "line")) == 9
    marks = [each for each in of_class(chart, "point") if each.find("title") is not None]
    assert len(marks) == 18
    assert len({each.tag for each in marks}) == 2  # Circles, and three kinds of paths.


def test_a_chart_of_zeros_has_an_axis() -> None:
    chart = drawn(Lines(**NAMES, places=("1",), series=(Series("a", estimates(0.0)),)))
    assert of_class(chart, "grid")
