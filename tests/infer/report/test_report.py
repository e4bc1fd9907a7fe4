"""What a report says is missing or doubtful."""

import dataclasses

import pytest

from infer.eval.records import SampleRecord, SkippedSample
from infer.report.blocks import blocks
from infer.report.report import missing_or_doubtful

from .made import record, run


def complete() -> list[SampleRecord]:
    """A run that lacks nothing."""
    given = {"task": "needle", "references": ("word",)}
    rows = [
        record(method, name, **given) for method in ("plain", "longspec-tree") for name in "abcde"
    ]
    return rows


def test_a_complete_run_lacks_nothing() -> None:
    runs = [run(complete())]
    assert missing_or_doubtful(runs, blocks(runs)) == []


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        (
            lambda r: r.method == "plain" and r.sample in "ab",
            "demo: plain lacks 2 of the 5 texts of needle at T = 0",
        ),
        (lambda r: r.method == "plain", "plain decoding did not run, so that there is no speed-up"),
        (lambda r: r.sample in "ab", "fewer than 4 independent samples of needle"),
    ],
)
def test_what_is_left_out_is_told(left_out, said: str) -> None:
    runs = [run([row for row in complete() if not left_out(row)])]
    [sentence] = [each for each in missing_or_doubtful(runs, blocks(runs)) if said in each]
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"references": ()}, "no sample has references"),
        ({"task": "unknown"}, "unknown has references, but no score of its own"),
        ({"original_tokens": 9000}, "a: the protocol cut the prompts of 1 sample of"),
    ],
)
def test_figures_that_do_not_exist_are_told(changed: dict[str, object], said: str) -> None:
    given = {"task": "needle", "references": ("word",)}
    runs = [run([record("plain", **given), record("longspec-tree", **{**given, **changed})])]
    if set(changed) <= {"references"}:
        runs = [run([record("longspec-tree", **{**given, **changed})])]
    assert any(said in each for each in missing_or_doubtful(runs, blocks(runs)))


def test_tasks_of_the_header_without_a_sample_are_told() -> None:
    runs = [run(complete(), tasks=("needle", "lcc"))]
    assert missing_or_doubtful(runs, blocks(runs)) == ["demo: task lcc has no sample at all."]


def test_skipped_samples_are_counted() -> None:
    skipped = [SkippedSample("needle", name, 900, "900 tokens are too few") for name in "xyz"]
    runs = [run(complete(), skipped=skipped, torn=17)]
    told = missing_or_doubtful(runs, blocks(runs))
    assert "a: 3 samples of needle skipped: 900 tokens are too few." in told
    assert any("the last line was cut short in writing (17 bytes)" in each for each in told)


def test_speeds_of_several_commits_are_told() -> None:
    mine, other = ({"device": "made up", "commit": commit * 40} for commit in "ab")
    rows = complete()
    one = run([row for row in rows if row.method == "plain"], "a", provenance=mine)
    two = run([row for row in rows if row.method != "plain"], "b", provenance=other)
    commits, session = missing_or_doubtful([one, two], blocks([one, two]))
    assert "measured at several commits (aaaaaaaaaaaa, bbbbbbbbbbbb)" in commits
    assert "timed in another session than longspec-tree (5 texts)" in session
    again = run(rows, continued=(mine,), provenance=mine)
    assert missing_or_doubtful([again], blocks([again])) == []


def test_plain_decoding_of_another_start_is_told() -> None:
    """A run that was stopped behind plain decoding: its load may have been another."""
    rows = [
        dataclasses.replace(row, start=0 if row.method == "plain" or row.sample == "a" else 1)
        for row in complete()
    ]
    runs = [run(rows)]
    [sentence] = missing_or_doubtful(runs, blocks(runs))
    assert "plain decoding was timed in another session than longspec-tree (4 texts)" in sentence


@pytest.mark.parametrize(("seconds", "doubtful"), [(14.45, True), (1.41, False)])
def test_a_speed_up_that_speculation_cannot_give_is_told(seconds: float, doubtful: bool) -> None:
    """Plain decoding at 1 / 14.45 of the speed, and 41 tokens in 29 passes."""
    emitted = (2,) * 12 + (1,) * 17
    rows = [
        record("plain", emitted=(1,) * 41, seconds=seconds),
        record("ngram", emitted=emitted, seconds=1.0),
    ]
    runs = [run(rows)]
    words = f"ngram has a speed-up of {seconds:.2f}× at τ 1.41 on copying, T = 0"
    assert any(words in each for each in missing_or_doubtful(runs, blocks(runs))) is doubtful
