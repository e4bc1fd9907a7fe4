"""The DFlash drafter: trees over a block, ring and sinks.

That a block is computed as published is in :mod:`.test_parity`, and that no token changes in
:mod:`tests.drafters.test_published`.
"""

import heapq
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Needs, Params
from longspec_jax.drafters.dflash import Confidence, DFlashDrafter, Markov
from longspec_jax.drafters.dflash2 import Convolution, Selector
from tests.decoding.lossless import CONFIG
from tests.drafters.dflash.toys import config_for, random_params
from tests.drafters.kit import extended, paths, proposed
from tests.kit import normal, view_of

KNOWN = np.sort(np.random.default_rng(0).permutation(CONFIG.vocab_size)[:60])
DFLASH = config_for(CONFIG, windows=(9, None), causal=(True, False))
CAUSAL = config_for(CONFIG, block=16, causal=(True, True))
DFLASH2 = config_for(
    CONFIG, block=6, windows=(9, None), convolution=Convolution(2, 4), selector=Selector(5, 7)
)
DSPARK = config_for(
    CONFIG,
    proposable=len(KNOWN),
    from_pending=True,
    markov=Markov(5, recurrent=True),
    confidence=Confidence(True),
)
WINDOW = DFlashDrafter(DSPARK, TreeConfig((2, 3, 4, 1)), window=6, sinks=2)
"""Fewer entries than most rows have, so that the ring wraps."""


def text() -> tuple[np.ndarray, ...]:
    """Tokens of two rows, where they start and how many count, and the target's hidden states."""
    tokens = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    hidden = [np.asarray(normal(seed, 2, 16, CONFIG.model_width)) for seed in range(3)]
    return tokens, np.zeros(2, np.int32), np.array([16, 4], np.int32), *hidden


@pytest.mark.parametrize("yarn", [None, 4.0])
def test_nodes_of_a_tree_are_chains_over_the_text_without_what_lies_between(
    yarn: float | None,
) -> None:
    """With the Markov head's state of their own path, and YaRN's factor once on every key.

    Of 16 entries the draft sees 0 and 1, then 10 to 15: those of the shorter text at 0 to 7.
    """
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    hidden = [np.asarray(normal(seed, 2, 16, CONFIG.model_width)) for seed in range(3)]
    params = Params(None, random_params(DSPARK, KNOWN))
    pending, lengths = KNOWN[[5, 50]].astype(np.int32), np.array([16, 5], np.int32)
    start = np.zeros(2, np.int32)
    config = DSPARK if yarn is None else DSPARK.stretched(yarn)
    window = replace(WINDOW, config=config)
    tree, heard = proposed(window, params, (tokens, start, lengths, *hidden), pending)
    long, kept = (lengths == 16)[:, None], np.array([0, 1, *range(10, 16)])
    shorter = np.where(long, tokens[:, kept], tokens[:, :8])
    states = [np.where(long[..., None], each[:, kept], each[:, :8]) for each in hidden]
    rows, leaves = np.repeat(np.arange(2), 4), np.tile(np.arange(6, 10), 2)
    parents, ids = np.asarray(tree.parents), np.asarray(tree.tokens)
    middle = parents[rows, leaves]
    paths = np.stack([parents[rows, middle], middle, leaves], axis=1)
    following = np.pad(np.searchsorted(KNOWN, ids[rows[:, None], paths]), ((0, 0), (0, 1)))
    chain = DFlashDrafter(config, TreeConfig((1,) * 4))
    block = (each[rows] for each in (shorter, start, np.minimum(lengths, 8), *states))
    _, expected = proposed(chain, params, tuple(block), pending[rows], following)
    first = np.array([1, 3, 6])
    for level, at in enumerate([0 * rows, *(paths - first).T]):
        found = np.asarray(heard[level])[rows, at]
        np.testing.assert_allclose(found, expected[level], atol=1e-4)
    assert len({*map(int, paths[:, 0])}) == 2, "both nodes of the first level are parents"


def test_a_tree_of_128_nodes_holds_the_best_sums_of_a_causal_blocks_rows() -> None:
    """Those that a heap finds, as JetSpec's engine builds its trees: and no worse than its own."""
    draft = random_params(CAUSAL)
    # Surer than random weights are, so that no level has more of the best nodes than its width.
    params = Params(None, replace(draft, head=9 * draft.head))
    block = text()
    drafter = DFlashDrafter(CAUSAL, TreeConfig((16,) * 15, budget=128))
    tree, heard = proposed(drafter, params, block, block[0][:, 0])
    logs = np.asarray(jax.nn.log_softmax(jnp.stack(heard)[:, :, 0]), np.float64)
    for row in range(2):
        best = best_first(logs[:, row], 128)
        per_level = np.bincount([len(path) for path in best])
        assert per_level.max() <= 16 and len(per_level) > 8
        assert paths(tree, row).keys() - {()} == best.keys()
        assert sum(np.exp([*best.values()])) >= expected_of_the_engine(logs[:, row], 7, 128)


def best_first(logs: np.ndarray, nodes: int) -> dict[tuple[int, ...], float]:
    """The best paths below the root by the sums of rows ``[levels, V]``, one at a time."""
    heap, found = [(0.0, ())], dict[tuple[int, ...], float]()
    while len(found) < nodes:
        worth, path = heapq.heappop(heap)
        found[path] = -worth
        if len(path) < len(logs):
            for token, log in enumerate(logs[len(path)]):
                heapq.heappush(heap, (worth - log, (*path, token)))
    del found[()]
    return found


def expected_of_the_engine(logs: np.ndarray, width: int, nodes: int) -> float:
    """Expected tokens of a tree that takes all ``width`` children of the best node at once."""
    heap, worths = [(0.0, 0)], list[float]()
    while len(worths) < nodes - 1:
        worth, depth = heapq.heappop(heap)
        if depth < len(logs):
            for log in np.sort(logs[depth])[::-1][: min(width, nodes - 1 - len(worths))]:
                worths.append(log - worth)
                heapq.heappush(heap, (worth - log, depth + 1))
    return float(np.exp(worths).sum())


def test_a_confidence_head_moves_nodes_to_where_slots_are_trusted() -> None:
    """A path is worth its probabilities times the confidence of every slot on it, by hand."""
    config = config_for(CONFIG, from_pending=True, markov=Markov(5), confidence=Confidence(True))
    draft = random_params(config)
    kernel = 3 * np.asarray(draft.confidence["kernel"])
    draft = replace(draft, confidence={"kernel": jnp.asarray(kernel), "bias": jnp.array([-0.5])})
    block = text()
    tokens = block[0]
    drafter = DFlashDrafter(config, TreeConfig((4, 5), budget=6))
    tree, heard = proposed(drafter, Params(None, draft), block, tokens[:, 0])

    @jax.jit
    def hidden_of_slots(draft: Any) -> jax.Array:
        params, none = Params(None, draft), jnp.zeros((2, 1, 8, 8))
        state = extended(drafter, params, drafter.begin(params, 2, 16), block)
        view = view_of(jnp.asarray(tokens[:, 0]), jnp.asarray(block[2]), none, none)
        return drafter._block(draft, state, view)

    slots = np.asarray(hidden_of_slots(draft), np.float64)
    table = np.asarray(draft.markov["embedding"], np.float64)

    def trust(row: int, slot: int, before: int) -> float:
        joint = np.concatenate([slots[row, slot], table[before]])
        return -float(np.log1p(np.exp(0.5 - joint @ kernel[0])))

    logs = [np.asarray(jax.nn.log_softmax(each), np.float64) for each in heard]
    for row in range(2):
        root = int(tokens[row, 0])
        first = logs[0][row, 0] + trust(row, 0, root)
        above = np.argsort(-first)[:4]
        worth = {(int(token),): first[token] for token in above}
        below = {
            (int(token), follower): first[token] + trust(row, 1, int(token)) + share
            for node, token in enumerate(above)
            for follower, share in enumerate(logs[1][row, node])
        }
        worth |= dict(sorted(below.items(), key=lambda path: -path[1])[:5])
        best = {*sorted(worth, key=lambda path: -worth[path])[:5]}
        assert paths(tree, row).keys() - {()} == best


def test_a_tree_of_dflash_2_holds_the_best_paths_over_edges() -> None:
    """What follows a node depends on its token, and the sums are those of all paths there are."""
    params = Params(None, random_params(DFLASH2))
    block = text()
    # All seven candidates are nodes of the first level.
    drafter = DFlashDrafter(DFLASH2, TreeConfig((7, 12)))
    tree, heard = proposed(drafter, params, block, block[0][:, 0])
    logs = [np.asarray(jax.nn.log_softmax(each), np.float64) for each in heard]
    for row in range(2):
        above = np.asarray(tree.tokens)[row, 1:8]
        assert not np.allclose(logs[1][row, 0], logs[1][row, 1]), "no edge is that of another"
        sums = {
            (int(token), follower): logs[0][row, 0, token] + share
            for node, token in enumerate(above)
            for follower, share in enumerate(logs[1][row, node])
        }
        best = {*sorted(sums, key=lambda path: -sums[path])[:12]}
        assert {path for path in paths(tree, row) if len(path) == 2} == best


def test_what_is_needed_and_what_cannot_be() -> None:
    hidden = (-1, 0, 1)
    assert DFlashDrafter(DFLASH).needs == Needs(hidden)
    sliding = config_for(CONFIG, windows=(9, 7))
    assert DFlashDrafter(sliding).needs == Needs(hidden, recent=9)
    assert DFlashDrafter(sliding, window=8).needs == Needs(hidden, recent=8)
    assert DFlashDrafter(DFLASH, window=20).needs == Needs(hidden, recent=20)
    assert DFlashDrafter(DFLASH, window=20, sinks=3).needs == Needs(hidden, recent=20, first=3)
    with pytest.raises(ValueError, match="4 levels is deeper .* proposes 3 tokens"):
        DFlashDrafter(DFLASH, TreeConfig((1,) * 4))
