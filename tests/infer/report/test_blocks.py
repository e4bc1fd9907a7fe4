"""What is compared with what, and what counts as one sample."""

import dataclasses

import pytest

from infer.report.blocks import all_tasks, all_temperatures, blocks
from infer.report.counting import acceptance, figure, pairs, speed, speed_up, whole_speed

from .made import SETTINGS, record, run


def test_methods_of_several_runs_are_put_together() -> None:
    plain = run([record("plain")], "plain")
    tree = run([record("longspec-tree")], "tree")
    [block] = blocks([tree, plain])
    assert block.methods == ("plain", "longspec-tree")  # Plain decoding first.
    assert (block.label, block.condition, block.names) == ("demo", "demo", ("tree", "plain"))
    assert len(block.records) == 2


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"target": "other"}, "other"),
        ({"dtype": "bfloat16"}, "demo, bfloat16"),
        ({"protocol": "longbench"}, "demo, longbench"),
        ({"provenance": {"device": "another"}}, "demo, another"),
        ({"options": {"samples": 9}}, "demo, samples=9"),
        ({"batch": 4}, "demo, batch 4"),
    ],
)
def test_what_differs_stands_apart_and_is_named(changed: dict[str, object], label: str) -> None:
    first, second = blocks([run([record("plain")]), run([record("longspec-tree")], "b", **changed)])
    assert second.label == label and first.label != label
    assert (first.methods, second.methods) == (("plain",), ("longspec-tree",))


def test_nothing_is_counted_twice() -> None:
    """The same text measured in two runs gives two blocks, named by their folders."""
    first, second = blocks([run([record()], "monday"), run([record()], "tuesday")])
    assert (first.label, second.label) == ("demo (monday)", "demo (tuesday)")
    assert len(first.records) == len(second.records) == 1


def test_a_method_has_one_setting() -> None:
    other = dataclasses.replace(SETTINGS["longspec-tree"], tree="8,8")
    one = run([record("longspec-tree", "0")], "a")
    two = run([record("longspec-tree", "1")], "b", methods={"longspec-tree": other})
    assert [len(block.records) for block in blocks([one, two])] == [1, 1]


def test_what_a_run_keeps_sets_nothing_apart() -> None:
    one = run([record("plain")], "a", options={"samples": 8, "rounds": 12, "breakdown": None})
    two = run([record("ngram")], "b", options={"samples": 8, "rounds": None, "breakdown": 4})
    [block] = blocks([one, two])
    assert block.label == "demo"


def test_batches_stand_in_order() -> None:
    runs = [run([record(batch=batch)], str(batch), batch=batch) for batch in (8, 1, 4)]
    found = blocks(runs)
    assert [block.label for block in found] == ["demo, batch 1", "demo, batch 4", "demo, batch 8"]
    assert {block.condition for block in found} == {"demo"}


def test_tasks_and_temperatures_of_all() -> None:
    found = blocks(
        [
            run([record(task="b", temperature=1.0), record(task="a")], "x"),
            run([record(task="c", temperature=0.5)], "y"),
        ]
    )
    assert all_tasks(found) == ("b", "a", "c")
    assert all_temperatures(found) == (0.0, 0.5, 1.0)


def test_rows_of_a_call_share_its_seconds() -> None:
    """Two rows of 4 tokens in one second: eight a second, and as much for each of them."""
    rows = [record(sample=name, call="one", batch=2, seconds=1.0) for name in "ab"]
    [block] = blocks([run(rows, batch=2)])
    both = figure(block, block.records, speed)
    alone = figure(block, block.records[:1], speed)
    assert both is not None and alone is not None
    assert both.value == alone.value == 8
    whole = figure(block, block.records, whole_speed)
    assert whole is not None and whole.value == pytest.approx((5 + 5) / (2.0 + 1.0))


def test_calls_of_two_runs_are_two() -> None:
    """Names of calls are a run's own."""
    one = run([record("plain", call="0", seconds=1.0)], "a")
    two = run([record("longspec-tree", call="0", seconds=3.0)], "b")
    [block] = blocks([one, two])
    assert len(block.rows_of_call) == 2


def test_what_shared_a_call_is_one_sample() -> None:
    """Also across methods that grouped their rows otherwise, and across seeds."""
    rows = [
        record("plain", "a", call="p0"),
        record("plain", "b", call="p0"),
        record("ngram", "b", call="n0"),
        record("ngram", "c", call="n0"),
        record("plain", "d", call="p1"),
        record("plain", "d", call="p2", seed=1),
    ]
    [block] = blocks([run(rows, batch=2)])
    assert len({block.units["copying", name] for name in "abc"}) == 1
    assert len({*block.units.values()}) == 2
    counted = figure(block, block.of("copying", "plain", 0.0), acceptance)
    assert counted is not None and counted.samples == 2


def test_the_prefill_and_its_token_are_no_decoding() -> None:
    [block] = blocks([run([record(emitted=(3, 1, 2), seconds=0.5)])])
    length, pace, whole = (
        figure(block, block.records, part) for part in (acceptance, speed, whole_speed)
    )
    assert length is not None and length.value == 6 / 3
    assert pace is not None and pace.value == 6 / 0.5
    assert whole is not None and whole.value == 7 / 2.5


def test_pairs_are_of_the_same_text_and_seed() -> None:
    rows = [
        record("plain", "a", seconds=4.0),
        record("plain", "a", seconds=2.0, seed=1),
        record("plain", "b", seconds=100.0),  # Nobody else decoded it.
        record("longspec-tree", "a", seconds=1.0),
        record("longspec-tree", "a", seconds=1.0, seed=1),
        record("longspec-tree", "c", seconds=0.001),
    ]
    [block] = blocks([run(rows)])
    plain, tree = (block.of("copying", name, 0.0) for name in ("plain", "longspec-tree"))
    assert pairs(block, tree, plain, speed) == [((8, 2.0), (8, 6.0))]
    gain = speed_up(block, "copying", "longspec-tree", 0.0)
    assert gain is not None and gain.value == pytest.approx(3) and gain.samples == 1


def test_what_does_not_count_passes_has_no_tokens_per_pass() -> None:
    outside = record("ngram", target_passes=None, emitted_by_round=(), accepted_by_round=())
    [block] = blocks([run([outside, record("plain")])])
    assert figure(block, block.records[:1], acceptance) is None
    assert figure(block, block.records[:1], speed) is not None
