"""Tables: of a real run those of earlier versions, of made runs those computed in the head."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from infer.eval import scores
from infer.eval.config import TASK_NAMES
from infer.eval.records import Divergence, Run, SampleRecord, read
from infer.eval.tasks import metric_of
from infer.report.frame import Estimate, blocks_of, frame_of
from infer.report.page import csv_text, report
from infer.report.tables import SECTIONS, Table, rate, shown, slug, tables_of
from tests.kit import each_row

from .made import broken_down, record, run

REAL = Path(__file__).parent / "real"
"""A run of the demo at temperature 1, and the figures that an earlier, independent implementation
had of it."""


def built(key: str, *runs: Run, edges: Sequence[int] = (0, 500, 1500, 4000)) -> list[Table]:
    return tables_of(key, frame_of(blocks_of(runs), edges), edges)


def texts(table: Table, row: str, body: int = 0) -> dict[tuple[str, str], str]:
    """The texts of a row by group and column."""
    cells = [*table.bodies.values()][body][row]
    return {place: cells[place].text for place in table.columns if place in cells}


def test_a_real_run_has_the_figures_it_always_had() -> None:
    found = report([read(REAL)], (0, 100, 250, 270, 300))
    mine = [*csv.DictReader(csv_text(found).splitlines())]
    theirs = [*csv.DictReader((REAL / "report.csv").read_text().splitlines())]
    assert len(theirs) > 200
    for one, other in zip(mine, theirs, strict=True):
        for name, value in other.items():
            if name in ("value", "low", "high") and value:
                assert float(one[name]) == pytest.approx(float(value), rel=1e-9), other
            else:
                assert one[name] == value, other


def test_every_section_is_there_and_every_name_is_one() -> None:
    """In a report of everything: two batches, two tasks, two temperatures."""
    rows = [
        record(
            method,
            str(sample),
            (1,) * 4 if method == "plain" else (3, 1, 2),
            task=task,
            temperature=temperature,
            references=("word",),
            breakdown=broken_down(0.1, 0.2, 0.3),
        )
        for method in ("plain", "longspec-tree", "ngram")
        for sample in range(4)
        for task in ("lcc", "needle")
        for temperature in (0.0, 1.0)
    ]
    batch = [dataclasses.replace(each, batch=2) for each in rows]
    found = report([run(rows), run(batch, "b", batch=2)], (0, 500, 1500, 4000))
    assert {key: len(tables) for key, _, tables in found.sections} == {
        **dict.fromkeys(SECTIONS, 2),
        **dict.fromkeys(("brief", "lossless"), 1),
    }
    keys = [table.key for _, _, tables in found.sections for table in tables]
    assert len(set(keys)) == len(keys)


PLAIN = [record("plain", name, (1,) * 4, 1.0) for name in "ab"]
"""At 4 tokens a second."""
TREE = [record("longspec-tree", name, (4, 4, 1, 3), 1.0) for name in "ab"]
"""12 tokens in 4 passes and one second."""
OTHER = [
    record("plain", "a", (1,) * 4, 1.0, task="other"),
    record("longspec-tree", "a", (2, 2), 0.5, task="other"),
]
PARTS = broken_down(0.1, 0.2, 0.3)
ROUNDS = record("ngram", emitted=(4, 1, 3), prompt_tokens=1000)
"""They begin at 1001, 1005 and 1006: the prefill's token stands at 1000."""


def different(sample: str, index: int, gap: float | None) -> SampleRecord:
    return record("ngram", sample, identical_to_plain=False, divergence=Divergence(index, gap))


@each_row(
    ("key", "records", "row", "expected"),
    [
        ("main", [*PLAIN, *TREE], "plain", "1.00 4.00 1.00×"),
        ("main", [*PLAIN, *TREE], "longspec-tree", "3.00 12.0 3.00×"),
        (
            "brief",
            [*PLAIN, *TREE, *OTHER],
            "longspec-tree",
            "2.00× to 3.00× 2.00 to 3.00 8.00 to 12.0",
        ),
        ("brief", [*PLAIN, *TREE, *OTHER], "plain", "1.00× 1.00 4.00"),
        (
            "pairs",
            [*PLAIN, *TREE, *(record("ngram", name, (2,) * 3, 0.5) for name in "ab")],
            "ngram : longspec-tree",
            "1.00× -1.00",
        ),
        (
            "depth",
            [record("plain"), record("ngram", emitted=(4, 2, 1, 1))],
            "ngram",
            "50.0 % 25.0 % 25.0 %",
        ),
        (
            "lossless",
            [record("ngram")] * 2 + [different("x", 7, None)],
            "ngram",
            "2 of 3 66.66 % token 7",
        ),
        (
            "lossless",
            [record("ngram", "a"), different("b", 3, None), different("c", 9, 0.001)],
            "ngram",
            "1 of 3 33.33 % token 6 0.001",
        ),
        (
            "lossless",
            [record("ngram")] * 29_999 + [different("x", 7, 0.25)],
            "ngram",
            "29999 of 30000 99.99 % token 7 0.25",
        ),
        (
            "times",
            [
                record("plain", emitted=(1,) * 8, seconds=8.0),
                record("ngram", emitted=(4, 4), seconds=2.0, ended="eos"),
            ],
            "ngram",
            "1 1000 9 2.000 2.000 4.00 2.25 2.50× 100.0 %",
        ),
        (
            "parts",  # The untouched round is one of the call, whose longer row has four.
            [
                record("ngram", "a", (3, 1), 0.5, call="x", breakdown=PARTS),
                record("ngram", "b", (3, 1, 1, 1), 0.5, call="x", breakdown=PARTS),
                record("plain", "a"),
            ],
            "ngram",
            "10.00 20.00 30.00 60.00 125.00",
        ),
        (
            "quality",
            [
                record("plain", "a", task="needle", references=("word",)),
                record("plain", "b", task="needle", references=("other", "another")),
                record("plain", "a", task="unknown", references=("word",)),
            ],
            "plain",
            "50.0",
        ),
    ],
)
def test_figures(key: str, records: list[SampleRecord], row: str, expected: str) -> None:
    [table] = built(key, run(records))
    assert " ".join(texts(table, row).values()) == expected


def test_acceptance_by_position() -> None:
    [table] = built("context", run([ROUNDS]), edges=(0, 1001, 1005, 1006, 1009))
    assert [*texts(table, "ngram").values()] == ["4.00", "1.00", "3.00"]
    heading = "τ of rounds at position"
    assert table.columns == [(heading, name) for name in ("1001–1005", "1005–1006", "1006–1009")]


def test_lengths_of_prompts() -> None:
    rows = [
        *(record("plain", name, prompt_tokens=int(name)) for name in ("100", "1000", "3000")),
        record("ngram", "1000", (3, 1), 0.5, breakdown=broken_down(0.04, 0.5, 0.06)),
    ]
    [table] = built("lengths", run(rows), edges=(0, 500, 1500, 2000, 4000))
    assert [*dict(table.columns)] == ["0–500", "500–1500", "2k–4k"]
    found = {name: text for (_, name), text in texts(table, "ngram").items()}
    assert found == {
        "samples": "1",
        "τ": "2.00",
        "tokens/s": "8.00",
        "speed-up": "2.00×",
        "draft time": "4.00",
        "target time": "50.00",
        "verify time": "6.00",
    }


def test_throughput_by_batch() -> None:
    """A batch that was never full says so."""
    sizes = {2: 2, 1: 1, 16: 3}
    runs = [
        run([record(sample=str(row), call="x") for row in range(rows)], str(batch), batch=batch)
        for batch, rows in sizes.items()
    ]
    [table] = built("batches", *runs)
    assert [column for _, column in table.columns] == ["1", "2", "16 (3 rows)"]
    assert [*texts(table, "plain").values()] == ["4.00", "8.00", "12.0"]


def test_temperatures_have_tables_of_their_own() -> None:
    """A method without any figure has no line."""
    cold, hot = built("main", run([*PLAIN, *TREE, record("plain", "a", temperature=1.0)]))
    assert [table.caption.rpartition(", ")[2] for table in (cold, hot)] == ["T = 0", "T = 1"]
    assert [*hot.bodies["demo"]] == ["plain"]


def test_the_best_is_marked_where_there_is_a_choice() -> None:
    [table] = built("main", run([*PLAIN, *TREE]))
    bold = {
        row: [cell.bold for cell in cells.values()] for row, cells in table.bodies["demo"].items()
    }
    assert bold == {"plain": [False] * 3, "longspec-tree": [True] * 3}
    [alone] = built("main", run(PLAIN))
    assert not alone.cells["bold"].any()


@each_row("key", ["pairs", "lossless", "batches", "parts", "quality", "depth"])
def test_nothing_to_compare_is_no_table(key: str) -> None:
    assert built(key, run(PLAIN)) == []


@each_row(
    ("low", "high", "neutral", "interval", "bold"),
    [
        (2.001, 2.002, 2.5, "", True),
        (1.5, 2.0, 1.6, "1.50 to 2.00", False),
        (1.5, 2.0, 1.0, "1.50 to 2.00", True),
        (float("nan"), float("nan"), 1.0, "", False),
    ],
)
def test_intervals_as_they_are_read(
    low: float, high: float, neutral: float, interval: str, bold: bool
) -> None:
    """One no wider than what is shown is left out; one without the neutral value is bold."""
    cell = shown(Estimate(2.0, low, high, 9), rate, neutral)
    assert (cell.text, cell.interval, cell.bold) == ("2.00", interval, bold)


def test_every_metric_is_named() -> None:
    used = {metric_of(task) for task in TASK_NAMES} - {None}
    assert used == set(scores.METRICS)


def test_names_for_links() -> None:
    assert slug("lcc <b>", 1.0) == "lcc-b-1-0"
