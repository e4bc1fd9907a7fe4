"""How the tokens of a text came."""

import dataclasses

import pytest

from infer.report.blocks import blocks
from infer.report.case_study import case_studies, shades, tokens

from .made import record, run, studied


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
