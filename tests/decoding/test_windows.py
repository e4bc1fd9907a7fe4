"""Layers with windows: rings of slots, and text that is the same however it is decoded.

The oracle is one dense pass over the whole text, whose windows are masks of positions.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import LayerConfig, Rotary
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.retrieval.blocks import Quest
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.ops.selection.blocks import BlockBudget
from tests.decoding.lossless import (
    SHORT,
    assert_a_trial_changes_nothing,
    assert_lossless,
    assert_rows_come_and_go,
    dense,
    generate,
    prompts,
    request,
)
from tests.kit import TOLERANCE, draft_params, random_draft, random_target, tiny_target_config

W = 7
CONFIG = tiny_target_config(
    architecture="Gemma3ForCausalLM",
    num_layers=4,
    rope_theta=1e6,
    qk_norm=True,
    post_norms=True,
    offset_norms=True,
    gelu=True,
    embedding_factor=6.0,
    attention_scale=0.3,
    attention_cap=3.0,
    logit_cap=8.0,
    kinds=(LayerConfig(Rotary(1e4), window=W), LayerConfig(Rotary(1e6))),
    pattern=(0, 1, 1, 0),
)
"""As of Gemma 3, with Gemma 2's caps: the last layer has a window, drafts read the one before."""
TARGET = TargetModel(CONFIG)
RING = cache_lib.ring_slots(W)
LENGTHS = np.array([61, 30, 1], np.int32)
NEW = np.array([50, 40, 30], np.int32)
PROMPTS = prompts(CONFIG.vocab_size, LENGTHS)
MIXED: Request = request((0.0, 0.7, 1.0), new=NEW)
GIVEN = PROMPTS, LENGTHS, MIXED
DRAFT = DraftConfig.for_target(CONFIG, window=11)


@pytest.fixture(scope="module")
def models() -> Params:
    """A random target, and a draft of which part is the target's own taste."""
    target = random_target(CONFIG)
    return Params(target, draft_params(random_draft(DRAFT), target))


@pytest.fixture(scope="module")
def plain(models: Params) -> list[np.ndarray]:
    """The text of plain decoding."""
    return generate(TARGET, NoDraft(), models, *GIVEN)[0]


def test_a_ring_holds_the_window_of_every_row() -> None:
    """After chunks longer than it, of which rows own some tokens, and commits in some rows."""
    assert RING == 40 and RING >= W - 1 + MAX_TREE_LEVELS + 1
    random, lengths = np.random.default_rng(0), np.array([97, 35, 0, 60])
    text = random.normal(size=(2, 4, 4, 160, 2, 6)).astype(np.float32)
    cache = cache_lib.allocate(CONFIG, 4, 160)
    assert [keys.shape[2] for keys in cache.keys] == [RING, 160, 160, RING]
    append = jax.jit(lambda cache, rows, at, count: cache.append(*rows, at, count))

    def rows_of(part: np.ndarray) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(map(jnp.asarray, layers)) for layers in part)

    for offset in range(0, 128, 64):
        count = np.clip(lengths - offset, 0, 64)
        chunk = text[:, :, :, offset : offset + 64].copy()
        for row, own in enumerate(count):
            chunk[:, :, row, own:] = 99.0
        cache = append(cache, rows_of(chunk), jnp.full(4, offset), jnp.asarray(count))
    commit = jax.jit(lambda cache, rows, path, at: cache.commit(*rows, path, at))
    for _ in range(3):
        path = random.permuted(np.tile(np.arange(33), (2, 1)), axis=1)
        live, tree = [3, 0], np.full((2, 4, 2, 33, 2, 6), 99.0, np.float32)
        for row, (slot, order) in enumerate(zip(live, path, strict=True)):
            at = lengths[slot]
            tree[:, :, row, order[:5]] = text[:, :, slot, at : at + 5]
        some = dataclasses.replace(cache, cache_rows=jnp.asarray(live))
        some = commit(some, rows_of(tree), jnp.asarray(path), jnp.asarray(lengths[live]))
        cache, lengths[live] = dataclasses.replace(some, cache_rows=None), lengths[live] + 5
    for part, layers in enumerate((cache.keys, cache.values)):
        for index, layer in enumerate(layers):
            for row, length in enumerate(lengths):
                window = length if index in (1, 2) else min(length, W)
                at = np.arange(length - window, length)
                found = np.asarray(layer)[row, :, at % layer.shape[2]]
                np.testing.assert_array_equal(found, text[part, index, row, at])


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_the_bytes_of_rings_are_known(offload: bool) -> None:
    target = TargetModel(CONFIG, offload=offload)
    cache, planned = target.allocate(3, 160), target.cache_bytes(3, 160)
    row = 3 * 2 * CONFIG.num_kv_heads * CONFIG.head_width * 4
    assert tree_bytes(cache) == (2 * 160 + 2 * RING) * row
    # A layer that is moved is on the device for a time, too.
    assert planned.device == tree_bytes(cache)
    assert planned.host == (160 * row if offload else 0)


def test_trees_deeper_than_the_window_see_their_own_paths(models: Params) -> None:
    """Behind a prompt that wrapped the ring, and one that did not fill the window."""
    length, random = np.array([61, 4]), np.random.default_rng(1)
    cache, params = TARGET.allocate(2, 96), models.target
    prefill, logits = jax.jit(TARGET.prefill_chunk), jnp.zeros(())
    for offset in range(0, 64, 16):
        start, last = jnp.full(2, offset), jnp.asarray(length - 1 - offset)
        chunk = jnp.pad(jnp.asarray(PROMPTS[:2]), ((0, 0), (0, 3)))[:, offset : offset + 16]
        logits, cache, *_ = prefill(params, cache, chunk, start, last)
    parents = np.array([-1, *range(10), 2, 11, 0, 13])
    nodes = len(parents)
    mask, depth = np.eye(nodes, dtype=bool), np.zeros(nodes, int)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
        depth[node] = depth[parents[node]] + 1
    tokens = random.integers(0, CONFIG.vocab_size, (2, nodes)).astype(np.int32)
    found = jax.jit(partial(TARGET.verify, levels=10))(
        *(params, cache, jnp.asarray(tokens), jnp.asarray(length[:, None] + depth)),
        *(jnp.broadcast_to(mask, (2, nodes, nodes)), jnp.asarray(length)),
    )
    for node in (0, 5, 10, 12, 14):
        path = tokens[:, mask[node]]
        text, ends = np.zeros((2, 80), np.int32), length + path.shape[1]
        for row, end in enumerate(ends):
            text[row, :end] = [*PROMPTS[row, : length[row]], *path[row]]
        expected = np.asarray(dense(CONFIG, params, text))[[0, 1], ends - 1]
        error = np.abs(found.logits[:, node] - expected).max()
        assert error <= 20 * TOLERANCE["float32"], (node, error)
        assert np.abs(expected).max() > 1
    expected = np.asarray(dense(CONFIG, params, text))[0, 60]
    np.testing.assert_allclose(logits[0], expected, atol=20 * TOLERANCE["float32"])


def test_plain_decoding_is_the_dense_model(models: Params, plain: list[np.ndarray]) -> None:
    """The greedy row draws the largest logit at every one of its fifty tokens."""
    text = np.zeros((1, 111), np.int32)
    text[0] = [*PROMPTS[0], *plain[0]]
    logits = np.asarray(dense(CONFIG, models.target, text))[0, 60:110]
    np.testing.assert_array_equal(logits.argmax(axis=1), plain[0])
    assert len(set(plain[0].tolist())) > 5


SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)
LONGSPEC = LongSpecDrafter(DRAFT, TreeConfig((2,) + (1,) * 8))
"""Its trees are deeper than the window."""


def test_retrieved_blocks_change_no_token(models: Params, plain: list[np.ndarray]) -> None:
    """They are chosen in the layers without a window, and of these alone."""
    inner = LongSpecDrafter(DRAFT, TreeConfig((3, 2)))
    drafter = Hierarchy(inner, Quest(CONFIG, SOME), TreeConfig((1,) * 7))
    assert drafter.needs.keys == CONFIG.full_layers == (1, 2)
    assert_lossless(TARGET, drafter, models, *GIVEN, plain)


def test_nor_does_a_cache_in_the_hosts_memory(models: Params, plain: list[np.ndarray]) -> None:
    """Of which spans are read in place, layer by layer; rings stay on the device."""
    target, drafter = TargetModel(CONFIG, offload=True), StreamingDrafter(TreeConfig((3, 2)), SHORT)
    state = assert_lossless(target, drafter, models, *GIVEN, plain)
    kinds = [leaf.sharding.memory_kind for leaf in state.rows.cache.keys]
    assert kinds == ["device", "pinned_host", "device", "device"]


def test_a_trial_that_shares_the_cache_leaves_the_window_as_it_was(
    models: Params, plain: list[np.ndarray]
) -> None:
    """Though it goes on for longer than the slots that a ring has beside the window."""
    assert_a_trial_changes_nothing(TARGET, LONGSPEC, models, GIVEN, plain, 45)


def test_rows_that_come_and_go_share_prefixes_by_the_hosts_memory(
    models: Params, plain: list[np.ndarray]
) -> None:
    """Five requests in two slots, one of them cancelled. Slots alone share nothing.

    The first prompt returns with the chunks that the host kept, and the window is among them.
    """
    assert_rows_come_and_go(TARGET, LONGSPEC, models, *GIVEN, plain)
