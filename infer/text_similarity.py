"""How alike two texts are."""


def edit_similarity(one: str, other: str) -> float:
    """Share of the characters that no edit touches, from 0 to 1.

    It is the ratio of rapidfuzz: 1 - (insertions and deletions) / (characters of both).
    """
    from rapidfuzz import fuzz

    return fuzz.ratio(one, other) / 100


def rouge_l(one: str, other: str) -> float:
    """F measure of the longest common subsequence of words (ROUGE-L), from 0 to 1.

    Words are lower-cased and stripped of what is no letter or digit, and not stemmed.
    """
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"]).score(other, one)["rougeL"].fmeasure
