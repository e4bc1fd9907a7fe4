"""Charts are drawn to scale, hold all that they draw, and say in words what they show."""

import xml.etree.ElementTree as ElementTree

import pytest

from infer.report.charts import FIELD, LETTER, TOP, Chart, Series, draw
from infer.report.figures import Estimate
from infer.report.table import ChartSpec

from .made import HOSTILE


def estimates(*values: float | None, spread: float = 0) -> tuple[Estimate | None, ...]:
    return tuple(
        None if value is None else Estimate(value, value - spread, value + spread, 9)
        for value in values
    )


def chart(*series: Series, places: str = "xyz", **changed) -> Chart:
    spec = ChartSpec("speed-up", "task", **changed)
    return Chart("a", HOSTILE, spec, tuple(places), series)


def drawn(of: Chart) -> ElementTree.Element:
    """The chart as XML: it would not parse if a name were not escaped."""
    return ElementTree.fromstring(draw(of))


def of_class(found: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in found.iter() if name in each.get("class", "").split()]


def value_at(found: ElementTree.Element, y: float) -> float:
    """The value at a height, by the axis as it is labelled."""
    top = max(float(each.text or 0) for each in of_class(found, "tick"))
    return top * (TOP + FIELD - y) / FIELD


def test_points_stand_at_the_height_of_their_values() -> None:
    found = drawn(
        chart(
            Series(HOSTILE, estimates(2.0, None, 0.5, spread=0.25)),
            Series("b", estimates(None, 3.0, 1.0), colour=4),
            level=1.0,
        )
    )
    points = [each for each in of_class(found, "point") if each.find("title") is not None]
    heights = [value_at(found, float(each.get("cy", 0))) for each in points]
    assert heights == pytest.approx([2.0, 0.5, 3.0, 1.0], abs=0.02)
    [level] = of_class(found, "level")
    assert value_at(found, float(level.get("y1", 0))) == pytest.approx(1.0, abs=0.02)
    first = points[0].find("title")
    assert first is not None and first.text == f"x, {HOSTILE}: 2 (1.75 to 2.25)"
    assert [each.text for each in found.findall("title")] == [HOSTILE]
    [words] = [each.text for each in found.findall("desc")]
    assert words == f"speed-up. {HOSTILE}: x 2, z 0.5; b: y 3, z 1."


def test_nothing_is_drawn_above_the_axis() -> None:
    """Neither intervals nor the level."""
    for spread, level in ((7.0, None), (0.0, 9.0)):
        found = drawn(chart(Series("a", estimates(1.0, spread=spread)), places="x", level=level))
        # The legend, which has a place of its own, is no child.
        lines = [float(value) for each in found if (value := each.get("y1")) is not None]
        [whisker] = of_class(found, "whisker")
        ends = [float(part.partition("M")[0]) for part in whisker.get("d", "").split("V")[1:]]
        assert len(lines) > 3 and min([*lines, *ends]) >= TOP


@pytest.mark.parametrize("names", [["a method of a long name, " * 3], list("abcdefghi")])
def test_the_legend_is_within_the_picture(names: list[str]) -> None:
    """Also if it is wider than the places of the chart."""
    found = drawn(chart(*(Series(name, estimates(1.0)) for name in names), places="x"))
    [legend] = [each for each in found if each.get("transform", "").startswith("translate")]
    texts = [each for each in legend if each.tag == "text"]
    assert [each.text for each in texts] == names
    right = [float(each.get("x", 0)) + LETTER * len(each.text or "") for each in texts]
    assert max(right) <= float(found.get("width", 0))
    assert found.get("viewBox", "").split()[2] == found.get("width")
    below = float(legend.get("transform", "")[len("translate(0 ") : -1])
    assert below + max(float(each.get("y", 0)) for each in texts) <= float(found.get("height", 0))


def test_lines_pass_over_what_is_missing() -> None:
    series = [Series(str(number), estimates(1.0, None, 2.0), number % 8) for number in range(9)]
    found = drawn(chart(*series))
    assert len(of_class(found, "line")) == 9
    marks = [each for each in of_class(found, "point") if each.find("title") is not None]
    assert len(marks) == 18
    assert len({each.tag for each in marks}) == 2  # Circles, and three kinds of paths.
    assert not of_class(drawn(chart(*series, joined=False)), "line")


def test_a_chart_of_zeros_has_an_axis() -> None:
    assert of_class(drawn(chart(Series("a", estimates(0.0)), places="x")), "grid")
