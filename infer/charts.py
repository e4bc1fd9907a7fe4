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
    for chart, fields in CHARTS:
        chosen = [row for row in rows if any(row.get(field) is not None for field in fields)]
        if chosen:
            figure = chart(chosen)
            figure.savefig(path, dpi=130)
            _pyplot().close(figure)
            return
    fields = [field for _, fields in CHARTS for field in fields]
    raise ValueError(f"no chart to draw: not one row has any of {', '.join(fields)}")


def attention(rows: Rows) -> Any:
    """Time of every implementation against its roof, one panel a context, smallest batch.

    Where several runs measured the same, the last one is drawn.
    """
    batch = min(row["batch"] for row in rows)
    rows = [row for row in rows if row["batch"] == batch]
    contexts = sorted({row["context"] for row in rows})
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    shapes = sorted({_shape(row) for row in rows})
    figure, axes = _pyplot().subplots(
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
    return figure


def _shape(row: dict[str, Any]) -> tuple[int, int, int]:
    """What tells the bars of one panel apart."""
    return row["heads"], row["kv_heads"], row["tokens"]


def decode(rows: Rows) -> Any:
    """Tokens a second and what a round consists of against the context, a row of panels a model.

    Rows of other implementations, which have no rounds, are lines of the left panel.
    """
    groups = list(dict.fromkeys((row["shape"], row["batch"]) for row in rows))
    figure, axes = _pyplot().subplots(
        len(groups), 2, figsize=(12, 3.4 * len(groups)), squeeze=False, layout="constrained"
    )
    for (speeds, rounds), (shape, batch) in zip(axes, groups, strict=True):
        here = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)]
        ours = [row for row in here if row.get("round_ms") is not None]
        _draw_speeds(speeds, here)
        if ours:
            _draw_rounds(rounds, ours)
        for axis in (speeds, rounds):
            axis.set_title(f"{shape}, batch {batch}", fontsize=9)
            axis.set_xlabel("cached tokens")
            axis.set_ylim(bottom=0)
    return figure


def _draw_speeds(axis: Any, rows: Rows) -> None:
    """Tokens a second: with speculation, by plain decoding, by other implementations."""
    lines: dict[str, dict[int, float]] = {}

    def add(label: str, row: dict[str, Any], field: str) -> None:
        lines.setdefault(label, {})[row["context"]] = row[field]

    for row in rows:
        if "round_ms" in row:
            add(_setting(row), row, "tokens_per_second")
            add(f"plain{_kernels(row)}", row, "plain_tokens_per_second")
        else:
            add(row["implementation"], row, "tokens_per_second")
    for label, points in lines.items():
        contexts = sorted(points)
        axis.plot(contexts, [points[context] for context in contexts], "o-", label=label)
    contexts = sorted({row["context"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.minorticks_off()
    axis.set_ylabel("tokens/s")
    axis.legend(fontsize=7)


def _draw_rounds(axis: Any, rows: Rows) -> None:
    """Draft, verification and the rest of a round, stacked, beside a plain step."""
    rows = list({(row["context"], _setting(row)): row for row in rows}.values())
    rows.sort(key=lambda row: row["context"])
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for part in ("draft", "verify", "rest"):
        heights = [row[f"{part}_ms"] for row in rows]
        axis.bar(places, heights, 0.6, bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    plain = [row["plain_ms_per_token"] for row in rows]
    left, right = [place - 0.4 for place in places], [place + 0.4 for place in places]
    axis.hlines(plain, left, right, color="black", lw=1.5, label="plain step")
    for place, height, row in zip(places, bottom, rows, strict=True):
        ratio = f"{row['round_over_plain']:.2f} plain steps"
        axis.annotate(ratio, (place, height), ha="center", va="bottom", fontsize=8)
    several = len({_setting(row) for row in rows}) > 1
    names = [str(row["context"]) + (f"\n{_setting(row)}" if several else "") for row in rows]
    axis.set_xticks(places, names, fontsize=8)
    axis.margins(y=0.1)
    axis.set_ylabel("ms a round")
    axis.legend(fontsize=7)


def _setting(row: dict[str, Any]) -> str:
    """What tells speculative rows of one model and batch apart."""
    tree = ",".join(map(str, row["tree"]))
    budget = f", best {row['budget']}" if row.get("budget") else ""
    return f"tree {tree}{budget}{_kernels(row)}, acceptance about {row['acceptance_wanted']}"


def _kernels(row: dict[str, Any]) -> str:
    """The attention implementation where one was named."""
    return "" if row["attention"] == "automatic" else f", {row['attention']}"


def _pyplot() -> Any:
    """Matplotlib, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


CHARTS: tuple[tuple[Callable[[Rows], Any], tuple[str, ...]], ...] = (
    (attention, ("microseconds",)),
    (decode, ("round_ms", "ms_per_token")),
)
"""Charts, and the fields of which their rows have at least one."""
