"""Medusa heads: their arithmetic and trees, and the published files."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contrib.medusa import (
    AUTHORS,
    KIND,
    MedusaConfig,
    MedusaDraft,
    MedusaDrafter,
    MedusaParams,
    load,
)
from longspec_jax.config.tree import TreeConfig
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.draft import Target
from longspec_jax.loading import choose_drafts
from longspec_jax.models import target as models
from tests.decoding.lossless import CONFIG
from tests.drafters.kit import assert_partitioned, edit, publish
from tests.kit import each_row, greedy_beliefs, random_target, view_of

MODEL = random_target(CONFIG)
TARGET = Target(CONFIG, MODEL)
SIZES = CONFIG.model_width, CONFIG.vocab_size, CONFIG.num_layers
OWN = MedusaConfig(3, 1, *SIZES, own_tables=True, dtype="float32")
SHARED = MedusaConfig(3, 2, *SIZES, own_tables=False, dtype="float32")


def random_heads(config: MedusaConfig, target: Any = MODEL, known: Any = None) -> MedusaDraft:
    """Random heads, which read the target's own taste; ``known`` are the tokens of their tables."""
    random = np.random.default_rng(4)
    params: dict[str, Any] = {}
    table = np.asarray(models.head_of(target))
    tokens = None if known is None else jax.numpy.asarray(known, "int32")
    table = table if known is None else table[known]
    for leaf in AUTHORS.heads_table(config).leaves:
        head, rest = leaf.path.split("/", 1)
        values = 0.1 * random.normal(size=leaf.shape)
        values = values + table if rest == "head" else values
        inner = params.setdefault(head, {})
        *parts, last = rest.split("/")
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = jax.numpy.asarray(values, config.dtype)
    shared = models.head_of(target) if known is None else jax.numpy.asarray(table)
    return MedusaDraft(config, MedusaParams(params, shared, tokens))


def published(folder: Path, draft: MedusaDraft) -> Path:
    """Heads as the authors leave them, or as vLLM asks for them where they have no biases."""
    config, tensors, of_vllm = draft.config, {}, not draft.config.bias
    for head in range(config.heads):
        own: Any = jax.tree.map(np.array, draft.params.heads[f"heads_{head}"])
        for block in range(config.blocks):
            linear = own[f"block_{block}"]
            name = f"blocks.{head}.layers.{block}" if of_vllm else f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = linear["kernel"].T.copy()
            if config.bias:
                tensors[f"{name}.bias"] = linear["bias"]
        if config.own_tables:
            name = f"lm_heads.{head}" if of_vllm else f"{head}.{config.blocks}"
            tensors[f"{name}.weight"] = own["head"]
    if not of_vllm:
        raw = {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks}
        publish(folder, tensors, raw, "medusa_lm_head.safetensors")
        return folder
    raw: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "hidden_size": config.model_width,
        "medusa_fc_bias": False,
        "model_type": "medusa",
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "original_lm_head": not config.own_tables,
        "vocab_size": config.vocab_size,
    }
    if draft.params.vocabulary is not None:
        tensors["token_map"] = np.array(draft.params.vocabulary, np.int64)
        raw["truncated_vocab_size"] = len(tensors["token_map"])
    publish(folder, tensors, raw)
    return folder


KNOWN = np.random.default_rng(1).permutation(CONFIG.vocab_size)[:60]
FEW = MedusaConfig(2, 2, *SIZES, own_tables=True, dtype="float32", bias=False, proposable=60)
OF_VLLM = {
    "whole": random_heads(replace(FEW, proposable=None)),
    "token_map": random_heads(FEW, known=KNOWN),
    "original": random_heads(replace(FEW, own_tables=False), known=KNOWN),
}
DRAFTS = {"own": random_heads(OWN), "shared": random_heads(SHARED)}


@partial(jax.jit, static_argnums=0)
def _proposed(drafter: MedusaDrafter, params: MedusaParams, hidden: Any) -> Any:
    none, zeros = jax.numpy.zeros((2, 1, 8, 8)), jax.numpy.zeros(2, int)
    view, noise = view_of(zeros, zeros + 1, none, none), greedy_beliefs(2, 3)
    tree = drafter.propose(Params(None, params), hidden, view, noise)
    return params.logits(drafter.config, hidden, 3), tree


@each_row("name", DRAFTS)
def test_heads_and_trees_by_hand(name: str) -> None:
    """The logits are those of the published module; the tree has the best sums of all paths."""
    draft = DRAFTS[name]
    hidden = np.random.default_rng(5).normal(size=(2, CONFIG.model_width)).astype(np.float32)
    expected = []
    for head in range(3):
        state, modules = hidden.astype(np.float64), draft.params.heads[f"heads_{head}"]
        for block in range(draft.config.blocks):
            weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), modules)
            kernel, bias = (weights[f"block_{block}"][part] for part in ("kernel", "bias"))
            linear = state @ kernel + bias
            state = state + linear / (1 + np.exp(-linear))
        table = modules["head"] if draft.config.own_tables else MODEL["head"]
        expected.append(state @ np.asarray(table, np.float64).T)
    logits, tree = _proposed(draft.drafter(TreeConfig((11, 22, 22), 12)), draft.params, hidden)
    np.testing.assert_allclose(logits, np.stack(expected, 1), atol=2e-4)
    for row in range(2):
        shares = [level[row] - np.log(np.exp(level[row]).sum()) for level in expected]
        best = [np.argsort(-level)[:11] for level in shares]
        sums = {
            path: sum(shares[depth][token] for depth, token in enumerate(path))
            for levels in (1, 2, 3)
            for path in itertools.product(*(map(int, each) for each in best[:levels]))
        }
        wanted = set(sorted(sums, key=lambda path: -sums[path])[:11])
        found: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, 12):
            found[node] = (*found[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        assert set(found.values()) - {()} == wanted


@each_row("name", DRAFTS | OF_VLLM)
def test_files_of_the_authors_and_of_vllm(name: str, tmp_path: Path) -> None:
    """Those of vLLM may store the target's LM head."""
    draft = (DRAFTS | OF_VLLM)[name]
    published(tmp_path, draft)
    if name == "original":
        publish(tmp_path, {"lm_heads.0.weight": np.array(MODEL["head"])}, {})
    [chosen] = choose_drafts([f"contrib.medusa:{tmp_path}"], {})
    assert chosen.kind is KIND
    found = load(tmp_path, TARGET)
    assert found.config == draft.config
    jax.tree.map(np.testing.assert_array_equal, found.params, draft.params)
    assert_partitioned(found.params.heads)


def _edited(folder: Path, change: Callable[[dict[str, np.ndarray]], Any], **raw: Any) -> Path:
    file = folder / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return edit(folder, **raw)


def _prefixed(tensors: dict[str, np.ndarray]) -> None:
    for name in list(tensors):
        tensors[f"medusa_head.{name}"] = tensors.pop(name)


def test_files_as_they_are_published(tmp_path: Path) -> None:
    """More heads than the file names, names of a whole model, and pickles."""
    published(tmp_path, DRAFTS["own"])
    _edited(tmp_path, _prefixed, medusa_num_heads=2, base_model_name_or_path="a/b", version="2")
    assert load(tmp_path, TARGET).config == OWN
    torch = pytest.importorskip("torch", reason="writes the pickles of the authors")
    file = tmp_path / "medusa_lm_head.safetensors"
    state = {name: torch.from_numpy(value) for name, value in load_file(file).items()}
    file.unlink()
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    found = load(tmp_path, TARGET)
    jax.tree.map(np.testing.assert_array_equal, found.params, DRAFTS["own"].params)


@each_row(
    ("change", "raw", "words"),
    [
        (lambda t: None, dict(medusa_num_heads=4), "missing 3.0.linear.weight (36, 36)"),
        (lambda t: t.pop("1.1.weight"), {}, "missing 1.1.weight (101, 36)"),
        (lambda t: t.update({"a": np.zeros(3)}), {}, "unexpected a (3,)"),
        (lambda t: t.pop("0.0.linear.weight"), {}, "these are no Medusa heads"),
        (lambda t: None, dict(medusa_num_heads=0), "medusa_num_heads"),
    ],
)
def test_refusals(change: Any, raw: dict[str, Any], words: str, tmp_path: Path) -> None:
    published(tmp_path, DRAFTS["own"])
    with pytest.raises(ValueError, match=re.escape(words)):
        load(_edited(tmp_path, change, **raw), TARGET)


def test_heads_of_another_target_and_of_scaled_logits_are_refused(tmp_path: Path) -> None:
    published(tmp_path, DRAFTS["own"])
    for field, size, words in (
        ("model_width", 40, "target of hidden_size=36, the target has hidden_size=40"),
        ("vocab_size", 103, "target of vocab_size=101, the target has vocab_size=103"),
    ):
        with pytest.raises(ValueError, match=words):
            load(tmp_path, Target(replace(CONFIG, **{field: size}), MODEL))
    scaled = edit(published(tmp_path / "scaled", OF_VLLM["whole"]), logit_scale=0.5)
    with pytest.raises(ValueError, match="logit_scale=0.5 is not supported"):
        load(scaled, TARGET)
    with pytest.raises(ValueError, match="4 levels, and the draft has 3 Medusa heads"):
        MedusaDrafter(OWN, TreeConfig((1,) * 4))


def test_default_trees_are_as_deep_as_there_are_heads() -> None:
    for heads in (1, 2, 5):
        trees = MedusaDraft(replace(OWN, heads=heads), DRAFTS["own"].params).default_trees
        levels = {tree.num_levels for tree in (*trees.cpu, *trees.gpu, *trees.large)}
        assert max(levels) == min(heads, 4)
