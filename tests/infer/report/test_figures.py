"""What is compared with what, what counts as one sample, and figures with their intervals."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from infer.report import figures
from infer.report.blocks import all_tasks, all_temperatures, blocks
from infer.report.figures import (
    FEWEST,
    Fraction,
    Selection,
    acceptance,
    difference_of_ratios,
    occupied,
    positions,
    ratio,
    ratio_of_ratios,
    speed,
    whole_speed,
)

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
def test_what_differs_stands_apart_and_is_named(changed: dict[str, Any], label: str) -> None:
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
    both, whole = (Selection(block, 0.0).figure(part) for part in (speed, whole_speed))
    assert both is not None and both.value == 8
    assert speed(block, block.records[0]) == (4, 0.5)
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
    counted = Selection(block, 0.0, task="copying").figure(acceptance)
    assert counted is not None and counted.samples == 2


def test_the_prefill_and_its_token_are_no_decoding() -> None:
    [block] = blocks([run([record(emitted=(3, 1, 2), seconds=0.5)])])
    length, rate, whole = (
        Selection(block, 0.0).figure(part) for part in (acceptance, speed, whole_speed)
    )
    assert length is not None and length.value == 6 / 3
    assert rate is not None and rate.value == 6 / 0.5
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
    tree = Selection(block, 0.0, "longspec-tree")
    assert tree.pairs(speed) == [((8, 2.0), (8, 6.0))]
    gain = tree.ratio(speed)
    assert gain is not None and gain.value == pytest.approx(3) and gain.samples == 1


def test_what_ended_in_the_prefill_has_neither_tokens_per_pass_nor_a_speed() -> None:
    ended = record("ngram", emitted=(), accepted_by_round=())
    [block] = blocks([run([ended, record("plain")])])
    assert Selection(block, 0.0, "ngram").figure(acceptance) is None
    assert Selection(block, 0.0, "ngram").figure(speed) is None


def test_ranges() -> None:
    ranges = occupied([3, 7, 12], (0, 5, 10))
    assert [(each.start, each.stop) for each in ranges] == [(0, 5), (5, 10), (10, 13)]
    assert [each.name for each in occupied([4_000, 31_000])] == ["0–5k", "25k–32k"]
    assert occupied([]) == []


def test_positions_of_rounds() -> None:
    """The prefill's token stands at 1000, and the first round begins behind it."""
    text = record("ngram", emitted=(4, 1, 3), prompt_tokens=1000)
    assert positions(text) == [1001, 1005, 1006]


def fractions(above: list[float], below: list[float]) -> list[Fraction]:
    return [Fraction(*each) for each in zip(above, below, strict=True)]


def test_a_ratio_is_one_of_sums_and_no_mean_of_ratios() -> None:
    found = ratio(fractions([10, 90], [1, 3]))
    assert found is not None
    assert (found.value, found.samples) == (25, 2)


def test_few_samples_have_no_interval() -> None:
    few = ratio(fractions([1, 2, 3], [1, 1, 1]))
    assert few is not None and len([1, 2, 3]) < FEWEST
    assert (few.low, few.high) == (None, None) and not few.excludes(100)
    enough = ratio(fractions([1, 2, 3, 4], [1, 1, 1, 1]))
    assert enough is not None and enough.low is not None


def test_four_samples_reach_from_the_least_to_the_greatest() -> None:
    """The tail of Student's t with three degrees of freedom lies beyond every draw but those."""
    found = ratio(fractions([1, 2, 3, 10], [1, 1, 1, 1]))
    assert found is not None and found.low is not None and found.high is not None
    draws = sorted(sum(draw) / 4 for draw in itertools.product([1, 2, 3, 10], repeat=4))
    assert found.low == pytest.approx(draws[0], abs=0.5)
    assert found.high == pytest.approx(draws[-1], abs=1.5)


def test_what_has_no_value_has_no_figure() -> None:
    assert ratio([]) is None
    assert ratio(fractions([0, 0], [0, 0])) is None
    assert ratio_of_ratios([]) is None
    assert ratio_of_ratios([(Fraction(1, 1), Fraction(0, 0))]) is None
    assert difference_of_ratios([(Fraction(1, 0), Fraction(1, 1))]) is None


def test_draws_without_a_value_are_left_out() -> None:
    """Most draws of these hold no pass at all."""
    found = ratio(fractions([0, 0, 0, 0, 8], [0, 0, 0, 0, 2]))
    assert found is not None
    assert (found.value, found.low, found.high) == (4, 4, 4)


@pytest.mark.parametrize("count", [4, 8, 20])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """Of a skewed ratio, of few samples and of many: at least nearly so."""
    random = np.random.default_rng(0)
    held, times = 0, 200
    for _ in range(times):
        below = random.uniform(20, 60, count)
        above = below * random.gamma(20, 3 / 20, count)
        found = ratio(fractions(above.tolist(), below.tolist()))
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= 3 <= found.high
    assert 0.86 <= held / times <= 0.995


def test_pairs_say_more_than_two_intervals() -> None:
    """A method that is always a tenth faster, on samples of very different speeds."""
    random = np.random.default_rng(1)
    speeds = random.uniform(10, 100, 12)
    slow = [Fraction(100, 100 / speed) for speed in speeds]
    fast = [Fraction(100, 100 / (1.1 * speed)) for speed in speeds]
    one, other = ratio(slow), ratio(fast)
    assert one is not None and other is not None and one.high is not None and other.low is not None
    assert one.high > other.low  # Apart they overlap.
    gain = ratio_of_ratios([*zip(fast, slow, strict=True)])
    assert gain is not None
    assert gain.value == pytest.approx(1.1) and gain.low == pytest.approx(1.1)
    assert gain.excludes(1)
    difference = difference_of_ratios([*zip(fast, slow, strict=True)])
    assert difference is not None and difference.value == pytest.approx(other.value - one.value)
    assert difference.excludes(0)


def test_a_report_says_the_same_twice() -> None:
    parts = fractions([1, 5, 2, 8, 3], [1, 2, 1, 2, 2])
    assert ratio(parts) == ratio(parts)


def test_many_samples_are_drawn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = fractions(list(range(1, 31)), [1] * 30)
    whole = ratio(parts)
    monkeypatch.setattr(figures, "_CELLS", 30 * 7)
    figures._draws.cache_clear()
    assert ratio(parts) == whole
    assert figures._draws(30).shape == (figures.DRAWS, 30)
