"""The EAGLE-3 drafter: trees, ring and sinks, what a round commits, and that it changes no token.

That a chain is computed as published is in :mod:`.test_parity`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.drafters.retrieval.working_cache import WorkingCache
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding.lossless import CONFIG, EVERY, LENGTHS, TRANSFORMER
from tests.drafters.eagle3.toys import config_for, random_params
from tests.drafters.kit import proposed
from tests.kit import normal

KNOWN = np.sort(np.random.default_rng(0).permutation(CONFIG.vocab_size)[:60])
DRAFT = config_for(CONFIG, proposable=len(KNOWN))


WHOLE = Eagle3Drafter(DRAFT, TreeConfig((4, 5, 3), budget=9))
WINDOW = Eagle3Drafter(DRAFT, TreeConfig((2, 3, 1)), window=6, sinks=2)
"""Fewer entries than most rows have, so that the ring wraps."""


def test_no_token_changes() -> None:
    """And what rounds commit is what a prefill of the whole text would have made."""
    draft = random_params(DRAFT, KNOWN)
    # Which of its rows stands for which token does not matter: each is scored with its own noise.
    order = np.random.default_rng(1).permutation(len(KNOWN))
    turned = replace(draft, head=draft.head[order], vocabulary=jnp.asarray(KNOWN[order]))
    states, others = (TRANSFORMER.drafted(WHOLE, each, EVERY) for each in (draft, turned))
    for state, other in zip(states, others, strict=True):
        np.testing.assert_array_equal(other.record.histogram, state.record.histogram)
    texts = [TRANSFORMER.text(row, EVERY[-1]) for row in range(3)]
    lengths = np.array([len(text) for text in texts], np.int32)
    padded = np.zeros((3, lengths.max()), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    single = replace(EVERY[-1], max_new_tokens=jnp.ones(3, jnp.int32))
    _, whole = replace(TRANSFORMER, tokens=padded, lengths=lengths).run(WHOLE, draft, single)
    state = states[-1]
    np.testing.assert_array_equal(state.rows.length, lengths)
    ours, theirs = state.rows.draft, whole.rows.draft
    np.testing.assert_allclose(ours.feature, theirs.feature, atol=1e-4)
    for b, length in enumerate(lengths - 1):
        for mine, other in (
            (ours.entries.cache.keys[0], theirs.entries.cache.keys[0]),
            (ours.entries.cache.values[0], theirs.entries.cache.values[0]),
        ):
            np.testing.assert_allclose(mine[b, :, :length], other[b, :, :length], atol=1e-4)


def test_a_working_cache_changes_no_token() -> None:
    """Nor, where it holds all tokens, a round; they are chosen again in every one."""
    draft = random_params(DRAFT, KNOWN)
    drafter = replace(WHOLE, working=WorkingCache(BlockBudget(64, 8, 8, 8), CONFIG))
    [state], [all_read] = (TRANSFORMER.same(each, draft, EVERY[:1]) for each in (drafter, WHOLE))
    assert state.rows.draft.choice.length.max() > LENGTHS.max()
    np.testing.assert_array_equal(state.record.histogram, all_read.record.histogram)


def test_what_is_read_of_a_working_cache() -> None:
    """Entry i by the choice of token i. The last token has none: a block of only it is empty."""
    working = WorkingCache(BlockBudget(24, 8, 8, 8), CONFIG)
    drafter = replace(WHOLE, working=working)
    state = drafter.begin(Params(None, None), 3, 61)
    slots = jnp.arange(64.0)[:, None]
    cache = state.entries.cache
    keys = jnp.broadcast_to(slots, cache.keys[0].shape)
    assert state.choice is not None
    choice = replace(
        state.choice,
        blocks=jnp.array([[0, 2, 4], [0, 3, 4], [0, 0, 0]]),
        length=jnp.array([33, 33, 0]),
    )
    state = replace(
        state, entries=replace(state.entries, cache=replace(cache, keys=(keys,))), choice=choice
    )
    past = drafter.past(state, jnp.array([32, 42, 19]))
    read = [past.keys[b, 0, : int(past.length[b]), 0].astype(int).tolist() for b in range(3)]
    first = [*range(8)]
    assert read == [[*first, *range(16, 24)], [*first, *range(24, 42)], [*range(19)]]


@pytest.fixture(scope="module")
def text() -> tuple[np.ndarray, list[jax.Array]]:
    """Tokens ``[2, 16]`` and the target's hidden states at them."""
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    return tokens, [normal(seed, 2, 16, CONFIG.model_width) for seed in range(3)]


def test_sinks_and_ring_are_the_text_without_what_lies_between(
    text: tuple[np.ndarray, list[jax.Array]],
) -> None:
    """At every node of a tree, as a chain computes it that goes there and sees all of its text.

    Of 15 entries the draft sees 0 and 1, then 9 to 14: those of the shorter text at 0 to 7.
    """
    tokens, hidden = text[0], [np.asarray(each) for each in text[1]]
    params = Params(None, random_params(DRAFT, KNOWN))
    pending, lengths = KNOWN[[5, 50]].astype(np.int32), np.array([16, 5], np.int32)
    start = np.zeros(2, np.int32)
    tree, heard = proposed(WINDOW, params, (tokens, start, lengths, *hidden), pending)
    # Entry i is made of feature i and token i + 1.
    kept, known = np.array([0, 1, 2, *range(10, 16)]), np.array([0, 1, *range(9, 16)])
    shorter = np.where(lengths[:, None] == 16, tokens[:, kept], tokens[:, :9])
    states = [
        np.where(
            (lengths == 16)[:, None, None], np.asarray(each)[:, known], np.asarray(each)[:, :9]
        )
        for each in hidden
    ]
    paths = np.array([[int(tree.parents[b, node]), node] for b in range(2) for node in (3, 4, 5)])
    rows = np.repeat(np.arange(2), 3)
    below = np.asarray(tree.tokens)[rows[:, None], paths]
    following = np.pad(np.searchsorted(KNOWN, below), ((0, 0), (0, 1)))
    chain = Eagle3Drafter(DRAFT, TreeConfig((1, 1, 1)))
    length = np.minimum(lengths, 9)
    block = (each[rows] for each in (shorter, start, length, *states))
    _, expected = proposed(chain, params, tuple(block), pending[rows], following)
    np.testing.assert_allclose(np.asarray(heard[0])[rows, 0], expected[0], atol=1e-4)
    np.testing.assert_allclose(np.asarray(heard[1])[rows, paths[:, 0] - 1], expected[1], atol=1e-4)
    np.testing.assert_allclose(np.asarray(heard[2])[rows, paths[:, 1] - 3], expected[2], atol=1e-4)
    assert len({*map(int, paths[:3, 0])} | {*map(int, paths[3:, 0])}) == 2, "both are parents"
