"""What ``infer.bench retrieval`` prints: its rows, and from which agreement each case pays."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .report import Row


def line(row: Row) -> str:
    """A row for reading."""
    what = {
        "plain": "plain",
        "longspec": "one level",
        "at_budget": "one level, context of the budget",
    }.get(row["method"])
    if what is None:
        what = f"{_case(row)}, agreement {row['agreement']:g}"
    text = (
        f"{row['shape']} {row['context']:>7}  {what:52} {row['acceptance_length']:6.2f} tokens in "
        f"{row['round_ms']:6.2f} ms: {row['tokens_per_second']:6.1f} tokens/s"
    )
    if row["method"] != "retrieval":
        return text
    return (
        f"{text} ({row['speedup_over_longspec']:.2f}x; partial {row['partial_round_ms']:.2f} ms, "
        f"full {row['full_round_ms']:.2f}, selection {row['choose_ms']:.2f} and with reading "
        f"{row['select_ms']:.2f})"
    )


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """The agreement from which each budget, chain and end pays."""
    retrieved = [row for row in rows if row["method"] == "retrieval"]

    def case(row: Row) -> tuple[Any, ...]:
        return row["shape"], row["context"], _case(row)

    for (shape, context, words), of_case in itertools.groupby(retrieved, case):
        own = list(of_case)
        points = [(row["agreement"], row["speedup_over_longspec"]) for row in own]
        yield (
            f"{shape} at {context}, {words}: faster than one level {break_even(points)}"
            f"{modelled_words(own[0]['modelled_break_even'])}"
        )


def modelled_words(agreement: float | None) -> str:
    """The same by the cost model, from the times of its rounds."""
    if agreement is None:
        return "; by the cost model of its rounds at none"
    return f"; by the cost model of its rounds from {agreement:.3f} on"


def _case(row: Row) -> str:
    """Budget, chain and end of a row, in words."""
    end = "" if row["end"] is None else f" with {row['end']} behind"
    end += "" if row["refresh"] == 1 else f", chosen every {row['refresh']} full passes"
    return f"retrieve {row['budget']}, chain {row['chain']}{end}"


def break_even(points: Sequence[tuple[float, float]]) -> str:
    """From which agreement on the speedup is above 1, in words; points of both."""
    points = sorted(points)
    if points[0][1] > 1:
        return f"at every agreement from {points[0][0]:g} on"
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if slow <= 1 < fast:
            return f"from an agreement of {low + (high - low) * (1 - slow) / (fast - slow):.3f} on"
    return f"at no agreement up to {points[-1][0]:g}"
