"""Prompt lookup against a plain search in Python, and the trees it makes of what it finds."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.ngram import (
    CONTEXT,
    EXACT,
    NgramDrafter,
    NgramState,
    best_places,
    match_lengths,
)
from tests.drafters.kit import paths
from tests.kit import each_row

NONE = Params(None, ())


def proposed(texts: list[list[int]], tree: str) -> Any:
    """The tree below the last token of every text."""
    last = np.array([len(text) - 1 for text in texts])
    tokens = np.full((len(texts), 64), 9, np.int32)  # What is not written yet may be anything.
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text) - 1] = text[:-1]
    pending = np.array([text[-1] for text in texts], np.int32)
    return _proposed(NgramDrafter(TreeConfig.parse(tree)), tokens, pending, last)


@partial(jax.jit, static_argnums=0)
def _proposed(drafter: NgramDrafter, tokens: Any, pending: Any, last: Any) -> Any:
    view: Any = SimpleNamespace(pending=pending, position=last)
    noise: Any = SimpleNamespace(chances=lambda likely, tokens: likely)
    # Past the annotations: a view of nothing but its pending tokens.
    propose, offer = (unchecked(getattr(NgramDrafter, name)) for name in ("propose", "offer"))
    state = replace(drafter.begin(NONE, *tokens.shape), row=NgramState(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramDrafter, "offer", offer)
        return propose(drafter, NONE, state, view, noise)


def unchecked(method: Any) -> Any:
    """A method without the check of its annotations."""
    return getattr(method, "__wrapped__", method)


@each_row("slots", [5, 5000, EXACT // (CONTEXT + 1)])
def test_the_longest_matches_and_of_them_the_latest(slots: int) -> None:
    """Up to the longest text for which matches are compared as real numbers."""
    matched = np.random.default_rng(0).integers(0, CONTEXT + 1, (2, slots))
    places, lengths = jax.jit(best_places, static_argnums=1)(jnp.asarray(matched), 8)
    expected = np.lexsort((np.arange(slots) + 0 * matched, matched), axis=1)[:, ::-1][:, :8]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(lengths, np.take_along_axis(matched, expected, axis=1))


def test_match_lengths_by_search() -> None:
    random = np.random.default_rng(0)
    text, last = random.integers(0, 3, (5, 40)), np.array([39, 12, 0, 1, 30])
    found = jax.jit(match_lengths)(jnp.asarray(text), jnp.asarray(last))
    for b in range(5):
        for slot in range(40):
            length = 0
            while (
                slot < last[b]
                and length < CONTEXT
                and slot - length >= 0
                and text[b, slot - length] == text[b, last[b] - length]
            ):
                length += 1
            assert found[b, slot] == length, (b, slot)


def test_the_longest_match_is_continued() -> None:
    #       a longer context ...       a later one that matches less  the end
    text = [5, 6, 7, 1, 2, 3, 8, 8, 8, 4, 7, 1, 0, 0, 0, 5, 6, 7, 1]
    assert (2, 3, 8) in paths(proposed([text], "chain:3"), 0)
    assert paths(proposed([text], "2,2,2"), 0).keys() >= {(2, 3, 8), (0, 0, 0)}


def test_rows_are_looked_up_each_in_itself() -> None:
    one, other = [1, 2, 3, 4, 1, 2], [1, 2, 7, 7, 7, 7, 7, 1, 2]
    tree = proposed([one, other], "chain:2")
    assert (3, 4) in paths(tree, 0) and (7, 7) in paths(tree, 1)


def test_a_period_goes_on_past_the_end() -> None:
    assert (2, 3, 1, 2, 3) in paths(proposed([[9, 1, 2, 3, 1, 2, 3, 1]], "chain:5"), 0)
    assert (4, 4, 4, 4) in paths(proposed([[1, 4, 4]], "chain:4"), 0)


def test_paths_with_a_common_beginning_share_it() -> None:
    text = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3, 4, 0, 1, 2]
    tree = proposed([text], "2,2,2")
    assert paths(tree, 0).keys() == {(), (3,), (3, 4), (3, 5), (3, 4, 0), (3, 5, 0)}


def test_nodes_that_repeat_others_have_no_parent() -> None:
    """A walk takes the first child that carries the token; there must be no other."""
    tree = proposed([[1, 2, 1, 2, 1, 2, 1]], "4,4")
    parents, tokens = np.asarray(tree.parents[0]), np.asarray(tree.tokens[0])
    reached = [(int(p), int(t)) for p, t in zip(parents, tokens, strict=True) if p >= 0]
    assert len(reached) == len(set(reached)) == 2


@each_row("text", [[3], [3, 4], [1, 2, 3, 4, 5]])
def test_nothing_to_look_up(text) -> None:
    assert paths(proposed([text], "3,3"), 0).keys() == {()}


def test_a_budget_keeps_what_is_trusted_most() -> None:
    text = [5, 6, 7, 1, 2, 3, 8, 8, 8, 4, 7, 1, 0, 0, 0, 5, 6, 7, 1]
    assert paths(proposed([text], "4,4,4@4"), 0).keys() == {(), (2,), (2, 3), (2, 3, 8)}
