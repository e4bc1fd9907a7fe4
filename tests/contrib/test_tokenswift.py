"""TokenSwift's heads: their arithmetic, and the published files."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contrib.tokenswift import (
    TokenSwiftConfig,
    TokenSwiftDraft,
    TokenSwiftOptions,
    TokenSwiftParams,
    continuations,
    followers,
    load,
    reused,
)
from longspec_jax import LongSpec
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.drafters.draft import Target
from longspec_jax.drafters.retrieval.selection import Quest
from longspec_jax.drafters.tree import Tree
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.weights.hf import save_target
from tests.decoding.lossless import CONFIG
from tests.drafters.kit import assert_holds, assert_partitioned, drawn, edit, publish
from tests.kit import normal, random_target, relative_error, tiny_target_config

MODEL = random_target(CONFIG)
TARGET = Target(CONFIG, MODEL)
CAPPED = tiny_target_config(logits_divisor=4.0, logit_cap=0.5)
HEADS = TokenSwiftConfig(
    3, CONFIG.model_width, CONFIG.vocab_size, CONFIG.num_layers, CONFIG.norm_eps, "float32"
)


def published(folder: Path) -> dict[str, np.ndarray]:
    """A target with random heads among its tensors, which are returned."""
    width, shapes = CONFIG.model_width, {}
    for head in range(HEADS.heads):
        name = f"model.medusa_layers.{head}"
        shapes[f"{name}.linear.weight"] = width, width
        shapes[f"{name}.input_layernorm.weight"] = (width,)
        shapes[f"{name}.post_layernorm.weight"] = (width,)
    tensors = drawn(shapes, seed=9)
    save_target(folder, CONFIG, MODEL)
    publish(folder, tensors, {"medusa_heads": HEADS.heads})
    return tensors


def test_heads_by_hand(tmp_path: Path) -> None:
    """From the stored tensors: a chain of linear maps, each after a norm and before another."""
    stored, table = published(tmp_path), np.asarray(MODEL["head"], np.float64)
    params = load(tmp_path, TARGET).params
    hidden = np.random.default_rng(10).normal(size=(2, CONFIG.model_width)).astype(np.float32)
    stream, expected = hidden.astype(np.float64), []

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        mean = (x**2).mean(axis=1, keepdims=True) + CONFIG.norm_eps
        return x / np.sqrt(mean) * stored[f"model.medusa_layers.{head}.{name}_layernorm.weight"]

    for head in range(3):
        linear = stored[f"model.medusa_layers.{head}.linear.weight"].astype(np.float64)
        stream = stream + normed(stream, "input") @ linear.T
        expected.append(normed(stream, "post") @ table.T)
    found = jax.jit(partial(params.logits, HEADS, heads=3))(hidden)
    np.testing.assert_allclose(found, np.stack(expected, 1), atol=2e-4)


def test_what_followed_a_path_by_search() -> None:
    """After every node the tokens that stand in the row after its path, by the latest places."""
    random = np.random.default_rng(12)
    text, last = random.integers(0, 3, (2, 140)).astype(np.int32), np.array([138, 7], np.int32)
    given = jnp.asarray(text), jnp.asarray(last)
    tokens = random.integers(0, 3, (2, 7)).astype(np.int32)
    parents = np.broadcast_to(np.array([-1, 0, 0, 1, 1, 2, 2], np.int32), (2, 7))
    tree = Tree(jnp.asarray(tokens), jnp.asarray(parents), jnp.ones((2, 7, 7), bool))
    behind = continuations(*given, tree.tokens[:, 1:3], 3)
    levels = {1: [[1], [2]], 2: [[1, 3], [1, 4], [2, 5], [2, 6]]}
    for depth, paths in levels.items():
        nodes = slice(paths[0][-1], paths[-1][-1] + 1)
        found = np.asarray(followers(behind, tree, nodes, depth))
        for row in range(2):
            whole = text[row, : last[row] + 1].tolist()
            for node, path in enumerate(paths):
                wanted = tokens[row, path].tolist()
                places = [i for i, token in enumerate(whole[:-1]) if token == wanted[0]][::-1][:32]
                expected = [
                    whole[i + depth]
                    for i in places
                    if whole[i : i + depth] == wanted and i + depth < len(whole)
                ]
                kept = [token for token in found[row, node].tolist() if token >= 0]
                assert kept == expected, (depth, row, node)
        logits = random.normal(size=(2, 1, 5))
        mixed = np.exp(np.asarray(reused(jnp.asarray(logits, jnp.float32), jnp.asarray(found))))
        heads = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
        for row, node in np.ndindex(*found.shape[:2]):
            counts = np.bincount(found[row, node][found[row, node] >= 0], minlength=5)
            half = heads[row, 0]
            if counts.any():
                half = (half + counts / counts.sum()) / 2
            np.testing.assert_allclose(mixed[row, node], half, atol=1e-6)


def test_target_and_draft_are_one_folder(tmp_path: Path) -> None:
    """It loads as either."""
    tensors, options = published(tmp_path), {"context": 1024}
    draft = f"contrib.tokenswift:{tmp_path}"
    spec = LongSpec.from_pretrained(tmp_path, draft, dtype="float32", draft_options=options)
    jax.tree.map(np.testing.assert_array_equal, spec.target_params, MODEL)
    draft, _ = spec.drafts
    assert isinstance(draft, TokenSwiftDraft) and draft.config == HEADS
    assert_holds(draft.params.heads, tensors)
    selector = Quest(spec.target_config, BlockBudget(1024))
    assert draft.drafter(PLAIN).selector == selector and draft.drafter(PLAIN).needs.keys
    assert {tree.num_levels for tree in draft.default_trees.large} == {4}
    assert_partitioned(draft.params.heads)


def test_refusals(tmp_path: Path) -> None:
    published(tmp_path)
    for field, size, words in (
        ("model_width", 40, "target of hidden_size=36, the target has hidden_size=40"),
        ("vocab_size", 103, "target of vocab_size=101, the target has vocab_size=103"),
    ):
        with pytest.raises(ValueError, match=words):
            load(tmp_path, Target(replace(CONFIG, **{field: size}), MODEL))
    with pytest.raises(ValueError, match="5 levels, and the draft has 3 heads"):
        load(tmp_path, TARGET).drafter(TreeConfig((1,) * 5))
    with pytest.raises(ValueError, match="context=100: 100 slots must be whole blocks of 32"):
        TokenSwiftOptions(100)
    edit(tmp_path, medusa_heads=4)
    with pytest.raises(ValueError, match=r"missing model.medusa_layers.3.input_layernorm.weight"):
        load(tmp_path, TARGET)
    extra = {"model.medusa_layers.0.linear.bias": np.ones(36, np.float32)}
    publish(tmp_path, extra, {"medusa_heads": 3})
    with pytest.raises(ValueError, match="unexpected model.medusa_layers.0.linear.bias"):
        load(tmp_path, TARGET)


@pytest.mark.parametrize("cap", [None, 0.5])
def test_tokenswifts_heads_read_the_targets(cap: float | None) -> None:
    table = random_target(CAPPED)["head"]
    hidden = 4 * normal(0, 1, CAPPED.model_width)
    sizes = CAPPED.model_width, CAPPED.vocab_size, CAPPED.num_layers
    config = TokenSwiftConfig(1, *sizes, 1e-5, "float32", logits_divisor=4.0, logit_cap=cap)
    scale = {"scale": jnp.ones(CAPPED.model_width)}
    kernel = jnp.zeros((CAPPED.model_width, CAPPED.model_width))
    heads = {"heads_0": {"input_norm": scale, "output_norm": scale, "block_0": {"kernel": kernel}}}
    logits = TokenSwiftParams(heads, table).logits(config, hidden, 1)
    plain = replace(config, logits_divisor=1.0, logit_cap=None)
    raw = TokenSwiftParams(heads, table).logits(plain, hidden, 1) / 4
    expected = raw if cap is None else cap * jnp.tanh(raw / cap)
    assert relative_error(logits, expected) < 1e-6 and relative_error(logits, 4 * raw) > 0.1
