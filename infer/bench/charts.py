"""Charts of benchmark rows as PNG files. Matplotlib is imported when one is drawn."""

import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from longspec_jax.config import TreeConfig

Rows = Sequence[dict[str, Any]]
OF_PLAIN = {"attention", "lengths", "new_tokens", "dtype"}
"""Settings of speculative rows that plain decoding, too, depends on."""
CROWDED = 40.0
"""Points of type size that the names of a row of bars share."""


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
            figure.savefig(path, dpi=100)
            _pyplot().close(figure)
            return
    fields = [field for _, fields in CHARTS for field in fields]
    raise ValueError(f"no chart to draw: not one row has any of {', '.join(fields)}")


def attention(rows: Rows) -> Any:
    """Time of every implementation against its roof, a panel for every context and batch.

    Where several runs measured the same, the last one is drawn.
    """
    pyplot = _pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    settings = ("context", "batch", "head_dim", "dtype")
    panels = sorted({tuple(row[name] for name in settings) for row in rows})
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    colors = {name: f"C{place}" for place, name in enumerate(names)}
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(10, 2.2 * len(panels) + 0.6), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        here = [row for row in rows if tuple(row[name] for name in settings) == panel]
        _draw_times(axis, here, colors)
        context, batch, head_dim, dtype = panel
        title = f"{context} cached tokens, batch {batch} (heads {head_dim} wide, {dtype})"
        axis.set_title(title, fontsize=9)
    bars = [Patch(color=color, label=name) for name, color in colors.items()]
    handles = [*bars, Line2D([], [], color="black", label="roof")]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    return figure


def _draw_times(axis: Any, rows: Rows, colors: dict[str, str]) -> None:
    """Microseconds of one panel: a group of bars a shape, the implementations that ran it."""
    from matplotlib.ticker import LogLocator

    shapes: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        shape = (row["heads"], row["kv_heads"], row["tokens"])
        shapes.setdefault(shape, {})[row["implementation"]] = row
    middles, place = [], 0.0
    for _, measured in sorted(shapes.items()):
        names = [name for name in colors if name in measured]
        times = [measured[name]["microseconds"] for name in names]
        places = [place + index for index in range(len(names))]
        bars = axis.bar(places, times, 0.96, color=[colors[name] for name in names])
        axis.bar_label(bars, [brief(time) for time in times], padding=1, fontsize=6.5)
        best = min(measured.values(), key=lambda row: row["microseconds"])  # The least rounded.
        roof = best["microseconds"] * best["percent_of_roof"] / 100
        axis.hlines(roof, places[0] - 0.6, places[-1] + 0.6, color="black", lw=1.2)
        middles.append((places[0] + places[-1]) / 2)
        place = places[-1] + 2
    labels = [
        f"{heads}/{kv_heads} heads\n{tokens} token{'s' * (tokens > 1)}"
        for heads, kv_heads, tokens in sorted(shapes)
    ]
    axis.set_xticks(middles, labels, fontsize=8)
    axis.set_xlim(-1.2, place - 0.8)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    decades = math.log10(high / low)
    axis.set_ylim(low / 10 ** (0.05 * decades), high * 10 ** (0.1 * decades))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if decades < 2 else (1,)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.tick_params(axis="y", labelsize=8)
    axis.set_ylabel("µs, log scale", fontsize=8)


def decode(rows: Rows) -> Any:
    """Tokens a second and what a round consists of, a row of panels for every model and batch.

    Rows of other implementations, which have no rounds, are in the left panel. Where rows agree in
    every setting, the last one is drawn.
    """
    groups = list(dict.fromkeys((row["shape"], row["batch"]) for row in rows))
    figure, axes = _pyplot().subplots(
        len(groups), 2, figsize=(11, 3 * len(groups)), squeeze=False, layout="constrained"
    )
    for (left, right), (shape, batch) in zip(axes, groups, strict=True):
        here = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)]
        ours = [row for row in here if row.get("round_ms") is not None]
        others = [row for row in here if row.get("round_ms") is None]
        latest = {(row["context"], *_settings(row).values()): row for row in ours}
        ours = [latest[key] for key in sorted(latest)]
        varied = {
            name
            for row in ours
            for name, words in _settings(row).items()
            if words != _settings(ours[0])[name]
        }
        _draw_speeds(left, ours, others, varied)
        if ours:
            _draw_rounds(right, ours, varied)
        else:
            right.set_axis_off()
        common = [
            words for row in ours[:1] for words in _words(row, _settings(row).keys() - varied)
        ]
        contexts = {row["context"] for row in here}
        if len(contexts) == 1:
            common.insert(0, f"{_short(*contexts)} cached tokens")
        left.set_title(f"{shape}, batch {batch}", fontsize=10, loc="left")
        right.set_title(textwrap.fill(", ".join(common), 80), fontsize=7.5, loc="right")
        for axis in (left, right):
            axis.set_ylim(bottom=0)
    return figure


def _draw_speeds(axis: Any, ours: Rows, others: Rows, varied: set[str]) -> None:
    """Tokens a second: with speculation, by plain decoding, by other implementations."""
    speeds: dict[str, dict[int, float]] = {}
    for row in ours:
        label = ", ".join(["speculation", *_words(row, varied)])
        speeds.setdefault(label, {})[row["context"]] = row["tokens_per_second"]
    for row in ours:
        label = ", ".join(["plain", *_words(row, varied & OF_PLAIN)])
        speeds.setdefault(label, {})[row["context"]] = row["plain_tokens_per_second"]
    for row in others:
        speeds.setdefault(row["implementation"], {})[row["context"]] = row["tokens_per_second"]
    names = [label for label in speeds if label != "plain"]
    colors = {"plain": "0.6"} | {name: f"C{place}" for place, name in enumerate(names)}
    contexts = sorted({row["context"] for row in [*ours, *others]})
    if len(contexts) == 1:
        values = [points[contexts[0]] for points in speeds.values()]
        bars = axis.bar(range(len(values)), values, 0.6, color=[colors[label] for label in speeds])
        axis.bar_label(bars, [brief(value) for value in values], padding=2, fontsize=8)
        _name_bars(axis, [label.split(", ") for label in speeds])
    else:
        for label, points in speeds.items():
            places = sorted(points)
            values = [points[place] for place in places]
            axis.plot(places, values, "o-", color=colors[label], label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(contexts, [_short(context) for context in contexts], fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("cached tokens", fontsize=8)
        axis.legend(fontsize=7)
    axis.margins(y=0.15)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_ylabel("tokens/s", fontsize=8)


def _draw_rounds(axis: Any, rows: Rows, varied: set[str]) -> None:
    """Draft, verification and the rest of a round, stacked, beside a plain step.

    Parts are timed apart: where they exceed the round, the rest is negative and left out.
    """
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for part in ("draft", "verify", "rest"):
        heights = [max(row[f"{part}_ms"], 0) for row in rows]
        axis.bar(places, heights, 0.6, bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    plain = [row["plain_ms_per_token"] for row in rows]
    left, right = [place - 0.4 for place in places], [place + 0.4 for place in places]
    axis.hlines(plain, left, right, color="black", lw=1.5, label="plain step")
    tops = list(map(max, bottom, plain))
    for place, top, row in zip(places, tops, rows, strict=True):
        ratio = f"{row['round_ms']:.1f} ms\n{row['round_over_plain']:.2f} × plain"
        size = min(7.0, CROWDED / len(rows))
        axis.annotate(
            ratio, (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=size
        )
    _name_bars(axis, [[_short(row["context"]), *_words(row, varied)] for row in rows])
    axis.set_ylim(top=1.5 * max(tops))
    axis.tick_params(axis="y", labelsize=8)
    axis.set_ylabel("ms per round", fontsize=8)
    axis.legend(fontsize=7, loc="upper center", ncols=4)


def _settings(row: dict[str, Any]) -> dict[str, str]:
    """How a speculative row was measured, besides its model, batch and context, in words."""
    tree, budget = row["tree"], row.get("budget")
    shortest, longest = row.get("lengths", (row["context"], row["context"]))
    return {
        "tree": f"tree {TreeConfig(tuple(tree), threshold=row.get('threshold'))}",
        "budget": f"best {budget} nodes" if budget else f"all {1 + sum(tree)} nodes",
        **_draft(row),
        "acceptance": f"acceptance about {row['acceptance_wanted']}",
        "attention": f"{row['attention']} attention",
        "lengths": f"rows of {'one length' if shortest == longest else 'different lengths'}",
        "new_tokens": f"{row['new_tokens']} new tokens",
        "dtype": row["dtype"],
    }


def _draft(row: dict[str, Any]) -> dict[str, str]:
    """What drafted, in words; empty ones for what its kind does not have."""
    kind = row.get("draft") or row.get("drafter", "longspec")
    if kind == "longspec":
        vocabulary = f"draft vocabulary {row['draft_vocabulary']}"
        form = "int8" if row.get("draft_int8") else row["dtype"]
        weights, options = f"{form} draft", {}
    else:
        vocabulary, weights, options = (
            "",
            "",
            row.get("draft_options") or row.get("drafter_options", {}),
        )
    return {
        "drafter": f"{kind} draft",
        "draft_vocabulary": vocabulary,
        "draft_int8": weights,
        "drafter_options": ", ".join(f"{name}={value}" for name, value in options.items()),
    }


def _words(row: dict[str, Any], names: Collection[str]) -> list[str]:
    """Some of a row's settings."""
    return [words for name, words in _settings(row).items() if name in names and words]


def _name_bars(axis: Any, names: Sequence[Sequence[str]]) -> None:
    """Name the bars at 0, 1, ... in short lines; a few of them stay as narrow as several."""
    width = 16 if len(names) <= 5 else 10
    labels = ["\n".join(textwrap.fill(words, width) for words in name) for name in names]
    axis.set_xticks(range(len(names)), labels, fontsize=min(8.0, CROWDED / len(names)))
    middle, room = (len(names) - 1) / 2, max(len(names), 4) / 2
    axis.set_xlim(middle - room, middle + room)


def _short(context: int) -> str:
    """A context as people call it."""
    return str(context) if context % 1024 else f"{context // 1024}k"


def brief(value: float) -> str:
    """A speed for people: a whole number, or one decimal of a small one."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


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
