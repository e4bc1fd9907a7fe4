"""Tables of runs whose figures can be computed in the head."""

import dataclasses
from collections.abc import Sequence

import pytest

from infer.eval import scores
from infer.eval.arguments import TASK_NAMES
from infer.eval.records import Divergence, SampleRecord
from infer.eval.tasks import metric_of
from infer.report.blocks import Block, blocks
from infer.report.charts import charts, colours
from infer.report.figures import Estimate
from infer.report.report import report
from infer.report.table import (
    Cell,
    ChartSpec,
    Line,
    Table,
    build,
    length,
    mark_best,
    rate,
    shown,
    slug,
)
from infer.report.tables import SPECS, unscored

from .made import broken_down, record, run

EDGES = (0, 500, 1500, 4000)


def cells(table: Table, row: str, body: int = 0) -> dict[tuple[str, str], str]:
    """The texts of a row by group and column."""
    names = [(group.name, column) for group in table.groups for column in group.columns]
    [line] = [line for line in table.bodies[body].lines if line.name == row]
    return {name: cell.text for name, cell in zip(names, line.cells, strict=True)}


def built(name: str, found: Sequence[Block], edges: Sequence[int] = EDGES) -> list[Table]:
    """The tables of one specification."""
    return build({name: SPECS[name]}, found, edges)[name]


def test_every_line_fills_every_column() -> None:
    """Of all tables of a report with everything in it."""
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
    found = report([run(rows), run(batch, "b", batch=2)], EDGES)
    by_section = {section.key: section for section in found.sections}
    assert {key: (len(each.tables), len(each.charts)) for key, each in by_section.items()} == {
        "brief": (1, 4),
        "lossless": (1, 0),
        **dict.fromkeys(("main", "pairs", "lengths", "quality", "times"), (2, 0)),
        **dict.fromkeys(("depth", "context", "parts", "batches"), (2, 4)),
    }
    made = [table for section in found.sections for table in section.tables]
    assert len({table.key for table in made}) == len(made)
    for table in made:
        assert table.bodies and table.caption
        for body in table.bodies:
            assert body.lines, table.caption
            assert {len(line.cells) for line in body.lines} == {len(table.columns)}, table.caption
    drawn = [chart for section in found.sections for chart in section.charts]
    assert len({chart.key for chart in drawn}) == len(drawn)
    for chart in drawn:
        assert chart.series, chart.title
        assert {len(series.values) for series in chart.series} == {len(chart.places)}


@pytest.fixture
def block() -> Block:
    """Plain decoding at 4 tokens a second, a tree at 12 tokens in 4 passes and one second."""
    rows = [
        *(record("plain", name, (1,) * 4, 1.0) for name in "ab"),
        *(record("longspec-tree", name, (4, 4, 1, 3), 1.0) for name in "ab"),
    ]
    [found] = blocks([run(rows)])
    return found


def test_the_main_table(block: Block) -> None:
    [table] = built("main", [block])
    assert cells(table, "plain") == {
        ("copying", "τ"): "1.00",
        ("copying", "tokens/s"): "4.00",
        ("copying", "speed-up"): "1.00×",
    }
    tree = cells(table, "longspec-tree")
    assert [*tree.values()] == ["3.00", "12.0", "3.00×"]
    assert [cell.bold for cell in table.bodies[0].lines[1].cells] == [True] * 3


def test_temperatures_have_tables_of_their_own(block: Block) -> None:
    rows = [record("plain", "a", temperature=1.0), *block.records]
    cold, hot = built("main", blocks([run(rows)]))
    assert [table.caption.rpartition(", ")[2] for table in (cold, hot)] == ["T = 0", "T = 1"]
    # A method without any figure has no line.
    assert [line.name for line in hot.bodies[0].lines] == ["plain"]


def test_the_brief_table_goes_from_the_worst_task_to_the_best(block: Block) -> None:
    other = [
        record("plain", "a", (1,) * 4, 1.0, task="other"),
        record("longspec-tree", "a", (2, 2), 0.5, task="other"),
    ]
    [table] = built("brief", blocks([run([*block.records, *other])]))
    assert cells(table, "longspec-tree") == {
        ("T = 0", "speed-up"): "2.00× to 3.00×",
        ("T = 0", "τ"): "2.00 to 3.00",
        ("T = 0", "tokens/s"): "8.00 to 12.0",
    }
    assert cells(table, "plain")["T = 0", "τ"] == "1.00"


def test_pairs_are_all_pairs(block: Block) -> None:
    third = [record("ngram", name, (2,) * 3, 0.5) for name in "ab"]
    [table] = built("pairs", blocks([run([*block.records, *third])]))
    assert [line.name for line in table.bodies[0].lines] == [
        "longspec-tree : plain",
        "ngram : plain",
        "ngram : longspec-tree",
    ]
    assert [*cells(table, "ngram : longspec-tree").values()] == ["1.00×", "-1.00"]


def test_lengths_of_prompts() -> None:
    rows = [
        *(record("plain", name, prompt_tokens=int(name)) for name in ("100", "1000", "3000")),
        record("ngram", "1000", (3, 1), 0.5, breakdown=broken_down(0.04, 0.5, 0.06)),
    ]
    [table] = built("lengths", blocks([run(rows)]), (0, 500, 1500, 2000, 4000))
    assert [group.name for group in table.groups] == ["0–500", "500–1500", "2k–4k"]
    assert table.bodies[0].name == "copying"
    found = cells(table, "ngram")
    assert {name: found["500–1500", name] for name in table.groups[0].columns} == {
        "samples": "1",
        "τ": "2.00",
        "tokens/s": "8.00",
        "speed-up": "2.00×",
        "draft time": "4.00",
        "target time": "50.00",
        "verify time": "6.00",
    }
    assert {text for (group, _), text in found.items() if group == "0–500"} == {"–"}


def test_acceptance_by_depth() -> None:
    found = blocks([run([record("plain"), record("ngram", emitted=(4, 2, 1, 1))])])
    [table] = built("depth", found)
    assert [line.name for line in table.bodies[0].lines] == ["ngram"]
    assert [*cells(table, "ngram").values()] == ["50.0 %", "25.0 %", "25.0 %"]


def test_acceptance_by_position() -> None:
    """Rounds begin at 1001, 1005 and 1006: the prefill's token stands at 1000."""
    text = record("ngram", emitted=(4, 1, 3), prompt_tokens=1000)
    [table] = built("context", blocks([run([text])]), (0, 1001, 1005, 1006, 1009))
    assert [*cells(table, "ngram").values()] == ["4.00", "1.00", "3.00"]


def test_parts_of_a_round() -> None:
    """Beside the untouched round, which a batch of two rows runs as often as the longer of them."""
    rows = [
        record("ngram", "a", (3, 1), 0.5, call="x", breakdown=broken_down(0.1, 0.2, 0.3)),
        record("ngram", "b", (3, 1, 1, 1), 0.5, call="x", breakdown=broken_down(0.1, 0.2, 0.3)),
        record("plain", "a"),
    ]
    found = blocks([run(rows, batch=2)])
    [table] = built("parts", found)
    assert [line.name for line in table.bodies[0].lines] == ["ngram"]
    assert [*cells(table, "ngram").values()] == ["10.00", "20.00", "30.00", "60.00", "125.00"]
    [chart] = charts([table], colours(found), ChartSpec("seconds per round"))
    assert chart.places[:3] == ("draft time", "target time", "verify time")
    [series] = chart.series
    values = [value and value.value for value in series.values[:3]]
    assert values == pytest.approx([0.010, 0.020, 0.030])


def test_throughput_by_batch() -> None:
    runs = [
        run([record(sample=str(row), call="x") for row in range(batch)], str(batch), batch=batch)
        for batch in (2, 1, 4)
    ]
    [table] = built("batches", blocks(runs))
    assert table.groups[0].columns == ("1", "2", "4")
    assert [*cells(table, "plain").values()] == ["4.00", "8.00", "16.0"]
    [chart] = charts([table], {"plain": 7}, ChartSpec("tokens/s"))
    assert chart.places == ("1", "2", "4")


def test_a_batch_that_was_never_full_is_told() -> None:
    full = run([record(sample="0", call="x")], "1", batch=1)
    rows = [record(sample=str(row), call="x") for row in range(3)]
    [table] = built("batches", blocks([full, run(rows, "16", batch=16)]))
    assert table.groups[0].columns == ("1", "16 (3 rows)")


def test_a_method_has_one_colour_in_all_charts() -> None:
    """Also in those that lack another method, or have plain decoding besides."""
    rows = [record(method) for method in ("plain", "longspec-tree", "ngram")]
    hot = [record(method, temperature=1.0) for method in ("plain", "ngram")]
    found = blocks([run([*rows, *hot]), run(rows, "b", batch=2)])
    made = [*built("main", found), *built("batches", found)]
    specs = ChartSpec("", column="speed-up"), ChartSpec("")
    drawn = [chart for spec in specs for chart in charts(made, colours(found), spec)]
    assert {(series.name, series.colour) for chart in drawn for series in chart.series} == {
        ("plain", 7),
        ("longspec-tree", 0),
        ("ngram", 1),
    }


def different(method: str, sample: str, index: int, gap: float | None) -> SampleRecord:
    return record(method, sample, identical_to_plain=False, divergence=Divergence(index, gap))


def test_losslessness_never_rounds_to_all() -> None:
    rows = [record("ngram")] * 29_999
    [table] = built("lossless", blocks([run([*rows, different("ngram", "x", 7, 0.25)])]))
    assert [*cells(table, "ngram").values()] == ["29999 of 30000", "99.99 %", "token 7", "0.25"]


def test_losslessness_of_some() -> None:
    rows = [
        record("ngram", "a"),
        different("ngram", "b", 3, None),
        different("ngram", "c", 9, 0.001),
        record("longspec-tree", "a"),
        record("longspec-tree", "b", identical_to_plain=None),
    ]
    [table] = built("lossless", blocks([run(rows)]))
    assert [*cells(table, "ngram").values()] == ["1 of 3", "33.33 %", "token 6", "0.001"]
    assert [*cells(table, "longspec-tree").values()] == ["1 of 1", "100 %", "–", "–"]


def test_what_a_user_waits_for() -> None:
    rows = [
        record("plain", emitted=(1,) * 8, seconds=8.0),
        record("ngram", emitted=(4, 4), seconds=2.0, ended="eos"),
    ]
    [table] = built("times", blocks([run(rows)]))
    assert [*cells(table, "ngram").values()] == [
        *("1", "1000", "9", "2.000", "2.000", "4.00", "2.25", "2.50×", "100.0 %")
    ]


def test_quality() -> None:
    rows = [
        record("plain", "a", task="needle", references=("word",)),
        record("plain", "b", task="needle", references=("other", "another")),
        record("plain", "a", task="unknown", references=("word",)),
    ]
    [block] = blocks([run(rows)])
    [table] = built("quality", [block])
    assert cells(table, "plain") == {("needle", "found"): "50.0"}
    [sentence] = unscored(block)
    assert sentence.startswith("unknown has references")


def test_every_metric_is_named() -> None:
    used = {metric_of(task) for task in TASK_NAMES} - {None}
    assert used == set(scores.METRICS)


def test_nothing_to_compare_is_no_table(block: Block) -> None:
    alone = blocks([run([record("plain")])])
    assert built("pairs", alone) == []
    assert built("lossless", alone) == []
    assert built("batches", [block]) == []
    assert built("parts", [block]) == []
    assert built("quality", [block]) == []
    assert built("depth", alone) == []


def test_the_best_is_marked_where_there_is_a_choice() -> None:
    def line(name: str, value: float | None) -> Line:
        return Line(name, (shown(None if value is None else Estimate(value, None, None, 1), rate),))

    marked = mark_best([line("a", 1), line("b", 3), line("c", None)])
    assert [each.cells[0].bold for each in marked] == [False, True, False]
    assert not mark_best([line("a", 1), line("c", None)])[0].cells[0].bold


def test_an_interval_no_wider_than_what_is_shown_is_left_out() -> None:
    assert shown(Estimate(2.0, 2.001, 2.002, 9), length).interval == ""
    assert shown(Estimate(2.0, 1.5, 2.0, 9), length).interval == "1.50 to 2.00"
    assert shown(None, length) == Cell("–")


def test_names_for_links() -> None:
    assert slug("lcc <b>", 1.0) == "lcc-b-1-0"
