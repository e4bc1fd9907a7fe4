"""gpt-oss's layers: windows, sinks, biases and experts together change no token of any drafter's.

The oracle is one dense pass over the whole text, whose windows are masks and whose sinks are keys.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import ExpertsConfig, LayerConfig, Rotary, YarnRopeScaling
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import same_bits
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Drafter, NoDraft, Params
from longspec_jax.drafters.dflash.drafter import DFlashDrafter
from longspec_jax.drafters.eagle3.drafter import Eagle3Drafter
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.ngram import NgramDrafter
from longspec_jax.drafters.retrieval.blocks import Quest
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.sharding import make_mesh, param_shardings
from tests.decoding.lossless import (
    NEW,
    SHORT,
    assert_lossless,
    assert_same,
    dense,
    emitted_in_rounds,
    generate,
    prompts,
    request,
)
from tests.drafters.dflash import toys as dflash
from tests.drafters.eagle3 import toys as eagle3
from tests.kit import draft_params, random_draft, random_target, tiny_target_config

W = 7
ROTARY = Rotary(1e4, dataclasses.replace(YarnRopeScaling.usual(4.0, 16), truncate=False))
MIXTURE = ExpertsConfig(count=8, chosen=2, width=20, biases=True, limit=0.5)
CONFIG = tiny_target_config(
    architecture="GptOssForCausalLM",
    vocab_size=102,
    mlp_width=20,
    rope_scaling=ROTARY.scaling,
    qkv_bias=True,
    out_bias=True,
    attention_sinks=True,
    kinds=(LayerConfig(ROTARY, W, MIXTURE), LayerConfig(ROTARY, None, MIXTURE)),
    pattern=(0, 1),
)
TARGET = TargetModel(CONFIG)
LENGTHS = np.array([61, 30, 1], np.int32)
PROMPTS = prompts(CONFIG.vocab_size, LENGTHS)
MIXED = request((0.0, 0.7, 1.0), new=NEW)
DRAFT = DraftConfig.for_target(CONFIG, window=11)


@pytest.fixture(scope="module")
def weights() -> Any:
    """A random target; one of its sinks takes nearly all of a softmax, another nearly nothing."""
    params = random_target(CONFIG, seed=1)
    for layer in range(CONFIG.num_layers):
        attention = params[f"layers_{layer}"]["attention"]
        attention["sinks"] = attention["sinks"].at[0, :2].set(jnp.array([4.0, -20.0]))
    return params


@pytest.fixture(scope="module")
def plain(weights: Any) -> list[np.ndarray]:
    """The text of plain decoding."""
    return generate(TARGET, NoDraft(), Params(weights, ()), PROMPTS, LENGTHS, MIXED)[0]


def test_plain_decoding_is_the_dense_model(weights: Any, plain: list[np.ndarray]) -> None:
    """The greedy row draws the largest logit at each of its tokens; sinks change some of them."""
    text = np.asarray([[*PROMPTS[0], *plain[0]]], np.int32)
    logits = np.asarray(dense(CONFIG, weights, text))[0, 60:-1]
    np.testing.assert_array_equal(logits.argmax(axis=1), plain[0])
    assert len(set(plain[0].tolist())) > 2 and len({*np.concatenate(plain)}) > 20
    for change in (
        lambda layer: layer["attention"].update(sinks=layer["attention"]["sinks"] - 30),
        lambda layer: layer["attention"]["out"].update(bias=jnp.zeros(CONFIG.model_width)),
    ):
        other = jax.tree.map(lambda leaf: leaf, weights)
        for index in range(CONFIG.num_layers):
            change(other[f"layers_{index}"])
        changed = np.asarray(dense(CONFIG, other, text))[0, 60:-1]
        assert np.abs(changed - logits).max() > 0.1


SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)
EAGLE3 = eagle3.config_for(CONFIG)
PLAIN_LAYERS = dict(kinds=(), pattern=(), rope_scaling=None, out_bias=False, attention_sinks=False)
DFLASH = dflash.config_for(CONFIG, PLAIN_LAYERS)


INNER = LongSpecDrafter(DRAFT, TreeConfig((3, 2)))


def longspec(target: Any) -> Any:
    return draft_params(random_draft(DRAFT), target)


DRAFTERS: dict[str, tuple[Drafter, Any]] = {
    "longspec": (LongSpecDrafter(DRAFT, TreeConfig((2,) + (1,) * 8)), longspec),
    "eagle3": (
        Eagle3Drafter(EAGLE3, TreeConfig((3, 2))),
        lambda target: eagle3.random_params(EAGLE3),
    ),
    "dflash": (
        DFlashDrafter(DFLASH, TreeConfig((3, 2))),
        lambda target: dflash.random_params(DFLASH),
    ),
    "quest": (Hierarchy(INNER, Quest(CONFIG, SOME), TreeConfig((1,) * 7)), longspec),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_changes_a_token(name: str, weights: Any, plain: list[np.ndarray]) -> None:
    """One's tree is deeper than the window; another's partial forwards have sinks, too."""
    drafter, draft = DRAFTERS[name]
    params = Params(weights, draft(weights))
    rows, state = generate(TARGET, drafter, params, PROMPTS, LENGTHS, MIXED)
    assert_same(rows, plain)
    if name in ("longspec", "quest"):
        assert emitted_in_rounds(state) > 0


def test_heads_and_experts_of_two_devices_change_no_token(
    weights: Any, plain: list[np.ndarray]
) -> None:
    """Each has half of the heads, of their sinks and biases, and of the experts."""
    mesh = make_mesh(tp=2)
    target = jax.device_put(weights, param_shardings(mesh, weights))
    static, drafter = TargetModel(CONFIG, mesh=mesh.abstract_mesh), NgramDrafter(TreeConfig((1, 1)))
    rows, _ = generate(static, drafter, Params(target, ()), PROMPTS, LENGTHS, MIXED)
    assert_same(rows, plain)


def test_nor_does_a_cache_in_the_hosts_memory(weights: Any, plain: list[np.ndarray]) -> None:
    target, drafter = TargetModel(CONFIG, offload=True), StreamingDrafter(TreeConfig((3, 2)), SHORT)
    assert_lossless(target, drafter, Params(weights, ()), PROMPTS, LENGTHS, MIXED, plain)


def test_the_kernels_of_one_order_refuse_sinks() -> None:
    sixteen = dataclasses.replace(CONFIG, kinds=(), pattern=(), out_bias=False, dtype="bfloat16")
    assert not same_bits.choose_kernels(TargetModel(sixteen), None).same_bits
    with pytest.raises(NotImplementedError, match="attention sinks"):
        same_bits.choose_kernels(TargetModel(sixteen), True)
