"""Nothing is left out silently."""

import pytest

from infer.eval.records import SampleRecord, SkippedSample
from infer.report.blocks import blocks
from infer.report.missing import sentences

from .made import broken_down, record, run, studied


def complete() -> list[SampleRecord]:
    """A run that lacks nothing."""
    given = {"task": "needle", "references": ("word",), "breakdown": broken_down(1, 1, 1)}
    rows = [
        record(method, name, **given) for method in ("plain", "longspec-tree") for name in "abcd"
    ]
    kept = studied(**given)
    return [*rows, kept, record("plain", kept.sample, **given)]


def test_a_complete_run_lacks_nothing() -> None:
    runs = [run(complete())]
    assert sentences(runs, blocks(runs)) == []


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            lambda r: r.method == "plain" and r.sample in "ab",
            "demo: plain lacks 2 of the 5 texts of needle at T = 0",
        ),
        (lambda r: r.method == "plain", "plain decoding did not run, so that there is no speed-up"),
        (lambda r: r.sample in "ab", "fewer than 4 independent samples of needle"),
        (lambda r: bool(r.rounds), "no round was kept as a tree"),
    ],
)
def test_what_is_left_out_is_told(left_out, said: str) -> None:
    runs = [run([row for row in complete() if not left_out(row)])]
    [sentence] = [each for each in sentences(runs, blocks(runs)) if said in each]
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"breakdown": None}, "no round was timed in parts"),
        ({"references": ()}, "no sample has references"),
        ({"task": "unknown"}, "unknown has references, but no score of its own"),
        (
            {"target_passes": None, "emitted_by_round": (), "accepted_by_round": ()},
            "longspec-tree does not tell its target passes",
        ),
        ({"original_tokens": 9000}, "a: the prompts of 1 sample of"),
    ],
)
def test_figures_that_do_not_exist_are_told(changed: dict[str, object], said: str) -> None:
    given = {"task": "needle", "references": ("word",), "breakdown": broken_down(1, 1, 1)}
    runs = [run([record("plain", **given), record("longspec-tree", **{**given, **changed})])]
    if set(changed) <= {"breakdown", "references"}:
        runs = [run([record("longspec-tree", **{**given, **changed})])]
    assert any(said in each for each in sentences(runs, blocks(runs)))


def test_tasks_of_the_header_without_a_sample_are_told() -> None:
    runs = [run(complete(), tasks=("needle", "lcc"))]
    assert sentences(runs, blocks(runs)) == ["demo: task lcc has no sample at all."]


def test_skipped_samples_are_counted() -> None:
    skipped = [SkippedSample("needle", name, 900, "900 tokens are too few") for name in "xyz"]
    runs = [run(complete(), skipped=skipped, torn=17)]
    told = sentences(runs, blocks(runs))
    assert "a: 3 samples of needle skipped: 900 tokens are too few." in told
    assert any("the last line was cut short in writing (17 bytes)" in each for each in told)


def test_speeds_of_several_commits_are_told() -> None:
    mine, other = ({"device": "made up", "commit": commit * 40} for commit in "ab")
    rows = complete()
    one = run([row for row in rows if row.method == "plain"], "a", provenance=mine)
    two = run([row for row in rows if row.method != "plain"], "b", provenance=other)
    [sentence] = sentences([one, two], blocks([one, two]))
    assert "it was measured at aaaaaaaaaaaa, bbbbbbbbbbbb, whose speeds" in sentence
    assert sentences([run(rows, continued=(mine,), provenance=mine)], blocks([run(rows)])) == []
