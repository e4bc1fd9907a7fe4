"""What ``infer.bench paper`` prints: its rows, and tables of at most 60 columns."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from .charts import brief
from .report import Row


def line(row: Row) -> str:
    """A row as it comes."""
    what = row["task"] if row["table"] == 1 else f"prefill {row['range']}"
    words = (
        f"{row['shape']} S={row['context']} {what}, {row['method']}: round {row['round_ms']} ms, "
        f"{row['round_over_plain']} plain steps"
    )
    if row["speed_up"] is None:
        return words
    return (
        f"{words}; {row['tokens_per_second']} tokens/s at {row['acceptance_length']} tokens per "
        f"pass, {row['speed_up']} times plain"
    )


def tables(rows: Iterable[Row]) -> Iterator[str]:
    """The tables with the paper's figures and ours, one for every shape and task."""
    for (number, shape, task), group in itertools.groupby(
        rows, lambda row: (row["table"], row["shape"], row.get("task"))
    ):
        of_table = list(group)
        lines = _table_1(shape, task, of_table) if number == 1 else _table_4(shape, of_table)
        yield "\n".join(lines)


ONE = "{:14} {:>4} {:>6} {:>5} | {:>6} {:>5} {:>6} {:>5}"


def _table_1(shape: str, task: Any, rows: list[Row]) -> Iterator[str]:
    model, context = rows[0]["paper_model"], rows[0]["context"]
    yield f"Table 1, {task}, temperature 0"
    yield f"left: the paper's {model}; right: {shape}, {context} tokens"
    yield ONE.format("", "tau", "tok/s", "gain", "tok/s", "gain", "ms", "level")
    for row in rows:
        yield ONE.format(
            row["method"],
            *(_fixed(row["paper_acceptance_length"]), _brief(row["paper_tokens_per_second"])),
            *(_fixed(row["paper_speed_up"]), _brief(row["tokens_per_second"])),
            *(_fixed(row["speed_up"]), _fixed(row["round_ms"]), _fixed(row["round_over_plain"])),
        )
    yield "gain: over plain. ms: of a round. level: tokens per pass"
    yield "from which a round of so many ms pays."


FOUR = "{:8} {:6} {:>6} {:>5} {:>6} {:>7} {:>7} {:>5}"


def _table_4(shape: str, rows: list[Row]) -> Iterator[str]:
    yield "Table 4, GovReport, temperature 0, times in ms"
    yield f"paper: {rows[0]['paper_model']}; ours: {shape}"
    yield FOUR.format("prefill", "", "tok/s", "tau", "draft", "target", "verify", "gain")
    for row in rows:
        paper = {
            name.removeprefix("paper_"): row[name] for name in row if name.startswith("paper_")
        }
        yield _range(row["range"], "paper", paper, "target_ms", "verify_ms")
        yield _range(row["context"], "ours", row, "verify_ms", "rest_ms")
    yield "target: the target pass; verify: what is left of a round."


def _range(prefill: Any, whose: str, row: Row, target: str, verify: str) -> str:
    return FOUR.format(
        *(prefill, whose, _brief(row["tokens_per_second"]), _fixed(row["acceptance_length"])),
        *(_fixed(row["draft_ms"]), _fixed(row[target]), _fixed(row[verify])),
        _fixed(row.get("speed_up")),
    ).rstrip()


def _brief(value: float | None) -> str:
    return "-" if value is None else brief(value)


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
