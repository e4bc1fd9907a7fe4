"""The parallel LongSpec drafter against its definition in PyTorch; folder, options and refusals.

That it changes no token is in :mod:`tests.drafters.test_published`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Needs, Params
from longspec_jax.drafters.checkpoints.parallel import draft_table, load_draft, save_draft
from longspec_jax.drafters.parallel import (
    ParallelDraft,
    ParallelDrafter,
    ParallelLayers,
    ParallelParams,
)
from tests.decoding.lossless import CONFIG
from tests.drafters.kit import assert_partitioned, extended, proposed_from
from tests.drafters.parallel.toys import config_for, random_tree
from tests.kit import each_row, normal, random_target, relative_error, view_of

DRAFT = config_for(CONFIG)
TREE = random_tree(DRAFT)
MODEL = random_target(CONFIG)
DRAFTER = ParallelDrafter(DRAFT, TreeConfig((2, 3, 4, 1)))
LENGTHS = np.array([19, 7, 8, 6, 0], np.int32)
"""Rows whose ring has wrapped, is just full, has lost one token, has a slot left, and is empty."""
TOKENS = np.random.default_rng(2).integers(0, CONFIG.vocab_size, (5, 20)).astype(np.int32)
KEYS, VALUES = (normal(seed, 5, CONFIG.num_kv_heads, 24, CONFIG.head_width) for seed in (5, 6))


def _proposed(drafter: ParallelDrafter, params: Any, state: Any) -> Any:
    """The tree after every row, and the logits at the nodes of every level."""
    pending = jnp.take_along_axis(jnp.asarray(TOKENS), jnp.asarray(LENGTHS)[:, None], axis=1)[:, 0]
    view = view_of(pending, jnp.asarray(LENGTHS), KEYS, VALUES)
    return jax.device_get(proposed_from(drafter, params, state, view))


def bound(tree: Any = TREE) -> Params:
    return Params(None, ParallelParams.with_target_tables(MODEL, tree))


@pytest.fixture(scope="module")
def state() -> Any:
    """After prompts that came as one chunk, longer than the window."""
    params = bound()
    begun = DRAFTER.begin(params, 5, 64)
    assert begun.cache.keys[0].shape[2] == 8, "a ring of 7 entries, whatever the capacity"
    return extended(DRAFTER, params, begun, (TOKENS, np.zeros(5, np.int32), LENGTHS))


def test_logits_at_every_node_are_those_of_the_definition(state: Any, tmp_path: Path) -> None:
    """Of five rows: the logits of a node's slot, corrected by its token."""
    from tests.models.parallel_oracle import ParallelOracle, torch

    save_draft(tmp_path, DRAFT, TREE, target=CONFIG)
    stored = load_file(tmp_path / "model.safetensors")
    layer = DRAFT.layer
    oracle = ParallelOracle(
        {name: torch.from_numpy(tensor) for name, tensor in stored.items()},
        *(layer.num_heads, layer.num_kv_heads, layer.window),
        *(layer.norm_eps, layer.rope_theta, DRAFT.num_layers),
    )
    tree, heard = _proposed(DRAFTER, bound(), state)
    embedding, head = (torch.from_numpy(np.array(MODEL[name])) for name in ("embedding", "head"))
    keys, values = (torch.from_numpy(np.array(each)) for each in (KEYS, VALUES))
    first = np.array([0, 1, 3, 6])
    for b, length in enumerate(LENGTHS):
        text = embedding[torch.from_numpy(TOKENS[b])]
        hidden = oracle.slots(
            *(text[length], text[:length], torch.arange(length + DRAFT.block)),
            *(each[b, :, :length].transpose(0, 1) for each in (keys, values)),
        )
        logits = hidden @ head.T
        for level, found in enumerate(heard):
            nodes = tree.tokens[b, first[level] :][: found.shape[1]]
            expected = logits[level] + oracle.correction(torch.tensor(nodes.tolist()))
            assert relative_error(found[b], expected) < 1e-5


def test_a_targets_factors_are_applied_once() -> None:
    """To what enters the first layer, learnt slots too, and to what leaves the norm."""
    layer = replace(DRAFT.layer, embedding_factor=3.0, logits_divisor=4.0)
    params = {name: each for name, each in TREE.items() if name != "markov"}
    pending, places = normal(3, 1, 1, CONFIG.model_width), jnp.arange(4)[None]

    def hidden(config: Any, params: Any, pending: Any) -> Any:
        attends = (lambda layer, q, k, v: q + layer), (lambda q: q)
        return ParallelLayers(config).apply({"params": params}, pending, places, *attends)

    found = hidden(replace(DRAFT, layer=layer), params, pending)
    expected = hidden(DRAFT, {**params, "slots": 3 * params["slots"]}, 3 * pending) / 4
    assert relative_error(found, expected) < 1e-6


def test_a_tree_holds_the_best_paths(state: Any) -> None:
    """By the sum of log-probabilities, the correction by the token before included."""
    drafter = ParallelDrafter(DRAFT, TreeConfig((CONFIG.vocab_size, 9)))
    tree, heard = _proposed(drafter, bound(), state)
    logs = [np.asarray(jax.nn.log_softmax(np.float64(each))) for each in heard]
    for b in range(5):
        above = tree.tokens[b, 1 : 1 + CONFIG.vocab_size]
        sums = logs[0][b, 0, above][:, None] + logs[1][b]
        wanted = {divmod(int(at), CONFIG.vocab_size) for at in np.argsort(-sums, axis=None)[:9]}
        parents, tokens = tree.parents[b, -9:] - 1, tree.tokens[b, -9:]
        assert {*zip(parents.tolist(), tokens.tolist(), strict=True)} == wanted


def test_what_is_needed_and_what_cannot_be() -> None:
    assert DRAFTER.needs == Needs(recent=7)
    with pytest.raises(ValueError, match="5 levels is deeper .* proposes 4 tokens; use fewer"):
        ParallelDrafter(DRAFT, TreeConfig((1,) * 5))
    for fields in (dict(num_layers=4), dict(block=1), dict(markov_rank=-1), dict(block=17)):
        with pytest.raises(ValueError, match=r"(num_layers|block|markov_rank)=-?\d+ must be"):
            replace(DRAFT, **fields)


@pytest.mark.full
def test_8_bits_and_meshes(state: Any) -> None:
    """Rounded weights compute nearly the same, and every parameter has a rule of partition."""
    whole = bound().draft
    rounded = ParallelDraft.bind(DRAFT, TREE, MODEL, int8=True).params
    with pytest.raises(ValueError, match="in 8 bits already"):
        rounded.in_int8()
    exact, near = (_proposed(DRAFTER, Params(None, each), state)[1][0] for each in (whole, rounded))
    assert 0 < relative_error(near, exact) < 0.05
    for each in (whole, rounded):
        assert_partitioned({name: getattr(each, name) for name in ("layer", "head", "markov")})


@each_row("markov_rank", [0, 5])
def test_a_folder_gives_back_what_was_saved(tmp_path: Path, markov_rank: int) -> None:
    config = config_for(CONFIG, num_layers=3, markov_rank=markov_rank)
    params = random_tree(config)
    save_draft(tmp_path, config, params, target=CONFIG)
    found, loaded = load_draft(tmp_path, CONFIG)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert len(load_file(tmp_path / "model.safetensors")) == len(draft_table(config).parts)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    save_draft(tmp_path, DRAFT, TREE, target=CONFIG)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    cases: dict[str, Any] = {
        "longspec_block": (9, r"slot_embeddings\.weight"),
        "num_hidden_layers": (1, r"layers\.1\."),
        "longspec_markov_rank": (0, r"markov_head\.markov_w1"),
        "vocab_size": (77, "made for vocab_size=77, the target has 101"),
        "rope_theta": (5.0, "rope_theta=5.0 but the target rope_theta=10000.0"),
    }
    for key, (value, words) in cases.items():
        file.write_text(json.dumps(raw | {key: value}))
        with pytest.raises(ValueError, match=words):
            load_draft(tmp_path, CONFIG)
    del raw["longspec_block"]
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="longspec_block"):
        load_draft(tmp_path, CONFIG)
