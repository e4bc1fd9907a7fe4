"""Targets of experts: speculation changes no token, whatever the drafter, the mesh, the rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import batch_invariant
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.ops import hardware
from longspec_jax.sharding import make_mesh, param_shardings
from tests.decoding.lossless import (
    EVERY,
    LENGTHS,
    NEW,
    assert_lossless,
    assert_same,
    generate,
    prompts,
    request,
)
from tests.kit import draft_params, lowered, random_draft, random_target, tiny_target_config

MIXTURE = ExpertsConfig(count=8, chosen=2, width=20)
CONFIG = tiny_target_config(
    vocab_size=102,
    mlp_width=54,
    kinds=(LayerConfig(Rotary(), experts=MIXTURE), LayerConfig(Rotary())),
    pattern=(0, 1),
)
"""Its last layer is dense."""
DRAFT = DraftConfig.for_target(CONFIG, window=11)


@pytest.fixture(scope="module")
def models() -> Params:
    """A random target of experts, and a random draft."""
    target = random_target(CONFIG)
    return Params(target, draft_params(random_draft(DRAFT), target))


@pytest.fixture(scope="module")
def plain(models: Params) -> list[list[np.ndarray]]:
    """The text of plain decoding for each of the requests."""
    given = TargetModel(CONFIG), NoDraft(), models, prompts(CONFIG.vocab_size), LENGTHS
    return [generate(*given, req)[0] for req in EVERY]


@pytest.mark.full
def test_a_tree_changes_no_token(models: Params, plain: list[list[np.ndarray]]) -> None:
    """Every form of the experts' matmuls runs: 32 tokens of three rows are in a chunk."""
    drafter = LongSpecDrafter(DRAFT, TreeConfig((4, 5, 3), budget=9))
    given = TargetModel(CONFIG), drafter, models, prompts(CONFIG.vocab_size), LENGTHS
    for req, expected in zip(EVERY, plain, strict=True):
        assert_lossless(*given, req, expected, chunk=32)
    assert len({token for row in plain[0] for token in row}) > 20


@pytest.mark.full
def test_a_row_alone_is_a_row_of_a_batch(models: Params, plain: list[list[np.ndarray]]) -> None:
    """One token of one row gathers the weights of its experts; three rows compute all of them."""
    tokens = prompts(CONFIG.vocab_size)
    alone = request(0.7, 5, 0.9, seeds=(6,), stop=((-1,),), new=NEW[1:2])
    given = TargetModel(CONFIG), NoDraft(), models, tokens[1:2], LENGTHS[1:2]
    assert_same(generate(*given, alone)[0], plain[0][1:2])


@pytest.mark.full
def test_a_chain_on_a_mesh_changes_no_token(models: Params, plain: list[list[np.ndarray]]) -> None:
    """Each of two devices holds half of the experts."""
    mesh = make_mesh(tp=2)
    target = jax.device_put(models.target, param_shardings(mesh, models.target))
    static, drafter = TargetModel(CONFIG, mesh=mesh.abstract_mesh), NgramDrafter(TreeConfig((1, 1)))
    given = static, drafter, Params(target, ()), prompts(CONFIG.vocab_size), LENGTHS
    for req, expected in zip(EVERY, plain, strict=True):
        assert_lossless(*given, req, expected)


def test_the_kernels_of_one_order_serve_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    mosaic = hardware.mosaic_is_supported()
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)
    sizes = {
        "num_layers": 1,
        "head_width": 64,
        "model_width": 128,
        "mlp_width": 100,
        "vocab_size": 104,
    }

    def target(**changed: Any) -> TargetModel:
        experts = dataclasses.replace(ExpertsConfig(count=8, chosen=2, width=64), **changed)
        kinds = (LayerConfig(Rotary(), experts=experts),)
        config = tiny_target_config(dtype="bfloat16", kinds=kinds, pattern=(0,), **sizes)
        return TargetModel(config)

    assert batch_invariant.choose_kernels(target(), None).batch_invariant
    if mosaic:
        # In every pass over a layer: queries, attention and its output, router, experts, LM head.
        model, cache = batch_invariant.choose_kernels(target(), True), target().allocate(1, 4096)
        params = random_target(model.config)
        tokens, mask = jnp.zeros((1, 64), jnp.int32), jnp.ones((1, 64, 64), bool)
        operands = params, cache, tokens, tokens, mask, jnp.full(1, 2000)
        text = lowered(lambda *each: model.verify(*each, levels=5).logits, *operands)
        assert text.count("custom_call @mosaic_gpu") == 8
    for changed, reason in (
        ({"shared": 64}, "no kernel for a shared expert"),
        ({"renormalised": False}, "whose weights do not add up to 1"),
        ({"width": 20}, "weights in multiples of 64, not 20"),
        ({"count": 12}, "vocabularies in multiples of 8, not 12"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            batch_invariant.choose_kernels(target(**changed), True)
        assert not batch_invariant.choose_kernels(target(**changed), None).batch_invariant
