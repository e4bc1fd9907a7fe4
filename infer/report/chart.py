"""Charts as they are meant, apart from how they are drawn."""

from dataclasses import dataclass

from .intervals import Estimate


@dataclass(frozen=True)
class Series:
    """Values of one name, one a place; None where there is none."""

    name: str
    values: tuple[Estimate | None, ...]
    colour: int = 0
    """Which of the style sheet's; of a method the same in every chart."""


@dataclass(frozen=True)
class Chart:
    """What all charts have."""

    key: str
    title: str
    unit: str
    """Of the values, beside the axis."""
    places: tuple[str, ...]
    """Names along the other axis."""
    place_unit: str
    """What these names are; empty if they say it."""
    series: tuple[Series, ...]

    @property
    def words(self) -> str:
        """All values, for whoever cannot see the chart."""
        told = []
        for series in self.series:
            values = [
                f"{place} {value.value:.3g}"
                for place, value in zip(self.places, series.values, strict=True)
                if value is not None
            ]
            told.append(f"{series.name}: {', '.join(values) or 'no value'}")
        return f"{self.unit}. {'; '.join(told)}."


@dataclass(frozen=True)
class Bars(Chart):
    """Bars side by side at every place, with their intervals."""

    level: float | None = None
    """A value to hold them to, drawn as a line across."""


@dataclass(frozen=True)
class Stack(Chart):
    """At every place one bar, which the series share."""

    marks: tuple[float | None, ...] = ()
    """Another total of every bar, drawn as a line beside its own."""
    mark_name: str = ""


@dataclass(frozen=True)
class Lines(Chart):
    """A line for every series through the places, with its intervals."""
