"""How much a text that may differ from plain decoding's does so.

The *exact prefix* is in tokens: all of the row where nothing differs. What scores of texts need is
installed with an extra; without it they are None, and the prefix is told all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longspec_jax.extras import missing_packages
from longspec_jax.generation.comparison import Divergence

from .text_similarity import edit_similarity, rouge_l


@dataclass(frozen=True)
class Likeness:
    """One row beside the plain one."""

    exact_prefix: int
    """Tokens before the first that differs."""
    edit_similarity: float | None
    """Share of characters that no edit touches."""
    rouge_l: float | None
    """F measure of the longest common subsequence of words."""


def likeness(
    tokens: int, divergence: Divergence | None, text: str | None, plain: str | None
) -> Likeness:
    """How alike a row and the plain one are.

    Args:
      tokens: of the row.
      divergence: its first difference, None if there is none.
      text: the row's; None without a tokenizer.
      plain: the plain row's.
    """
    if divergence is None:
        return Likeness(tokens, 1.0, 1.0)
    if text is None or plain is None or missing_packages("eval"):
        return Likeness(divergence.index, None, None)
    return Likeness(divergence.index, edit_similarity(text, plain), rouge_l(text, plain))


def in_words(rows: Sequence[Likeness], tokens: int) -> str:
    """How alike all rows are: prefixes together, scores on average.

    Args:
      rows: at least one.
      tokens: of all rows.
    """
    words = f"exact prefix {sum(row.exact_prefix for row in rows)} of {tokens} tokens"
    edits = [row.edit_similarity for row in rows if row.edit_similarity is not None]
    longest = [row.rouge_l for row in rows if row.rouge_l is not None]
    if len(edits) == len(longest) == len(rows):
        edit, rouge = (sum(column) / len(rows) for column in (edits, longest))
        return f"{words}, edit similarity {edit:.3f}, ROUGE-L {rouge:.3f}"
    missing = missing_packages("eval")
    return f"{words}; {missing}" if missing else words
