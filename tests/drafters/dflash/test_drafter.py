"""The DFlash drafter: trees over a block, ring and sinks, and that it changes no token.

That a block is computed as published is in :mod:`.test_parity`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config import TreeConfig
from longspec_jax.decoding.engine import Engine
from longspec_jax.decoding.target import CachedTarget
from longspec_jax.drafters.base import Committed, Features, Needs, NoDraft, Params
from longspec_jax.drafters.dflash.config import Confidence, Markov
from longspec_jax.drafters.dflash.drafter import DFlashDrafter
from longspec_jax.sharding import partition_spec, path_name
from tests.decoding.lossless import (
    CONFIG,
    EVERY,
    LENGTHS,
    assert_same,
    emitted_in_rounds,
    generate,
    prompts,
    run,
)
from tests.drafters.dflash.toys import config_for, random_params
from tests.drafters.eagle3.test_drafter import Listening
from tests.drafters.eagle3.test_parity import Given
from tests.kit import normal, random_target, relative_error, view_of

TARGET = CachedTarget(CONFIG)
MODEL = random_target(CONFIG)
TEXT = prompts(CONFIG.vocab_size)
KNOWN = np.sort(np.random.default_rng(0).permutation(CONFIG.vocab_size)[:60])
DFLASH = config_for(CONFIG, windows=(9, None), causal=(True, False))
DSPARK = config_for(
    CONFIG,
    proposable=len(KNOWN),
    from_pending=True,
    markov=Markov(5, recurrent=True),
    confidence=Confidence(True),
)
WHOLE = DFlashDrafter(DFLASH, TreeConfig((4, 5, 3), budget=9))
WINDOW = DFlashDrafter(DSPARK, TreeConfig((2, 3, 4, 1)), window=6, sinks=2)
"""Fewer entries than most rows have, so that the ring wraps."""


@pytest.fixture(scope="module")
def plain() -> list[list[np.ndarray]]:
    """What plain decoding emits for every request."""
    none = Params(MODEL, ())
    return [generate(TARGET, NoDraft(), none, TEXT, LENGTHS, req)[0] for req in EVERY]


def test_no_token_changes(plain: list[list[np.ndarray]]) -> None:
    """And what rounds commit is what a prefill of the whole text would have made."""
    params = Params(MODEL, random_params(DFLASH))
    runs = [generate(TARGET, WHOLE, params, TEXT, LENGTHS, req) for req in EVERY]
    for expected, (found, state) in zip(plain, runs, strict=True):
        assert_same(found, expected)
        assert emitted_in_rounds(state) > 0
    rows, state = runs[-1]
    texts = [[*TEXT[b, : LENGTHS[b]], *row[:-1]] for b, row in enumerate(rows)]
    lengths = np.array([len(text) for text in texts], np.int32)
    padded = np.zeros((3, lengths.max()), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    single = replace(EVERY[-1], max_new_tokens=jnp.ones(3, jnp.int32))
    _, whole = generate(TARGET, WHOLE, params, padded, lengths, single)
    np.testing.assert_array_equal(state.rows.length, lengths)
    slots = 9, 128
    for ours, theirs, seen in zip(
        state.rows.draft.layers, whole.rows.draft.layers, slots, strict=True
    ):
        for b, length in enumerate(np.minimum(lengths, seen)):
            for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                np.testing.assert_allclose(mine[b, :, :length], other[b, :, :length], atol=1e-4)


def test_slots_and_a_window_change_no_token(plain: list[list[np.ndarray]]) -> None:
    """Three requests pass through two slots, their prompts in chunks beside the rounds."""
    params = Params(MODEL, random_params(DSPARK, KNOWN))
    sizes: dict[str, Any] = dict(slots=2, capacity=64, chunk=8, stop_width=1)
    engine = Engine(TARGET, [WINDOW], params, streams=False, **sizes)
    for req in EVERY:
        host = jax.device_get(req)
        for row, length in enumerate(LENGTHS):
            engine.submit(TEXT[row, :length], host.row(row))
    rows, state = run(engine, 9)
    for turn, expected in enumerate(plain):
        assert_same(rows[3 * turn : 3 * turn + 3], expected)
    assert emitted_in_rounds(state) > 0


@partial(jax.jit, static_argnums=0)
def _extended(drafter: DFlashDrafter, params: Any, state: Any, block: Any) -> Any:
    tokens, start, count, *hidden = block
    features = Features(dict(zip(drafter.config.features, hidden, strict=True)))
    return drafter.extend(params, state, Committed(tokens, start, count, features))


@partial(jax.jit, static_argnums=0)
def _proposed(
    drafter: DFlashDrafter, params: Params, block: Any, pending: Any, following: Any = None
) -> Any:
    """A tree behind a text, and the logits at the nodes of every level."""
    rows, slots = block[0].shape
    state = _extended(drafter, params, drafter.begin(params, rows, slots), block)
    none = jnp.zeros((rows, 1, 8, 8))
    noise = Listening(None, []) if following is None else Given(following, [])
    tree = drafter.propose(params, state, view_of(pending, block[2], none, none), noise)
    return tree, noise.heard


def test_nodes_of_a_tree_are_chains_over_the_text_without_what_lies_between() -> None:
    """With the Markov head's state of their own path.

    Of 16 entries the draft sees 0 and 1, then 10 to 15: those of the shorter text at 0 to 7.
    """
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    hidden = [np.asarray(normal(seed, 2, 16, CONFIG.model_width)) for seed in range(3)]
    params = Params(None, random_params(DSPARK, KNOWN))
    pending, lengths = KNOWN[[5, 50]].astype(np.int32), np.array([16, 5], np.int32)
    start = np.zeros(2, np.int32)
    tree, heard = _proposed(WINDOW, params, (tokens, start, lengths, *hidden), pending)
    long, kept = (lengths == 16)[:, None], np.array([0, 1, *range(10, 16)])
    shorter = np.where(long, tokens[:, kept], tokens[:, :8])
    states = [np.where(long[..., None], each[:, kept], each[:, :8]) for each in hidden]
    rows, leaves = np.repeat(np.arange(2), 4), np.tile(np.arange(6, 10), 2)
    parents, ids = np.asarray(tree.parents), np.asarray(tree.tokens)
    middle = parents[rows, leaves]
    paths = np.stack([parents[rows, middle], middle, leaves], axis=1)
    following = np.pad(np.searchsorted(KNOWN, ids[rows[:, None], paths]), ((0, 0), (0, 1)))
    chain = DFlashDrafter(DSPARK, TreeConfig((1,) * 4))
    block = (each[rows] for each in (shorter, start, np.minimum(lengths, 8), *states))
    _, expected = _proposed(chain, params, tuple(block), pending[rows], following)
    first = np.array([1, 3, 6])
    for level, at in enumerate([0 * rows, *(paths - first).T]):
        found = np.asarray(heard[level])[rows, at]
        np.testing.assert_allclose(found, expected[level], atol=1e-4)
    assert len({*map(int, paths[:, 0])}) == 2, "both nodes of the first level are parents"


def test_a_tree_holds_the_best_paths_of_the_slots() -> None:
    """Whose sums of log-probabilities are the highest of all paths, without a Markov head."""
    params = Params(None, random_params(DFLASH))
    tokens = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, 16)).astype(np.int32)
    hidden = [np.asarray(normal(seed, 2, 16, CONFIG.model_width)) for seed in range(3)]
    block = tokens, np.zeros(2, np.int32), np.array([16, 4], np.int32), *hidden
    drafter = DFlashDrafter(DFLASH, TreeConfig((12, 12)))
    tree, heard = _proposed(drafter, params, block, tokens[:, 0])
    logs = np.asarray(jax.nn.log_softmax(jnp.stack(heard)[:, :, 0]), np.float64)
    for b in range(2):
        sums = logs[0, b][:, None] + logs[1, b]
        best = np.argsort(-sums, axis=None)[:12]
        found = np.asarray(tree.tokens)[b, 13:]
        above = np.asarray(tree.tokens)[b, np.asarray(tree.parents)[b, 13:]]
        assert {*zip(above.tolist(), found.tolist(), strict=True)} == {
            divmod(int(each), CONFIG.vocab_size) for each in best
        }


def test_what_is_needed_and_what_cannot_be() -> None:
    hidden = (-1, 0, 1)
    assert WHOLE.needs == Needs(hidden)
    sliding = config_for(CONFIG, windows=(9, 7))
    assert DFlashDrafter(sliding).needs == Needs(hidden, recent=9)
    assert DFlashDrafter(sliding, window=8).needs == Needs(hidden, recent=8)
    assert DFlashDrafter(DFLASH, window=20).needs == Needs(hidden, recent=20)
    assert DFlashDrafter(DFLASH, window=20, sinks=3).needs == Needs(hidden, recent=20, first=3)
    with pytest.raises(ValueError, match="4 levels is deeper .* proposes 3 tokens"):
        DFlashDrafter(DFLASH, TreeConfig((1,) * 4))


def test_8_bits_and_meshes() -> None:
    """Rounded weights compute nearly the same, and every parameter has a rule of partition."""
    params = random_params(DSPARK, KNOWN)
    rounded = params.in_int8()
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (8, 8)).astype(np.int32)
    hidden = [np.asarray(normal(seed, 8, 8, CONFIG.model_width)) for seed in range(3)]
    # Of the shapes of the chains above, whose program serves again.
    block = tokens, np.zeros(8, np.int32), np.full(8, 8, np.int32), *hidden
    chain, following = DFlashDrafter(DSPARK, TreeConfig((1,) * 4)), np.zeros((8, 4), np.int64)
    (_, exact), (_, near) = (
        _proposed(chain, Params(None, each), block, KNOWN[:8].astype(np.int32), following)
        for each in (params, rounded)
    )
    assert 0 < relative_error(near[3], exact[3]) < 0.05
    for each in (params, rounded):
        tables = {
            name: getattr(each, name)
            for name in ("layer", "head", "embedding", "markov", "confidence")
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(tables):
            assert len(partition_spec(path_name(path))) <= leaf.ndim
