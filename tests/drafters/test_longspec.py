"""The LongSpec draft in decoding: ring, window, whole paths run again, and its 8-bit form."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters import draft as draft_module
from longspec_jax.drafters.base import Params, SamplingNoise
from longspec_jax.drafters.checkpoints import longspec as checkpoints
from longspec_jax.drafters.checkpoints.longspec import load, save_draft
from longspec_jax.drafters.draft import Target, is_large
from longspec_jax.drafters.longspec import (
    DraftConfig,
    LongSpecDrafter,
    LongSpecOptions,
    LongSpecParams,
    ring_mask,
    ring_positions,
)
from longspec_jax.drafters.retrieval.selection import WorkingSet, everything
from longspec_jax.ops.matmul.quantised import quantised_matmul
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.sharding import make_mesh, param_shardings
from tests.drafters.kit import proposed_from
from tests.kit import (
    after_prompts,
    draft_params,
    each_row,
    random_draft,
    random_target,
    tiny_target_config,
    view_of,
)

TARGET = tiny_target_config()
WINDOW = 5
CONFIG = DraftConfig.for_target(TARGET, window=WINDOW)


def test_ring_positions_by_hand() -> None:
    np.testing.assert_array_equal(
        ring_positions(jnp.array([0, 2, 5, 7]), 5),
        [[-5, -4, -3, -2, -1], [0, 1, -3, -2, -1], [0, 1, 2, 3, 4], [5, 6, 2, 3, 4]],
    )


def test_window_edge_is_inclusive() -> None:
    """512 past keys and the query's own: a key exactly ``window`` positions before is seen."""
    ring = ring_positions(jnp.array([7]), 5)  # positions 5 6 2 3 4
    mask = ring_mask(ring, jnp.array([[7, 8, 9]]), 5)
    np.testing.assert_array_equal(
        mask[0].astype(int), [[1, 1, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 0, 1]]
    )


def _setup(lengths: np.ndarray, seed: int = 0):
    target = random_target(TARGET)
    params = draft_params(random_draft(CONFIG), target)
    keys = jax.random.split(jax.random.key(seed), 3)
    slots = (len(lengths), TARGET.num_kv_heads, 32, TARGET.head_width)
    view = view_of(
        jax.random.randint(keys[0], (len(lengths),), 0, TARGET.vocab_size),
        jnp.asarray(lengths),
        jax.random.normal(keys[1], slots),
        jax.random.normal(keys[2], slots),
    )
    tokens = np.random.default_rng(seed).integers(0, TARGET.vocab_size, (len(lengths), 32))
    return Params(target, params), view, tokens.astype(np.int32)


VOCABULARY = jnp.asarray([90, 5, 7, 33, 61, 2, 71])


@pytest.mark.parametrize("own", [False, True])
def test_a_restricted_draft_proposes_the_best_of_what_it_may(own: bool) -> None:
    """As if the logits of all tokens were -inf but its vocabulary's and those of a row's text."""
    lengths = np.array([17, 3], np.int32)
    params, view, tokens = _setup(lengths)
    possible = np.zeros((2, TARGET.vocab_size), bool)
    possible[:, VOCABULARY] = True
    if own:
        for row, length in enumerate(lengths):
            possible[row, tokens[row, :length]] = True
        assert (possible[0] != possible[1]).any()

    class Masked(SamplingNoise):
        def scores(self, logits: jax.Array, depth: int) -> jax.Array:
            return jnp.where(possible[:, None], logits, -jnp.inf)

    class Among(SamplingNoise):
        def among(self, tokens: jax.Array) -> "Among":
            if not own:
                np.testing.assert_array_equal(tokens, VOCABULARY)
            return self

        def scores(self, logits: jax.Array, depth: int) -> jax.Array:
            assert own or logits.shape[-1] == len(VOCABULARY)
            return logits

    drafter = LongSpecDrafter(CONFIG, TreeConfig((3, 4, 4)))
    state = after_prompts(drafter, params, tokens, lengths)
    expected = jax.jit(lambda *models: drafter.propose(*models, view, Masked()))(params, state)
    fewer = replace(params, draft=params.draft.restricted(VOCABULARY, own_tokens=own))
    drafter = replace(drafter, own_tokens=own)
    state = after_prompts(drafter, fewer, tokens, lengths)
    tree = jax.jit(lambda: drafter.propose(fewer, state, view, Among()))()
    for name in ("tokens", "parents", "mask"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name))
    # The estimates of nodes are sums of another matmul's logits.
    np.testing.assert_allclose(tree.totals, expected.totals, rtol=1e-5)


def widened(rounded: Any, whole: Any) -> Any:
    """The parameters that 8-bit ones stand for."""
    if "kernel" not in rounded:
        return {
            key: widened(value, whole[key]) if isinstance(value, dict) else value
            for key, value in rounded.items()
        }
    rows: QuantisedMatrix = rounded["kernel"]
    inputs_last = jnp.asarray(rows.codes * rows.scale)
    kernel = jnp.moveaxis(inputs_last, -1, 0).reshape(whole["kernel"].shape)
    assert 0 < np.abs(kernel - whole["kernel"]).max() < 0.01 * np.abs(whole["kernel"]).max()
    return {**rounded, "kernel": kernel}


def test_a_draft_in_8_bits_proposes_what_its_rounded_weights_do() -> None:
    """Scores are those of the weights that the steps and their scales stand for."""
    lengths = np.array([17, 3], np.int32)
    params, view, tokens = _setup(lengths)
    whole, eighth = params.draft, params.draft.in_int8()
    rounded = replace(params, draft=eighth)
    table = eighth.head.codes.astype(jnp.float32) * eighth.head.scale
    assert 0 < np.abs(table - whole.head).max() < 0.01 * np.abs(whole.head).max()
    drafter = LongSpecDrafter(CONFIG, TreeConfig((3, 4, 4)))
    state = after_prompts(drafter, rounded, tokens, lengths)
    layer = widened(eighth.layer, whole.layer)
    stood_for = replace(params, draft=whole.replace(head=table, layer=layer))
    same = after_prompts(drafter, stood_for, tokens, lengths)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), state, same)
    tree, seen = proposed_from(drafter, rounded, state, view)
    expected, wanted = proposed_from(drafter, stood_for, state, view)
    np.testing.assert_array_equal(tree.tokens, expected.tokens)
    assert len(seen) == 3
    for ours, theirs in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_a_draft_reads_only_what_was_selected() -> None:
    """As if nothing else had been cached; and all of it where the selection lies in the cache."""
    lengths = np.array([17, 9], np.int32)
    params, view, tokens = _setup(lengths)
    drafter = LongSpecDrafter(CONFIG, TreeConfig((3, 4)))
    state = after_prompts(drafter, params, tokens, lengths)
    # Four slots of the first row and two of the second, whose last two are garbage.
    slots, count = np.array([[2, 3, 11, 16], [0, 5, 31, 31]]), jnp.array([4, 2])
    keys, values = (
        jnp.take_along_axis(layer, slots[:, None, :, None], axis=2)
        for layer in (view.cache.keys[-1], view.cache.values[-1])
    )
    alone = replace(view_of(view.pending, count, keys, values), position=view.position)
    within = view.within(WorkingSet((keys,), (values,), count))
    spread = view.within(everything(view.length))
    found, wanted, whole, all_ = (
        proposed_from(drafter, params, state, seen) for seen in (within, alone, spread, view)
    )
    jax.tree.map(np.testing.assert_array_equal, (found, whole), (wanted, all_))
    assert np.abs(found[1][0] - all_[1][0]).max() > 1e-3


@pytest.fixture(scope="module")
def params() -> LongSpecParams:
    layer = random_draft(DraftConfig.for_target(TARGET, window=5))
    return draft_params(layer, random_target(TARGET))


def test_own_leaves_out_what_the_target_has(params: LongSpecParams) -> None:
    def beside_the_layer(params: LongSpecParams) -> int:
        own, layer = (
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            for tree in (params.own_params, params.layer)
        )
        return own - layer

    assert beside_the_layer(params) == 0
    assert beside_the_layer(params.in_int8()) == 101 * 36 + 101 * 4
    assert beside_the_layer(params.restricted(VOCABULARY)) == 7 * 36 * 4 + 7 * 4
    both = params.restricted(VOCABULARY).in_int8()
    assert beside_the_layer(both) == 7 * 36 + 7 * 4 + 7 * 4
    assert params.in_int8().embedding is params.embedding


def test_a_rounded_head_lies_as_the_head_does() -> None:
    mesh = make_mesh(fsdp=2, tp=2)
    table = jax.random.normal(jax.random.key(1), (26, 6))
    head = QuantisedMatrix.rounded(table)
    placed = jax.device_put(head, param_shardings(mesh, {"head": head})["head"])
    assert placed.codes.sharding.shard_shape((26, 6)) == (13, 3)
    spread = jax.device_put(table, param_shardings(mesh, {"head": table})["head"])
    again = QuantisedMatrix.rounded(spread)
    jax.tree.map(np.testing.assert_array_equal, again, head)
    hidden = jax.random.normal(jax.random.key(0), (3, 6))
    ours, theirs = quantised_matmul(hidden, placed), quantised_matmul(hidden, head)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@each_row(
    ("large", "dtype", "chosen", "expected"),
    [
        (True, "bfloat16", None, True),
        (True, "bfloat16", False, False),
        (True, "float32", None, False),
        (False, "bfloat16", None, False),
        (False, "float32", True, True),
    ],
)
def test_drafts_of_large_targets_in_16_bits_are_read_in_8(
    large: bool,
    dtype: str,
    chosen: bool | None,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing else is asked for; on this CPU no target is a large one."""
    config = tiny_target_config(dtype=dtype)
    target = Target(config, random_target(config))
    assert not is_large(target.params)
    draft = DraftConfig.for_target(config, window=5)
    save_draft(tmp_path, draft, random_draft(draft), target=config)
    monkeypatch.setattr(draft_module, "is_large", lambda params: large)
    assert load(tmp_path, target, LongSpecOptions(int8=chosen)).params.int8 is expected


@pytest.mark.parametrize(
    ("large", "dtype", "named", "proposable"),
    [
        (True, "bfloat16", None, 80),
        (True, "bfloat16", 101, 101),
        (True, "float32", None, 101),
        (False, "bfloat16", None, 101),
    ],
)
def test_drafts_of_large_vocabularies_propose_what_was_merged_first(
    large: bool,
    dtype: str,
    named: int | None,
    proposable: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what a row's text holds: where it pays, and no number is named."""

    class Tokenizer:
        backend_tokenizer = property(lambda self: self)

        def __len__(self) -> int:
            return 101

        def to_str(self) -> str:
            vocab = {"a" * length: length - 1 for length in range(1, 102)}
            merges = [["a", "a" * length] for length in range(1, 101)]
            return json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": merges}})

    config = tiny_target_config(dtype=dtype)
    target = Target(config, random_target(config), Tokenizer())
    draft = DraftConfig.for_target(config, window=5)
    save_draft(tmp_path, draft, random_draft(draft), target=config)
    monkeypatch.setattr(draft_module, "is_large", lambda params: large)
    for module in (draft_module, checkpoints):
        monkeypatch.setattr(module, "LIKELY_TOKENS", 80)
    monkeypatch.setattr(draft_module, "_LEAST_SAVED", 0.001)
    loaded = load(tmp_path, target, LongSpecOptions(vocabulary=named, int8=False))
    assert loaded.params.proposable == proposable
    assert loaded.drafter(TreeConfig((2,))).own_tokens is (proposable == 80)
    monkeypatch.setattr(draft_module, "_LEAST_SAVED", 10.0)
    assert load(tmp_path, target, LongSpecOptions()).params.proposable == 101
