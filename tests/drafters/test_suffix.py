"""Suffix decoding against counts by a plain search in Python."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.ngram import NgramState
from longspec_jax.drafters.suffix import FEW, LONGEST, PLACES, SuffixDrafter
from tests.drafters.kit import paths
from tests.kit import each_row

NONE = Params(None, ())
SLOTS = 64
TREE = "6,6,6,6@12"
WIDE = "32,32,32,32@12"


def proposed(texts: list[list[int]], own: bool = False, tree: str = TREE) -> Any:
    """The tree below the last token of every text."""
    tokens = np.full((len(texts), SLOTS), 1, np.int32)  # What is not written yet may be anything.
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text) - 1] = text[:-1]
    last = np.array([len(text) - 1 for text in texts])
    pending = np.array([text[-1] for text in texts], np.int32)
    return _proposed(SuffixDrafter(TreeConfig.parse(tree), own), tokens, pending, last)


@partial(jax.jit, static_argnums=0)
def _proposed(drafter: SuffixDrafter, tokens: Any, pending: Any, last: Any) -> Any:
    view: Any = SimpleNamespace(pending=pending, position=last)
    noise: Any = None
    # Past the annotations: a view of nothing but its pending tokens.
    propose = getattr(SuffixDrafter.propose, "__wrapped__", SuffixDrafter.propose)
    return propose(drafter, NONE, NgramState(tokens), view, noise)


def searched(texts: list[list[int]], row: int, levels: int) -> dict[tuple[int, ...], float]:
    """How likely every path is, by counting whole texts."""
    text = texts[row]
    places = []
    for other, each in enumerate(texts):
        for end in range(len(each) - (other == row)):
            length = 0
            while (
                length < min(LONGEST, end + 1, len(text))
                and each[end - length] == text[-1 - length]
            ):
                length += 1
            following = each[end + 1 :] * levels if other == row else each[end + 1 :]
            places += [(length, following[:levels])] * (length > 0)
    assert len(places) <= PLACES
    best, chosen = (-1.0, 0), {}
    for length in {length for length, _ in places}:
        group = [following for matched, following in places if matched >= length]
        counts = Counter(tuple(f[: d + 1]) for f in group for d in range(len(f)))
        share = {path: count / len(group) for path, count in counts.items()}
        most = [
            max([p for path, p in share.items() if len(path) == d + 1], default=0)
            for d in range(min(length, levels))
        ]
        if (promise := (round(sum(most), 3), length)) > best:
            best, chosen = promise, share
    counts = Counter(tuple(f[: d + 1]) for _, f in places for d in range(len(f)))
    return {path: chosen.get(path, 0) + FEW / PLACES * n for path, n in counts.items()}


@each_row("own", [False, True])
def test_counts_by_search(own: bool) -> None:
    """The twelve nodes are the most likely paths of all texts; equal ones in any order."""
    random = np.random.default_rng(0)
    for lengths in ((40, 17, 60), (1, 3, 9), (33, 64, 5)):
        texts = [list(map(int, random.integers(2, 9, length))) for length in lengths]
        texts[1][-2:] = texts[2][2:4]
        tree = proposed(texts, own, WIDE)  # No level is too narrow.
        for row in range(3):
            likely = searched(texts if not own else [texts[row]], 0 if own else row, 4)
            found = paths(tree, row).keys() - {()}
            limit = sorted(likely.values(), reverse=True)[: len(found)]
            np.testing.assert_allclose(sorted((likely[p] for p in found), reverse=True), limit)
            assert len(found) == min(11, len(likely))


def test_no_path_crosses_from_text_to_text() -> None:
    """No match spans two texts side by side, and nothing follows the end of one."""
    tree = proposed([[7, 8], [5, 7], [8, 9, 6, 5]])
    assert paths(tree, 0).keys() == {(), (9,), (9, 6), (9, 6, 5)}
    assert paths(tree, 1).keys() == {(), (8,)}
    assert paths(tree, 2).keys() == {(), (7,)}


def test_the_match_that_promises_most_leads() -> None:
    """A long match of one place before a short one of many; a short one may draft less."""
    often = [1, 2, 9, 1, 2, 9, 1, 2, 9]
    longer = [4, 5, 6, 1, 2, 3, 7, 7, *often, 4, 5, 6, 1, 2]
    shorter = [6, 1, 2, 3, 7, 7, *often, 4, 4, 6, 1, 2]
    tree = proposed([longer, shorter[1:], [3]], True, "chain:4")
    np.testing.assert_array_equal(tree.tokens[0], [2, 3, 7, 7, 1])
    np.testing.assert_array_equal(tree.tokens[1], [2, 9, 1, 2, 9])
