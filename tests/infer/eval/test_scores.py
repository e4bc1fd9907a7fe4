"""Scores are those of the public packages that the benchmarks use, on cases written by hand."""

import pytest

from infer.eval import scores
from infer.eval.tasks import TASKS

ROUGE_CASES = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("the cat sat on the mat", "the mat sat on the cat"),
    ("one two three", "four five six"),
    ("a b c d e f", "a c e"),
    ("a c e", "a b c d e f"),
    ("a a a a", "a"),
    ("The report. It says much. It ends.", "The report says much. It ends."),
    ("first sentence. second sentence", "second sentence. first sentence"),
    ("dots... and more. dots", "dots. and. more"),
    ("  spaces   in\nlines  ", "spaces in lines"),
    ("an end.", "an end"),
    ("a . b . c", "c . b . a"),
    ("x y z w v", "v w z y x"),
    ("the agency said that the agency would", "the agency would say that it said so"),
    ("Case matters Here", "case matters here"),
    ("na\u00efve caf\u00e9 r\u00e9sum\u00e9", "na\u00efve r\u00e9sum\u00e9"),
    ("1 2 3 4 5 6 7 8 9", "9 8 7 1 2 3 6 5 4"),
    (".leading dot", "leading dot."),
    ("p q. p q. p q", "q p. p q"),
    ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"),
]
"""Twenty pairs of an answer and a reference."""
CODE_CASES = [
    ("return x\nmore", "return x", 1.0),
    ("# a comment\nreturn y", "return x", 0.88),
    ("```python\nreturn x", "return x", 1.0),
    ("// c\n\nx", "y", 0.0),
    ("\n\nreturn x", "return x", 1.0),
    ("# only comments", "return x", 0.0),
]


@pytest.mark.parametrize(("text", "reference"), ROUGE_CASES)
def test_rouge_l_is_longbenchs(text: str, reference: str) -> None:
    """Of pip's ``rouge`` 1.0.1, which LongBench calls."""
    rouge = pytest.importorskip("rouge").Rouge()
    [theirs] = rouge.get_scores([text], [reference])
    assert scores.rouge_l(text, reference) == pytest.approx(theirs["rouge-l"]["f"], abs=1e-12)


def test_rouge_l_counts_words_once() -> None:
    """Without the package: 2 of 2 and 2 of 3 distinct words."""
    assert scores.rouge_l("a b a b", "a b c") == pytest.approx(2 * (2 / 3) / (5 / 3))
    assert scores.rouge_l("", "a") == scores.rouge_l("...", "a") == 0.0


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
    ],
)
def test_answers_of_aime(text: str, reference: str, expected: float) -> None:
    assert scores.exact_match(text, reference) == expected


def test_the_best_reference_counts() -> None:
    assert scores.score("found", " 123 and on", ["999", "123"]) == 1.0
    assert scores.score("found", "no 123", ["123"]) == 0.0
    assert {task.metric for task in TASKS.values()} - {None} <= scores.METRICS.keys()
