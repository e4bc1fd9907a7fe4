"""What a report says is missing or doubtful, and how the tokens of its case studies came."""

import dataclasses

import pytest

from infer.eval.records import SampleRecord, SkippedSample
from infer.report.blocks import blocks
from infer.report.case_study import case_studies, shades, tokens
from infer.report.report import _source, missing_or_doubtful

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
        (lambda r: bool(r.rounds), "no round was kept as a tree"),
    ],
)
def test_what_is_left_out_is_told(left_out, said: str) -> None:
    runs = [run([row for row in complete() if not left_out(row)])]
    [sentence] = [each for each in missing_or_doubtful(runs, blocks(runs)) if said in each]
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"breakdown": None}, "no round was timed in parts"),
        ({"references": ()}, "no sample has references"),
        ({"task": "unknown"}, "unknown has references, but no score of its own"),
        ({"original_tokens": 9000}, "a: the protocol cut the prompts of 1 sample of"),
    ],
)
def test_figures_that_do_not_exist_are_told(changed: dict[str, object], said: str) -> None:
    given = {"task": "needle", "references": ("word",), "breakdown": broken_down(1, 1, 1)}
    runs = [run([record("plain", **given), record("longspec-tree", **{**given, **changed})])]
    if set(changed) <= {"breakdown", "references"}:
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


@pytest.mark.parametrize(
    ("dirty", "told"),
    [({"dirty": True}, "abc, with changed files"), ({"dirty": False}, "abc"), ({}, "abc")],
)
def test_changed_files_of_the_commit_are_told(dirty: dict[str, bool], told: str) -> None:
    made = _source(run(complete(), provenance={"device": "made up", "commit": "abc", **dirty}))
    assert ("commit", told) in made.facts


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


def test_tokens_are_told_by_how_they_came() -> None:
    found = tokens(studied())
    assert [(token.text, token.origin, token.depth, token.round) for token in found[:5]] == [
        ("the", "prefill", 0, 0),
        (" cat", "draft", 1, 1),
        (" sat", "draft", 2, 1),
        (" <i>on</i>", "bonus", 0, 1),
        (" my", "bonus", 0, 2),
    ]
    assert [token.origin for token in found[5:]] == ["draft", "draft", "bonus"]
    assert [token.shade for token in found[:4]] == ["prefill", "depth-1", "depth-2", "bonus"]
    assert found[6].shown == "↵\n" and found[7].shown == "∅"


def test_a_last_round_may_end_inside_the_draft() -> None:
    text = record("ngram", emitted=(3, 2), accepted_by_round=(2, 2), pieces=tuple("abcdef"))
    assert [token.origin for token in tokens(text)[4:]] == ["draft", "draft"]


def test_pieces_that_contradict_the_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 pieces of text for 5 tokens by round; remove the line"):
        tokens(record(pieces=("a", "b")))


def test_only_texts_whose_rounds_were_kept_are_studied() -> None:
    [block] = blocks([run([record("plain"), studied()])])
    [case] = case_studies([block])
    assert [len(group) for group in case.rounds] == [1, 3, 1, 3]
    assert shades([case]) == [1, 2]
    first, second = case.data
    assert first["path"] == (0, 1, 3)
    assert first["drawn"] == [" cat", " sat", " <i>on</i>"]
    assert first["why"] == "the tree has nothing below the last accepted node"
    assert second["why"] == "the draft had not proposed what the target drew (among 2 candidates)"


def test_every_reason_has_words() -> None:
    ended = dataclasses.replace(studied().rounds[0], stop="ended")  # pyright: ignore[reportOptionalSubscript]  # It has rounds.
    [block] = blocks([run([studied(rounds=(ended,))])])
    [case] = case_studies([block])
    assert case.data[0]["why"] == "the text ended"
