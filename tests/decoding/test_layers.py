"""Layers with windows, states, sinks or experts: text that is the same however it is decoded.

The oracle is one dense pass over the whole text, whose windows are masks of positions, whose sinks
are keys, and whose recurrence is its definition, token by token.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.target import TargetConfig
from longspec_jax.config.tree import MAX_TREE_LEVELS, TreeConfig
from longspec_jax.decoding import cache as cache_lib
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.dflash import DFlashDrafter
from longspec_jax.drafters.eagle3 import Eagle3Drafter
from longspec_jax.drafters.joined import Joined
from longspec_jax.drafters.longspec import LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.peagle import PEagleDrafter
from longspec_jax.drafters.retrieval.hierarchy import PartialVerifier
from longspec_jax.drafters.retrieval.selection import Quest, SinksAndRecent
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.ops.recurrence.operands import RecurrentState
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.sharding import make_mesh, param_shardings
from tests.decoding.layers import GEMMA4, GPT_OSS, LENGTHS, RECURRENT, SIZES, WINDOWS, Family, W
from tests.decoding.lossless import (
    SHORT,
    assert_lossless,
    assert_rows_come_and_go,
    assert_same,
    dense,
    generate,
)
from tests.drafters.dflash import toys as dflash
from tests.drafters.eagle3 import toys as eagle3
from tests.drafters.peagle import toys as peagle
from tests.kit import TOLERANCE, ancestors, each_row, in_tiers, relative_error

RING = cache_lib.ring_slots(W)


@pytest.mark.parametrize(
    ("family", "distinct"),
    [
        (WINDOWS, 5),
        pytest.param(GEMMA4, 5, marks=pytest.mark.full),
        (RECURRENT, 5),
        (GPT_OSS, 2),
    ],
    ids=str,
)
def test_plain_decoding_is_the_dense_model(family: Family, distinct: int) -> None:
    """The greedy row draws the largest logit at every one of its tokens."""
    own = family.plain[0]
    text = np.concatenate([family.prompts[0], own])[None]
    logits = np.asarray(dense(family.config, family.models.target, text, family.recur))[0, 60:-1]
    np.testing.assert_array_equal(logits.argmax(axis=1), own)
    assert len(set(own.tolist())) > distinct


SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)


def narrow(family: Family) -> LongSpecDrafter:
    return LongSpecDrafter(family.draft, TreeConfig((3, 2)))


def blocks(family: Family) -> PartialVerifier:
    return PartialVerifier(narrow(family), Quest(family.config, SOME), TreeConfig((1,) * 7))


PAIR = TreeConfig((1, 1))
STREAMING = StreamingDrafter(TreeConfig((3, 2)), SHORT)
BEHIND_A_CHAIN = TreeConfig((1, 1, 1, 1, 3, 2), chain=4)
DRAFTERS = {
    "blocks beside windows": (WINDOWS, blocks(WINDOWS)),
    "blocks beside heads of two widths": (GEMMA4, blocks(GEMMA4)),
    "streaming beside states": (RECURRENT, STREAMING),
    "blocks beside states": (RECURRENT, blocks(RECURRENT)),
    "a tree behind a chain beside states": (
        RECURRENT,
        PartialVerifier(narrow(RECURRENT), SinksAndRecent(4, 16), BEHIND_A_CHAIN),
    ),
    "a tree deeper than the window beside sinks": (GPT_OSS, GPT_OSS.longspec),
    "blocks beside sinks": (GPT_OSS, blocks(GPT_OSS)),
}


@pytest.mark.parametrize(
    "name",
    in_tiers(DRAFTERS, "blocks beside windows", "a tree deeper than the window beside sinks"),
)
def test_no_drafter_changes_a_token(name: str) -> None:
    family, drafter = DRAFTERS[name]
    assert_lossless(family.target, drafter, family.models, *family.given, family.plain)


@pytest.mark.full
def test_a_row_alone_gathers_the_weights_of_its_experts() -> None:
    """Three rows compute all of them."""
    tokens, lengths, req = GPT_OSS.given
    given = tokens[1:2], lengths[1:2], jax.tree.map(lambda leaf: leaf[1:2], req)
    alone, _ = generate(GPT_OSS.target, NoDraft(), GPT_OSS.models, *given)
    assert_same(alone, GPT_OSS.plain[1:2])


@pytest.mark.full
def test_nor_does_a_joined_tree_beside_heads_of_two_widths() -> None:
    drafter = Joined((GEMMA4.longspec, NgramDrafter(PAIR)), TreeConfig.parse("3,4,2@12~4"))
    models = Params(GEMMA4.models.target, (GEMMA4.models.draft, ()))
    assert_lossless(GEMMA4.target, drafter, models, *GEMMA4.given, GEMMA4.plain)


EAGLE3 = eagle3.config_for(GPT_OSS.config)
PEAGLE = peagle.config_for(GPT_OSS.config)
PLAIN_LAYERS = dict(kinds=(), pattern=(), rope_scaling=None, out_bias=False, attention_sinks=False)
DFLASH = dflash.config_for(GPT_OSS.config, PLAIN_LAYERS)
RANDOM: dict[str, Any] = {
    "eagle3": (Eagle3Drafter(EAGLE3, TreeConfig((3, 2))), eagle3.random_params, EAGLE3),
    "peagle": (PEagleDrafter(PEAGLE, TreeConfig((3, 2))), peagle.random_params, PEAGLE),
    "dflash": (DFlashDrafter(DFLASH, TreeConfig((3, 2))), dflash.random_params, DFLASH),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RANDOM)
def test_nor_does_a_random_draft_beside_sinks(name: str) -> None:
    """Of which no token need be accepted."""
    drafter, draw, config = RANDOM[name]
    params = Params(GPT_OSS.models.target, draw(config))
    assert_same(generate(GPT_OSS.target, drafter, params, *GPT_OSS.given)[0], GPT_OSS.plain)


def test_blocks_are_chosen_in_the_layers_without_a_window() -> None:
    assert blocks(WINDOWS).needs.keys == WINDOWS.config.full_layers == (1, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        (RECURRENT, StreamingDrafter(PAIR, SHORT)),
        (GPT_OSS, NgramDrafter(PAIR)),
        (GEMMA4, NgramDrafter(PAIR)),
    ],
    ids=["states", "sinks", "heads of two widths"],
)
def test_a_chain_on_a_mesh_changes_no_token(family: Family, drafter: Drafter) -> None:
    """Each of two devices has half of the heads, of their states, sinks and biases, and experts."""
    mesh = make_mesh(tp=2)
    weights = jax.device_put(family.models.target, param_shardings(mesh, family.models.target))
    target = TargetModel(family.config, mesh=mesh.abstract_mesh)
    state = assert_lossless(target, drafter, Params(weights, ()), *family.given, family.plain)
    for memory, _ in map(jax.tree.leaves, state.rows.cache.states.values()):
        assert memory.addressable_shards[0].data.shape[1] == SIZES.key_heads // 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        (WINDOWS, "device pinned_host device device"),
        (GEMMA4, "device pinned_host device device"),
        (RECURRENT, "device"),
        (GPT_OSS, "device device"),
    ],
    ids=str,
)
def test_nor_does_a_cache_in_the_hosts_memory(family: Family, kinds: str) -> None:
    """Of which spans are read in place, layer by layer; rings and states stay on the device.

    So does the last layer without a window, which drafts read.
    """
    target = TargetModel(family.config, offload=True)
    state = assert_lossless(target, STREAMING, family.models, *family.given, family.plain)
    found = jax.tree.leaves(state.rows.cache.keys)
    assert [leaf.sharding.memory_kind for leaf in found] == kinds.split()


@pytest.mark.full
@pytest.mark.parametrize("family", [WINDOWS, GEMMA4, RECURRENT], ids=str)
def test_rows_that_come_and_go_share_prefixes_by_the_hosts_memory(family: Family) -> None:
    """Five requests in two slots, one of them cancelled. Slots by themselves share nothing.

    The first prompt returns with the chunks that the host kept, and the window or the states after
    them.
    """
    given = *family.given, family.plain
    assert_rows_come_and_go(family.target, family.longspec, family.models, *given)


# What windows keep.


def test_a_ring_holds_the_window_of_every_row() -> None:
    """After chunks longer than it, of which rows own some tokens, and commits in some rows."""
    assert RING == 40 and RING >= W - 1 + MAX_TREE_LEVELS + 1
    random, lengths = np.random.default_rng(0), np.array([97, 35, 0, 60])
    text = random.normal(size=(2, 4, 4, 160, 2, 6)).astype(np.float32)
    cache = cache_lib.allocate(WINDOWS.config, 4, 160)
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


@each_row(
    ("config", "offload"),
    [(family.config, offload) for family in (WINDOWS, GEMMA4) for offload in (False, True)],
)
def test_the_bytes_of_rings_are_known(config: TargetConfig, offload: bool) -> None:
    target = TargetModel(config, offload=offload)
    cache, planned = target.allocate(3, 160), target.cache_bytes(3, 160)
    near = config.layer(0).heads or config
    full, ring = (3 * 2 * each.num_kv_heads * each.head_width * 4 for each in (config, near))
    assert tree_bytes(cache) == 2 * 160 * full + 2 * RING * ring
    # A layer that is moved is on the device for a time, too.
    assert planned.device == tree_bytes(cache)
    assert planned.host == (160 * full if offload else 0)


def test_trees_deeper_than_the_window_see_their_own_paths() -> None:
    """After a prompt that wrapped the ring, and one that did not fill the window."""
    target, params, prompts = WINDOWS.target, WINDOWS.models.target, WINDOWS.prompts
    length, random = np.array([61, 4]), np.random.default_rng(1)
    cache, logits = target.allocate(2, 96), jnp.zeros(())
    prefill = jax.jit(target.prefill_chunk)
    for offset in range(0, 64, 16):
        start, last = jnp.full(2, offset), jnp.asarray(length - 1 - offset)
        chunk = jnp.pad(jnp.asarray(prompts[:2]), ((0, 0), (0, 3)))[:, offset : offset + 16]
        logits, cache, *_ = prefill(params, cache, chunk, start, last)
    parents = np.array([-1, *range(10), 2, 11, 0, 13])
    nodes, mask = len(parents), ancestors(parents)
    depth = mask.sum(axis=1) - 1
    tokens = random.integers(0, WINDOWS.config.vocab_size, (2, nodes)).astype(np.int32)
    found = jax.jit(partial(target.verify, levels=10))(
        *(params, cache, jnp.asarray(tokens), jnp.asarray(length[:, None] + depth)),
        *(jnp.broadcast_to(mask, (2, nodes, nodes)), jnp.asarray(length)),
    )
    for node in (0, 5, 10, 12, 14):
        path = tokens[:, mask[node]]
        text, ends = np.zeros((2, 80), np.int32), length + path.shape[1]
        for row, end in enumerate(ends):
            text[row, :end] = [*prompts[row, : length[row]], *path[row]]
        expected = np.asarray(dense(WINDOWS.config, params, text))[[0, 1], ends - 1]
        error = np.abs(found.logits[:, node] - expected).max()
        assert error <= 20 * TOLERANCE["float32"], (node, error)
        assert np.abs(expected).max() > 1
    expected = np.asarray(dense(WINDOWS.config, params, text))[0, 60]
    np.testing.assert_allclose(logits[0], expected, atol=20 * TOLERANCE["float32"])


# What recurrent layers keep.


def test_a_state_is_that_of_the_committed_tokens() -> None:
    """Of rows of unlike lengths, after trees that were accepted in part."""
    target, models, plain = RECURRENT.target, RECURRENT.models, RECURRENT.plain
    state = assert_lossless(target, RECURRENT.longspec, models, *RECURRENT.given, plain)
    for row, own in enumerate(plain):
        # The last token is emitted, and not committed.
        text = np.concatenate([RECURRENT.prompts[row, : LENGTHS[row]], own[:-1]])[None]
        cache, at = target.allocate(1, 128), jnp.zeros(1, jnp.int32)
        last = jnp.asarray([text.shape[1] - 1])
        padded = jnp.pad(jnp.asarray(text), ((0, 0), (0, 110 - text.shape[1])))
        _, cache, *_ = jax.jit(target.prefill_chunk)(models.target, cache, padded, at, last)
        for layer, expected in cache.states.items():
            found: RecurrentState = state.rows.cache.states[layer]
            for mine, theirs in ((found.memory, expected.memory), (found.inputs, expected.inputs)):
                assert relative_error(mine[row], theirs[0]) <= 20 * TOLERANCE["float32"]


@each_row("offload", [False, True])
def test_the_bytes_of_states_are_known(offload: bool) -> None:
    """They do not grow with the capacity, which the one layer of attention has."""
    config = RECURRENT.config
    target = TargetModel(config, offload=offload)
    planned = [target.cache_bytes(3, capacity) for capacity in (160, 320)]
    assert [tree_bytes(target.allocate(3, slots)) for slots in (160, 320)] == [
        each.device for each in planned
    ]
    row = 2 * config.num_kv_heads * config.head_width * 4
    assert planned[1].device - planned[0].device == 3 * 160 * row
    assert all(each.host == 0 for each in planned)


def test_the_layer_of_attention_may_have_a_cache_in_8_bits() -> None:
    """Its keys and values are 8 bits wide, and the states are not."""
    target = TargetModel(dataclasses.replace(RECURRENT.config, kv_dtype="fp8"))
    cache, given = target.allocate(2, 64), jnp.zeros((2, 5), jnp.int32)
    at, last, params = jnp.zeros(2, jnp.int32), jnp.full(2, 4), RECURRENT.models.target
    found = jax.eval_shape(target.prefill_chunk, params, cache, given, at, last).cache
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, cache)
    assert found.keys[1].dtype.itemsize == 1
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.states)} == {"float32"}
