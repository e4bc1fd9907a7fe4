"""How alike two texts are, where they differ and where they do not."""

import pytest

from infer import likeness as likeness_lib
from infer.likeness import Likeness, in_words, likeness
from longspec_jax.generation.comparison import Divergence

DIFFERENT = Divergence(0, 3, 7, 9, None)


def test_what_is_the_same_needs_no_scores() -> None:
    assert likeness(9, None, None, None) == Likeness(9, 1.0, 1.0)


def test_what_differs_is_scored() -> None:
    """Of three words two are there in order; of the letters and blanks all but three."""
    found = likeness(9, DIFFERENT, "the cat sat", "the dog sat")
    assert found.exact_prefix == 3 and found.rouge_l == pytest.approx(2 / 3)
    assert found.edit_similarity == pytest.approx(1 - 6 / 22)
    assert likeness(9, DIFFERENT, "", "the dog").rouge_l == 0


def test_the_prefix_is_told_without_texts_or_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert likeness(9, DIFFERENT, None, None) == Likeness(3, None, None)
    monkeypatch.setattr(likeness_lib, "missing_packages", lambda extra: f"pip install {extra}")
    found = likeness(9, DIFFERENT, "a", "b")
    assert found == Likeness(3, None, None)
    assert in_words([found, Likeness(9, 1.0, 1.0)], 18) == (
        "exact prefix 12 of 18 tokens; pip install eval"
    )


def test_rows_are_told_together() -> None:
    rows = [Likeness(3, 0.5, 0.25), Likeness(9, 1.0, 1.0)]
    words = "exact prefix 12 of 18 tokens, edit similarity 0.750, ROUGE-L 0.625"
    assert in_words(rows, 18) == words
