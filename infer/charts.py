"""Charts of benchmark rows as PNG files. Matplotlib is imported when one is drawn."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]


def draw(rows: Rows, path: Path) -> None:
    """Draw the chart made for such rows.

    Raises:
      ImportError: without matplotlib.
      ValueError: if there is no chart for such rows.
    """
    for field, chart in CHARTS.items():
        chosen = [row for row in rows if row.get(field) is not None]
        if chosen:
            chart(chosen, path)
            return
    raise ValueError(f"no chart to draw: not one row has any of {', '.join(CHARTS)}")


def attention(rows: Rows, path: Path) -> None:
    """Time of every implementation against its roof, one panel a context, smallest batch.

    Where several runs measured the same, the last one is drawn.
    """
    batch = min(row["batch"] for row in rows)
    rows = [row for row in rows if row["batch"] == batch]
    contexts = sorted({row["context"] for row in rows})
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    shapes = sorted({_shape(row) for row in rows})
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(contexts), 1, figsize=(11, 2.6 * len(contexts) + 0.6), squeeze=False, sharex=True
    )
    width = 0.8 / len(names)
    for axis, context in zip(axes[:, 0], contexts, strict=True):
        here = [row for row in rows if row["context"] == context]
        for place, name in enumerate(names):
            times = {
                _shape(row): row["microseconds"] for row in here if row["implementation"] == name
            }
            middle = (place - (len(names) - 1) / 2) * width
            bars = [
                (index + middle, times[shape])
                for index, shape in enumerate(shapes)
                if shape in times
            ]
            axis.bar(
                [x for x, _ in bars], [y for _, y in bars], width, label=name, color=f"C{place}"
            )
        roofs = {_shape(row): row["microseconds"] * row["percent_of_roof"] / 100 for row in here}
        for index, shape in enumerate(shapes):
            if shape in roofs:
                axis.hlines(roofs[shape], index - 0.45, index + 0.45, color="black", lw=1.2)
        axis.set_yscale("log")
        axis.set_ylabel("µs")
        axis.set_title(f"{context} cached tokens, batch {batch} (black: roof)", fontsize=9)
    labels = [f"{heads}/{kv_heads}\nT={tokens}" for heads, kv_heads, tokens in shapes]
    axes[-1, 0].set_xticks(range(len(shapes)), labels, fontsize=8)
    handles = {}  # An implementation may be missing from any one panel.
    for axis in axes[:, 0]:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="upper center", ncols=len(names), fontsize=8
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _shape(row: dict[str, Any]) -> tuple[int, int, int]:
    """What tells the bars of one panel apart."""
    return row["heads"], row["kv_heads"], row["tokens"]


def _pyplot() -> Any:
    """Matplotlib, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


CHARTS: dict[str, Callable[[Rows, Path], None]] = {"microseconds": attention}
"""The field that only rows of a benchmark have, to that benchmark's chart."""
