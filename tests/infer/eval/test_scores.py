"""Scores are those of the public packages that the benchmarks use, on cases written by hand."""

import pytest

from infer.eval import scores
from infer.eval.tasks import TASKS

CODE_CASES = [
    ("return x\nmore", "return x", 1.0),
    ("# a comment\nreturn y", "return x", 0.88),
    ("```python\nreturn x", "return x", 1.0),
    ("// c\n\nx", "y", 0.0),
    ("\n\nreturn x", "return x", 1.0),
    ("# only comments", "return x", 0.0),
]


def test_rouge_l_counts_words_once() -> None:
    """2 of 2 and 2 of 3 distinct words; words of two sentences; no words; too many of them."""
    pytest.importorskip("rouge")
    assert scores.rouge_l("a b a b", "a b c") == pytest.approx(2 * (2 / 3) / (5 / 3))
    assert scores.rouge_l("a . b", "b . a") == pytest.approx(1.0)
    assert scores.rouge_l("", "a") == scores.rouge_l("...", "a") == 0.0
    assert scores.rouge_l("c" + " a" * 600, "c" + " b" * 600) == 0.0


@pytest.mark.parametrize(("text", "reference", "expected"), CODE_CASES)
def test_code_is_compared_by_its_first_line(text: str, reference: str, expected: float) -> None:
    pytest.importorskip("rapidfuzz")
    assert scores.code_similarity(text, reference) == expected


def test_edit_similarity_is_python_levenshteins_ratio() -> None:
    """One substitution is a deletion and an insertion of 16 characters."""
    pytest.importorskip("rapidfuzz")
    assert scores.edit_similarity("return y", "return x") == 1 - 2 / 16
    assert scores.edit_similarity("", "") == 1.0


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        (r"so \boxed{042}", "42", 1.0),
        (r"first \boxed{7}, then \boxed{42}", "42", 1.0),
        (r"first \boxed{42}, then \boxed{7}", "42", 0.0),
        ("the answer is 42.", "42", 1.0),
        ("no number", "42", 0.0),
        (r"\boxed{1,042}", "1042", 1.0),
        (r"\boxed{x} and 42", "42", 0.0),
        ("so x = -42", "42", 0.0),
        pytest.param("42" * 4000, "42", 0.0, id="an endless answer"),
    ],
)
def test_answers_of_aime(text: str, reference: str, expected: float) -> None:
    assert scores.exact_match(text, reference) == expected


def test_the_best_reference_counts() -> None:
    assert scores.score("found", " 123 and on", ["999", "123"]) == 1.0
    assert scores.score("found", "no 123", ["123"]) == 0.0
    assert {task.metric for task in TASKS.values()} - {None} <= scores.METRICS.keys()
