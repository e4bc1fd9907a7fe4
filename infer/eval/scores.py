"""How good the answers are: what a task's own benchmark counts.

Speculation that is lossless changes none of it: scores are there to compare targets, and to see
that a run did what it should.

ROUGE-L is LongBench's: the union of longest common subsequences over sentences and *distinct*
words, which is far above the usual ROUGE-L for long texts
(:func:`infer.text_similarity.rouge_l`). Edit similarity is LongBench's, too: of the first line of
an answer that is no comment and no Markdown.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence

import numpy as np

from longspec_jax.extras import missing_extra

from ..text_similarity import edit_similarity

BOXED = re.compile(r"\\boxed\s*\{\s*([^{}]*?)\s*\}")
INTEGER = re.compile(r"[+-]?\d+")


def score(metric: str, text: str, references: Sequence[str]) -> float:
    """The best score of an answer against any of the references, from 0 to 1.

    Args:
      metric: a key of :data:`METRICS`.
      text: the answer.
      references: what counts as an answer, at least one.
    """
    return max(METRICS[metric](text, reference) for reference in references)


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
    """LongBench's similarity of code, of the text's first line without backtick, # and //."""
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


METRICS: dict[str, Callable[[str, str], float]] = {
    "rouge_l": rouge_l,
    "edit_similarity": code_similarity,
    "whole_similarity": edit_similarity,
    "exact_match": exact_match,
    "found": found,
}
"""Scores by name."""
_BY_EDITS = ("edit_similarity", "whole_similarity")
"""Scores that rapidfuzz counts."""


def what_is_missing(metric: str) -> str | None:
    """What to install before a score can be computed, in a sentence; None if nothing is missing."""
    if metric in _BY_EDITS and importlib.util.find_spec("rapidfuzz") is None:
        return missing_extra(ModuleNotFoundError(name="rapidfuzz"))
    return None
