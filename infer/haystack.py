"""Needle documents: real text of any length, with one sentence that the end of it asks for.

The sentence says a code and the document ends with the same words up to the code, so that whoever
goes on has to find it. Words, code and place follow from a seed alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SENTENCE = "# The access code of the {adjective} {noun} is"
"""A comment in source code, a heading in prose."""
ADJECTIVES = "amber brave calm dusty early frozen gentle hollow iron jolly".split()
NOUNS = "harbour orchard lantern meadow castle river bakery library tower garden".split()
DIGITS = 8
"""Of the code: more than chance finds."""

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class NeedleDocument:
    """A document with a needle in it, and what finds it."""

    tokens: list[int]
    """The document, up to where the code is asked for."""
    answer: list[int]
    """The code's tokens."""
    place: int
    """Index of the needle's first token."""
    code: str
    """What is hidden: digits."""


def needle_document(
    tokenize: Tokenize, texts: Sequence[str], length: int, depth: float, seed: int
) -> NeedleDocument:
    """A document of exactly ``length`` tokens.

    Args:
      tokenize: text to token ids, without tokens of its own at either end.
      texts: what surrounds the needle: from one chosen by the seed on, again from the first where
        they are too short.
      length: tokens, the needle and the question at the end included.
      depth: where the needle is, at the nearest end of a line: 0 is the beginning, 1 the end.
      seed: of words, code and text.

    Raises:
      ValueError: if there is no room for text around the needle.
    """
    draw = np.random.default_rng(seed)
    sentence = SENTENCE.format(adjective=draw.choice(ADJECTIVES), noun=draw.choice(NOUNS))
    code = "".join(map(str, draw.integers(0, 10, DIGITS)))
    said, answer, end = (list(tokenize(text)) for text in (f"\n{sentence}", f" {code}", "\n"))
    needle = [*said, *answer, *end]
    room = length - len(needle) - len(said)
    if room < 1:
        raise ValueError(
            f"{length} tokens leave no room around a needle of {len(needle)} tokens and its "
            f"question of {len(said)}; ask for longer documents"
        )
    hay = _hay(tokenize, texts, room, int(draw.integers(len(texts))))
    line_ends = _line_ends(tokenize)
    ends = [0, *(index + 1 for index, token in enumerate(hay) if token in line_ends)]
    place = min(ends, key=lambda end: abs(end - depth * room))
    return NeedleDocument([*hay[:place], *needle, *hay[place:], *said], answer, place, code)


def _hay(tokenize: Tokenize, texts: Sequence[str], length: int, first: int) -> list[int]:
    """So many tokens of the texts, from the first one on."""
    hay: list[int] = []
    while len(hay) < length:
        before = len(hay)
        for index in range(len(texts)):
            hay += tokenize(texts[(first + index) % len(texts)])
            if len(hay) >= length:
                break
        if len(hay) == before:
            raise ValueError("the texts around the needle are empty; name files with text in them")
    return hay[:length]


def _line_ends(tokenize: Tokenize) -> set[int]:
    """Tokens of a line's end."""
    return {list(tokenize(text))[-1] for text in ("\n", "a\n", "a.\n", ":\n")}
