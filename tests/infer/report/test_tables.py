"""Figures: of a real run those of earlier versions, of made runs those computed in the head."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from infer.eval import scores
from infer.eval.config import TASK_NAMES
from infer.eval.records import Divergence, Run, SampleRecord, read
from infer.eval.tasks import metric_of
from infer.report.frame import blocks_of, frame_of
from infer.report.page import report
from infer.report.tables import BY_DEPTH, BY_LENGTH, BY_POSITION, BY_TASK, TAU, cells_of, read_as
from tests.kit import each_row

from .made import record, run

REAL = Path(__file__).parent / "real"
"""A run of the demo at temperature 1, and the figures that an earlier, independent implementation
had of it."""


def cells(*runs: Run, edges: Sequence[int] = (0, 500, 1500, 4000)) -> pd.DataFrame:
    return cells_of(frame_of(blocks_of(runs)), edges)


def texts(found: pd.DataFrame, table: str, method: str) -> list[str]:
    return [*found.loc[(found["table"] == table) & (found["method"] == method), "text"]]


def test_a_real_run_has_the_figures_it_always_had() -> None:
    found = cells(read(REAL), edges=(0, 100, 250, 270, 300))
    places = ["table", "task", "method", "column"]
    mine = found.astype(dict.fromkeys(places, str)).dropna(subset="value").set_index(places)
    theirs = pd.read_csv(REAL / "report.csv", dtype=dict.fromkeys(places, str)).set_index(places)
    assert len(theirs) == 61
    pd.testing.assert_frame_equal(mine.loc[theirs.index, [*theirs]], theirs, check_dtype=False)


PLAIN = [record("plain", name, (1,) * 4, 1.0) for name in "ab"]
"""At 4 tokens a second."""
TREE = [record("longspec-tree", name, (4, 4, 1, 3), 1.0) for name in "ab"]
"""12 tokens in 4 passes and one second."""


def different(sample: str, index: int, gap: float | None) -> SampleRecord:
    return record("ngram", sample, identical_to_plain=False, divergence=Divergence(index, gap))


@each_row(
    ("table", "records", "method", "expected"),
    [
        (BY_TASK, [*PLAIN, *TREE], "plain", "1.00 4.0 1.00 1000 5 2.000 1.000 2"),
        (BY_TASK, [*PLAIN, *TREE], "longspec-tree", "3.00 12.0 3.00 1000 13 2.000 1.000 2 2 of 2"),
        (BY_DEPTH, [record("ngram", emitted=(4, 2, 1, 1))], "ngram", "50.0% 25.0% 25.0%"),
        (
            BY_TASK,
            [record("ngram", "a"), different("b", 3, None), different("c", 9, 0.001)],
            "ngram",
            "1.00 4.0 1000 5 2.000 1.000 3 1 of 3 token 6 0.001",
        ),
        (
            BY_TASK,
            [
                record("plain", "a", task="needle", references=("word",)),
                record("plain", "b", task="needle", references=("other", "another")),
            ],
            "plain",
            "1.00 4.0 1.00 1000 5 2.000 1.000 50.0% 2",
        ),
    ],
)
def test_figures(table: str, records: list[SampleRecord], method: str, expected: str) -> None:
    assert " ".join(texts(cells(run(records)), table, method)) == expected


def test_acceptance_by_position() -> None:
    """Rounds begin at 1001, 1005 and 1006: the prefill's token stands at 1000."""
    rounds = record("ngram", emitted=(4, 1, 3), prompt_tokens=1000)
    found = cells(run([rounds]), edges=(0, 1001, 1005, 1006, 1009))
    found = found[found["table"] == BY_POSITION]
    assert [*found["text"]] == ["4.00", "1.00", "3.00"]
    assert [*found["column"]] == ["1001–1005", "1005–1006", "1006–1009"]


def test_lengths_of_prompts() -> None:
    rows = [
        *(record("plain", name, prompt_tokens=int(name)) for name in ("100", "1000", "3000")),
        record("ngram", "1000", (3, 1), 0.5),
    ]
    found = cells(run(rows), edges=(0, 500, 1500, 2000, 4000))
    of_plain = found[(found["table"] == f"{BY_LENGTH}: τ") & (found["method"] == "plain")]
    assert [*of_plain["column"]] == ["0–500", "500–1500", "2k–4k"]
    for figure, text in (("τ", "2.00"), ("speed-up", "2.00")):
        assert texts(found, f"{BY_LENGTH}: {figure}", "ngram") == [text]


def test_temperatures_and_blocks_have_tables_of_their_own() -> None:
    """A method without any figure has no line; batches stand apart."""
    hot = [*PLAIN, *TREE, record("plain", "a", temperature=1.0)]
    found = report([run(hot), run(PLAIN, "b", batch=2)])
    tables = {table.title: table.texts for table in found.tables}
    assert [*tables][:2] == [
        "Tasks and methods, demo, batch 1, T = 0",
        "Tasks and methods, demo, batch 1, T = 1",
    ]
    assert "Tasks and methods, demo, batch 2, T = 0" in tables
    first, second, *_ = tables.values()
    assert [method for _, method in first.index] == ["plain", "longspec-tree"]
    assert [method for _, method in second.index] == ["plain"]


@each_row(
    ("low", "high", "text"),
    [
        (2.001, 2.002, "2.00"),
        (1.5, 2.0, "2.00 (1.50 to 2.00)"),
        (float("nan"), float("nan"), "2.00"),
    ],
)
def test_intervals_as_they_are_read(low: float, high: float, text: str) -> None:
    """One no wider than what is shown is left out."""
    assert read_as(TAU, 2.0, low, high) == text


def test_every_metric_is_named() -> None:
    used = {metric_of(task) for task in TASK_NAMES} - {None}
    assert used == set(scores.METRICS)
