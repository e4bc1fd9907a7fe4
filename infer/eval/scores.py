"""Scores of answers, as the benchmarks of their tasks define them.

Lossless speculation changes no score: scores compare targets, and show that a run did what it
should. ROUGE-L is LongBench's: the union of longest common subsequences over sentences and
*distinct* words, far above the usual one for long texts. Edit similarity is python-Levenshtein's
ratio, which LongBench uses through fuzzywuzzy.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from longspec_jax.extras import missing_packages

BOXED = re.compile(r"\\boxed\s*\{\s*([^{}]*?)\s*\}")
INTEGER = re.compile(r"\+?(-?)0*(\d+)")
"""Sign and digits: of an endless answer's digits Python makes no number."""


def score(metric: str, text: str, references: Sequence[str]) -> float:
    """The best score of an answer against any of the references, from 0 to 1."""
    return max(METRICS[metric].score(text, reference) for reference in references)


def rouge_l(text: str, reference: str) -> float:
    """LongBench's ROUGE-L: the F measure of pip's ``rouge``, and 0 where that fails.

    It fails for a text without words, and for a sentence of many hundred words.
    """
    from rouge import Rouge

    try:
        found = Rouge(metrics=["rouge-l"]).get_scores(text, reference)
    except (ValueError, RecursionError):
        return 0.0
    return cast(list[dict[str, dict[str, float]]], found)[0]["rouge-l"]["f"]


def code_similarity(text: str, reference: str) -> float:
    """LongBench's similarity of code: whole percents, of the first line without a `, # or //."""
    lines = text.lstrip("\n").split("\n")
    marks = ("`", "#", "//")
    line = next((line for line in lines if not any(mark in line for mark in marks)), "")
    return round(100 * edit_similarity(line, reference)) / 100


def exact_match(text: str, reference: str) -> float:
    """Whether the last boxed answer, or the last whole number, is the reference's.

    Leading zeros do not count: the answers of AIME are the numbers from 0 to 999.
    """
    boxed = BOXED.findall(text)
    found = INTEGER.findall((boxed[-1] if boxed else text).replace(",", ""))
    wanted = INTEGER.findall(reference)
    return float(bool(found) and bool(wanted) and found[-1] == wanted[-1])


def found(text: str, reference: str) -> float:
    """Whether the answer begins with the reference, spaces aside."""
    return float(text.strip().startswith(reference.strip()))


def edit_similarity(one: str, other: str) -> float:
    """python-Levenshtein's ratio, from 0 to 1, computed by rapidfuzz.

    It is 1 - (insertions and deletions) / (characters of both); a substitution counts as both.
    """
    from rapidfuzz import fuzz

    return fuzz.ratio(one, other) / 100


@dataclass(frozen=True)
class Metric:
    """How a text is scored against a reference."""

    score: Callable[[str, str], float]
    """From 0 to 1."""
    name: str
    """In reports."""
    meaning: str
    """What it counts, for reports."""
    by_package: bool = False
    """Whether it needs the packages of the extra ``eval``."""

    @property
    def missing(self) -> str | None:
        """What to install before it can be computed, in a sentence; None if all is there."""
        return missing_packages("eval") if self.by_package else None


METRICS = {
    "rouge_l": Metric(
        rouge_l,
        "ROUGE-L",
        "LongBench's, F measure over distinct words, far above the usual one for long texts",
        by_package=True,
    ),
    "edit_similarity": Metric(
        code_similarity,
        "edit similarity",
        "LongBench's, python-Levenshtein's ratio of the first line without a comment",
        by_package=True,
    ),
    "whole_similarity": Metric(
        edit_similarity,
        "similarity",
        "python-Levenshtein's ratio of the whole answer",
        by_package=True,
    ),
    "exact_match": Metric(
        exact_match,
        "exact match",
        "share of answers whose last boxed number, or last number, is the reference",
    ),
    "found": Metric(found, "found", "share of answers that begin with the hidden code"),
}
"""Scores by the names that tasks give them."""
