"""Recurrent layers: text that is the same however it is decoded.

The oracle is one pass over the whole text by the recurrence's definition, token by token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.config.layers import LayerConfig, RecurrenceConfig, Rotary
from longspec_jax.config.tree import TreeConfig
from longspec_jax.decoding import same_bits
from longspec_jax.decoding.rows import Request
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import NoDraft, Params
from longspec_jax.drafters.longspec.config import DraftConfig
from longspec_jax.drafters.longspec.drafter import LongSpecDrafter
from longspec_jax.drafters.retrieval.blocks import Quest
from longspec_jax.drafters.retrieval.hierarchy import Hierarchy
from longspec_jax.drafters.retrieval.selection import SinksAndRecent
from longspec_jax.drafters.streaming import StreamingDrafter
from longspec_jax.ops.placement import tree_bytes
from longspec_jax.ops.recurrence import recurrence
from longspec_jax.ops.recurrence.delta_rule import delta_rule_reference
from longspec_jax.ops.recurrence.operands import RecurrentState, RecurrentTokens, empty_state
from longspec_jax.ops.selection.blocks import BlockBudget
from longspec_jax.sharding import make_mesh, param_shardings
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
from tests.kit import (
    TOLERANCE,
    draft_params,
    random_draft,
    random_target,
    relative_error,
    tiny_target_config,
)

SIZES = RecurrenceConfig(key_heads=2, value_heads=4, key_width=6, value_width=10, taps=4)
CONFIG = tiny_target_config(
    architecture="Qwen3_5ForCausalLM",
    num_layers=4,
    head_width=8,
    rotary_width=4,
    mlp_width=54,
    vocab_size=102,
    qk_norm=True,
    offset_norms=True,
    gated_attention=True,
    kinds=(LayerConfig(recurrence=SIZES), LayerConfig(Rotary(width=4))),
    pattern=(0, 1, 0, 0),
)
"""As of Qwen3.5, but that its last layers are recurrent: drafts read the second one."""
TARGET = TargetModel(CONFIG)
LENGTHS = np.array([61, 30, 1], np.int32)
NEW = np.array([40, 30, 20], np.int32)
PROMPTS = prompts(CONFIG.vocab_size, LENGTHS)
MIXED: Request = request((0.0, 0.7, 1.0), new=NEW)
GIVEN = PROMPTS, LENGTHS, MIXED
DRAFT = DraftConfig.for_target(CONFIG, window=11)
LONGSPEC = LongSpecDrafter(DRAFT, TreeConfig((3, 2, 1, 1, 1), budget=7))


def remembering(params: Any) -> Any:
    """The parameters with states that fade by a tenth a token, not by half."""
    for index in CONFIG.recurrent_layers:
        bias = params[f"layers_{index}"]["recurrence"]["decay_bias"]
        params[f"layers_{index}"]["recurrence"]["decay_bias"] = bias - 2.0
    return params


@pytest.fixture(scope="module")
def models() -> Params:
    """A random target, and a draft of which part is the target's own taste."""
    target = remembering(random_target(CONFIG))
    return Params(target, draft_params(random_draft(DRAFT), target))


@pytest.fixture(scope="module")
def plain(models: Params) -> list[np.ndarray]:
    """The text of plain decoding."""
    return generate(TARGET, NoDraft(), models, *GIVEN)[0]


def recur(layer: int, tokens: RecurrentTokens, taps: jax.Array) -> jax.Array:
    """The recurrence's definition, token by token."""
    length, state = tokens.inputs.shape[1], empty_state(SIZES, 1, "float32")
    padded = jnp.pad(tokens.inputs, ((0, 0), (3, 0), (0, 0), (0, 0)))
    mixed = sum(padded[:, tap : tap + length] * taps[:, :, tap] for tap in range(4))
    operands = recurrence._operands(jax.nn.silu(mixed), tokens, state)
    return delta_rule_reference(state.memory, operands)[1]


def test_plain_decoding_is_the_dense_model(models: Params, plain: list[np.ndarray]) -> None:
    """The greedy row draws the largest logit at every one of its forty tokens."""
    text = np.concatenate([PROMPTS[0], plain[0]])[None]
    logits = np.asarray(dense(CONFIG, models.target, text, recur))[0, 60:100]
    np.testing.assert_array_equal(logits.argmax(axis=1), plain[0])
    assert len(set(plain[0].tolist())) > 5


def test_a_state_is_that_of_the_committed_tokens(models: Params, plain: list[np.ndarray]) -> None:
    """Of rows of unlike lengths, behind trees that were accepted in part."""
    state = assert_lossless(TARGET, LONGSPEC, models, *GIVEN, plain)
    for row, own in enumerate(plain):
        # The last token is emitted, and not committed.
        text = jnp.asarray(np.concatenate([PROMPTS[row, : LENGTHS[row]], own[:-1]]))[None]
        cache, at = TARGET.allocate(1, 128), jnp.zeros(1, jnp.int32)
        last = jnp.asarray([text.shape[1] - 1])
        _, cache, *_ = jax.jit(TARGET.prefill_chunk)(
            models.target, cache, jnp.pad(text, ((0, 0), (0, 110 - text.shape[1]))), at, last
        )
        for layer, expected in cache.states.items():
            found: RecurrentState = state.rows.cache.states[layer]
            for mine, theirs in ((found.memory, expected.memory), (found.inputs, expected.inputs)):
                assert relative_error(mine[row], theirs[0]) <= 20 * TOLERANCE["float32"]


SOME = BlockBudget(slots=20, sinks=4, recent=8, block=4)
NARROW = LongSpecDrafter(DRAFT, TreeConfig((3, 2)))
DRAFTERS = {
    "streaming": StreamingDrafter(TreeConfig((3, 2)), SHORT),
    "retrieved blocks": Hierarchy(NARROW, Quest(CONFIG, SOME), TreeConfig((1,) * 7)),
    "a tree behind a chain": Hierarchy(
        NARROW, SinksAndRecent(4, 16), TreeConfig((1, 1, 1, 1, 3, 2), chain=4)
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_changes_a_token(name: str, models: Params, plain: list[np.ndarray]) -> None:
    assert_lossless(TARGET, DRAFTERS[name], models, *GIVEN, plain)


def test_a_chain_on_a_mesh_changes_no_token(models: Params, plain: list[np.ndarray]) -> None:
    """Each of two devices holds half of the heads, and of the states."""
    mesh = make_mesh(tp=2)
    target = jax.device_put(models.target, param_shardings(mesh, models.target))
    static = TargetModel(CONFIG, mesh=mesh.abstract_mesh)
    drafter = StreamingDrafter(TreeConfig((1, 1)), SHORT)
    state = assert_lossless(static, drafter, Params(target, ()), *GIVEN, plain)
    [memory, _] = jax.tree.leaves(state.rows.cache.states[0])
    assert memory.addressable_shards[0].data.shape[1] == SIZES.key_heads // 2


def test_nor_does_a_cache_in_the_hosts_memory(models: Params, plain: list[np.ndarray]) -> None:
    """States stay on the device, and so does the one layer of attention, which drafts read."""
    target, drafter = TargetModel(CONFIG, offload=True), StreamingDrafter(TreeConfig((3, 2)), SHORT)
    assert_lossless(target, drafter, models, *GIVEN, plain)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_the_bytes_of_states_are_known(offload: bool) -> None:
    """They do not grow with the capacity, which the one layer of attention has."""
    target = TargetModel(CONFIG, offload=offload)
    planned = [target.cache_bytes(3, capacity) for capacity in (160, 320)]
    assert [tree_bytes(target.allocate(3, slots)) for slots in (160, 320)] == [
        each.device for each in planned
    ]
    row = 2 * CONFIG.num_kv_heads * CONFIG.head_width * 4
    assert planned[1].device - planned[0].device == 3 * 160 * row
    assert all(each.host == 0 for each in planned)


def test_a_trial_that_shares_the_cache_leaves_the_states_as_they_were(
    models: Params, plain: list[np.ndarray]
) -> None:
    assert_a_trial_changes_nothing(TARGET, LONGSPEC, models, GIVEN, plain, 9)


def test_rows_that_come_and_go_share_prefixes_by_the_hosts_memory(
    models: Params, plain: list[np.ndarray]
) -> None:
    """Five requests in two slots, one of them cancelled. Slots alone share nothing.

    The first prompt returns with the chunks that the host kept, and the states behind them.
    """
    assert_rows_come_and_go(TARGET, LONGSPEC, models, *GIVEN, plain)


def test_the_layer_of_attention_may_have_a_cache_in_8_bits(models: Params) -> None:
    """Its keys and values are 8 bits wide, and the states are not."""
    target = TargetModel(dataclasses.replace(CONFIG, kv_dtype="fp8"))
    cache, given = target.allocate(2, 64), jnp.zeros((2, 5), jnp.int32)
    at, last = jnp.zeros(2, jnp.int32), jnp.full(2, 4)
    found = jax.eval_shape(target.prefill_chunk, models.target, cache, given, at, last).cache
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, cache)
    assert found.keys[1].dtype.itemsize == 1
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.states)} == {"float32"}


def test_the_kernels_of_one_order_refuse_recurrent_layers() -> None:
    sixteen = TargetModel(dataclasses.replace(CONFIG, dtype="bfloat16"))
    assert not same_bits.choose_kernels(sixteen, None).same_bits
    with pytest.raises(NotImplementedError, match="no kernel for recurrent layers"):
        same_bits.choose_kernels(sixteen, True)
