"""Scores of answers, as the benchmarks of their tasks define them.

Lossless speculation changes no score: scores compare targets, and show that a run did what it
should. ROUGE-L is LongBench's (:func:`rouge_l`): the union of longest common subsequences over
sentences and *distinct* words, far above the usual one for long texts. Edit similarity is
python-Levenshtein's ratio, which LongBench uses through fuzzywuzzy.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longspec_jax.extras import missing_packages

BOXED = re.compile(r"\\boxed\s*\{\s*([^{}]*?)\s*\}")
INTEGER = re.compile(r"[+-]?\d+")


def score(metric: str, text: str, references: Sequence[str]) -> float:
    """The best score of an answer against any of the references, from 0 to 1."""
    return max(METRICS[metric].score(text, reference) for reference in references)


def rouge_l(text: str, reference: str) -> float:
    """LongBench's ROUGE-L: F measure over distinct words, 0 for an empty text.

    Sentences end at full stops and words at spaces. Of every sentence of the reference the words
    in a longest common subsequence with any sentence of the text are counted, each word once in
    all.
    """
    ours, theirs = _sentences(text), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    common = {word for right in theirs for left in ours for word in _in_common(right, left)}
    precision, recall = (
        len(common) / len({word for sentence in sentences for word in sentence})
        for sentences in (ours, theirs)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """The words of every sentence; a sentence of spaces alone has one empty word."""
    return [(" ".join(part.split())).split(" ") for part in text.split(".") if part]


def _in_common(one: Sequence[str], other: Sequence[str]) -> set[str]:
    """Words of a longest common subsequence; of several, the one found from the ends.

    Where dropping the last word of either leaves as much, the second's is dropped.
    """
    lengths = np.zeros((len(one) + 1, len(other) + 1), np.int32)
    numbers = {word: number for number, word in enumerate({*one, *other})}
    columns = np.asarray([numbers[word] for word in other])
    for row, word in enumerate(one, start=1):
        above = lengths[row - 1]
        longer = np.where(columns == numbers[word], above[:-1] + 1, above[1:])
        # A row's lengths never fall from left to right.
        lengths[row, 1:] = np.maximum.accumulate(np.maximum(longer, above[1:]))
    found = set()
    row, column = len(one), len(other)
    while row and column:
        if one[row - 1] == other[column - 1]:
            found.add(one[row - 1])
            row, column = row - 1, column - 1
        elif lengths[row - 1, column] > lengths[row, column - 1]:
            row -= 1
        else:
            column -= 1
    return found


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
    return float(bool(found) and bool(wanted) and int(found[-1]) == int(wanted[-1]))


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
    by_edits: bool = False
    """Whether it needs rapidfuzz."""

    @property
    def missing(self) -> str | None:
        """What to install before it can be computed, in a sentence; None if all is there."""
        return missing_packages("eval") if self.by_edits else None


METRICS = {
    "rouge_l": Metric(
        *(rouge_l, "ROUGE-L"),
        "LongBench's, F measure over distinct words, far above the usual one for long texts",
    ),
    "edit_similarity": Metric(
        *(code_similarity, "edit similarity"),
        "LongBench's, python-Levenshtein's ratio of the first line without a comment",
        by_edits=True,
    ),
    "whole_similarity": Metric(
        *(edit_similarity, "similarity"),
        "python-Levenshtein's ratio of the whole answer",
        by_edits=True,
    ),
    "exact_match": Metric(
        *(exact_match, "exact match"),
        "share of answers whose last boxed number, or last number, is the reference",
    ),
    "found": Metric(found, "found", "share of answers that begin with the hidden code"),
}
"""Scores by the names that tasks give them."""
