"""What is compared with what, what counts as one sample, and figures with their intervals."""

# pandas' own annotations name everything that a call might return for any arguments:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from infer.report import frame as frame_lib
from infer.report.frame import (
    DRAWS,
    FEWEST,
    SEED,
    blocks_of,
    estimate,
    frame_of,
    gain,
    in_ranges,
    quotient,
    rounds_of,
    sums_by_unit,
)
from tests.kit import each_row

from .made import SETTINGS, framed, record, run

PLAIN, TREE = record("plain"), record("longspec-tree")


def test_methods_of_several_runs_are_put_together() -> None:
    [block] = blocks_of([run([TREE], "tree"), run([PLAIN], "plain")])
    assert block.methods == ["plain", "longspec-tree"]  # Plain decoding first.
    assert block.label == "demo"
    assert [each.name for each in block.runs] == ["tree", "plain"]


@each_row(
    ("changed", "label"),
    [
        ({"target": "other"}, "other"),
        ({"dtype": "bfloat16"}, "demo, bfloat16"),
        ({"provenance": {"device": "another"}}, "demo, another"),
        ({"options": {"samples": 9}}, "demo, samples=9"),
        ({"batch": 4}, "demo, batch 4"),
    ],
)
def test_what_differs_stands_apart_and_is_named(changed: dict[str, Any], label: str) -> None:
    first, second = blocks_of([run([PLAIN]), run([TREE], "b", **changed)])
    assert second.label == label and first.label != label
    assert (first.methods, second.methods) == (["plain"], ["longspec-tree"])


def test_nothing_is_counted_twice() -> None:
    """The same text in two runs gives two blocks, named by their folders; so do two settings."""
    first, second = blocks_of([run([PLAIN], "monday"), run([PLAIN], "tuesday")])
    assert (first.label, second.label) == ("demo (monday)", "demo (tuesday)")
    other = dataclasses.replace(SETTINGS["longspec-tree"], tree="8,8")
    one = run([TREE], "a")
    two = run([record("longspec-tree", "1")], "b", methods={"longspec-tree": other})
    assert len(blocks_of([one, two])) == 2


def test_rows_of_a_call_share_its_seconds() -> None:
    """Two rows of 4 tokens in one second: eight a second. Names of calls are a run's own."""
    pair = [record(sample=name, call="0", batch=2, seconds=1.0) for name in "ab"]
    apart = record("longspec-tree", call="0", seconds=3.0)
    found = frame_of(blocks_of([run(pair, "a", batch=2), run([apart], "b", batch=2)]))
    assert [*found["seconds"]] == [0.5, 0.5, 3.0]
    assert [*found["prefill_s"]] == [1.0, 1.0, 2.0]


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
    units = framed(rows).groupby("sample")["unit"].unique()
    assert len({int(unit) for name in "abc" for unit in units[name]}) == 1
    assert len(units["d"]) == 1 and units["d"][0] != units["a"][0]


def test_plain_decoding_beside_a_text_is_of_the_same_text_and_seed() -> None:
    rows = [
        record("plain", "a", seconds=4.0),
        record("plain", "a", seconds=2.0, seed=1),
        record("plain", "b", seconds=100.0),  # Nobody else decoded it.
        record("longspec-tree", "a", seconds=1.0),
        record("longspec-tree", "a", seconds=1.0, seed=1),
        record("longspec-tree", "c", seconds=0.001),
    ]
    found = framed(rows)
    tree = found[found["method"] == "longspec-tree"]
    columns = ("tokens", "seconds", "tokens_plain", "seconds_plain")
    assert sums_by_unit(tree, columns).tolist() == [[8, 2.0, 8, 6.0]]


def test_what_ended_in_the_prefill_has_neither_tokens_per_pass_nor_a_speed() -> None:
    found = framed([record("ngram", emitted=(), accepted_by_round=()), PLAIN])
    drafted = found[found["method"] == "ngram"]
    for columns in (("tokens", "passes"), ("tokens", "seconds")):
        assert estimate(sums_by_unit(drafted, columns), quotient) is None


def test_positions_of_rounds() -> None:
    """The prefill's token stands at 1000, and the first round begins after it."""
    rounds = rounds_of(framed([record("ngram", emitted=(4, 1, 3)), PLAIN]))
    assert [*rounds["position"]] == [1001, 1005, 1006]
    assert [*rounds["accepted"]] == [3, 0, 2]


@each_row(
    ("lengths", "edges", "names"),
    [
        ([3, 7, 12], (0, 5, 10), ["0–5", "5–10", "10–13"]),
        ([4000, 31_000], (0, 5000, 25_000, 32_000), ["0–5k", "25k–32k"]),
    ],
)
def test_ranges(lengths: list[int], edges: tuple[int, ...], names: list[str]) -> None:
    assert [*in_ranges(frame_lib.pd.Series(lengths), edges).astype(str)] == names


def units(above: Any, below: Any) -> np.ndarray:
    return np.stack([np.asarray(above, float), np.asarray(below, float)], axis=1)


def test_a_ratio_is_one_of_sums_and_no_mean_of_ratios() -> None:
    found = estimate(units([10, 90], [1, 3]), quotient)
    assert found is not None
    assert (found.value, found.samples) == (25, 2)


def test_few_samples_have_no_interval() -> None:
    few, enough = (
        estimate(units(range(1, n + 1), [1] * n), quotient) for n in (FEWEST - 1, FEWEST)
    )
    assert few is not None and np.isnan([few.low, few.high]).all()
    assert enough is not None and enough.low < enough.value < enough.high


def test_four_samples_reach_from_the_least_to_the_greatest() -> None:
    """The tail of Student's t with three degrees of freedom lies beyond every draw but those."""
    found = estimate(units([1, 2, 3, 10], [1] * 4), quotient)
    draws = sorted(sum(draw) / 4 for draw in itertools.product([1, 2, 3, 10], repeat=4))
    assert found is not None
    assert found.low == pytest.approx(draws[0], abs=0.5)
    assert found.high == pytest.approx(draws[-1], abs=1.5)


@each_row(
    ("rows", "of"),
    [
        (np.empty((0, 2)), quotient),
        (units([0, 0], [0, 0]), quotient),
        (np.array([[1.0, 1.0, 0.0, 0.0]]), gain),
        (np.array([[1.0, 0.0, 1.0, 1.0]]), gain),
    ],
)
def test_what_has_no_value_has_no_figure(rows: np.ndarray, of: Any) -> None:
    assert estimate(rows, of) is None


def test_draws_without_a_value_are_left_out() -> None:
    """Most draws of these hold no pass at all."""
    found = estimate(units([0, 0, 0, 0, 8], [0, 0, 0, 0, 2]), quotient)
    assert found is not None
    assert (found.value, found.low, found.high) == (4, 4, 4)


@each_row("count", [4, 8, 20])
def test_intervals_are_scipys_taken_further_out(count: int) -> None:
    """The resamples are those of ``scipy.stats.bootstrap`` with the same seed."""
    rows = units(*np.random.default_rng(count).uniform(1, 9, (2, count)))
    theirs = stats.bootstrap(
        (np.arange(count),),
        lambda index, axis: quotient(np.moveaxis(rows[index].sum(axis=-2), -1, 0)),
        n_resamples=DRAWS,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    found = estimate(rows, quotient)
    assert found is not None
    low, high = theirs.confidence_interval
    assert found.low < low < high < found.high
    tail = frame_lib._tail(count)
    ends = np.quantile(theirs.bootstrap_distribution, [tail, 1 - tail])
    assert [found.low, found.high] == pytest.approx(ends)


@each_row("count", [4, 8, 20])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """Of a skewed ratio, of few samples and of many: at least nearly so."""
    random = np.random.default_rng(0)
    held, times = 0, 200
    for _ in range(times):
        below = random.uniform(20, 60, count)
        found = estimate(units(below * random.gamma(20, 3 / 20, count), below), quotient)
        assert found is not None
        held += found.low <= 3 <= found.high
    assert 0.86 <= held / times <= 0.995


def test_pairs_say_more_than_two_intervals() -> None:
    """A method that is always a tenth faster, on samples of very different speeds."""
    speeds = np.random.default_rng(1).uniform(10, 100, 12)
    slow, fast = (units([100] * 12, 100 / (factor * speeds)) for factor in (1, 1.1))
    one, other = estimate(slow, quotient), estimate(fast, quotient)
    assert one is not None and other is not None
    assert one.high > other.low  # Apart they overlap.
    both = np.concatenate([fast, slow], axis=1)
    ratio = estimate(both, gain)
    assert ratio is not None
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.1] * 3)
