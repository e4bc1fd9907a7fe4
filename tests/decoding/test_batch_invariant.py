"""Where text is promised to be the same with and without speculation."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.config.layers import (
    ExpertsConfig,
    HeadsConfig,
    LayerConfig,
    RecurrenceConfig,
    Rotary,
)
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding import batch_invariant
from longspec_jax.decoding.prefill import vacant
from longspec_jax.decoding.round import one_round
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.draft import DefaultTrees
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.generation.candidates import likely_trees
from longspec_jax.ops import hardware
from longspec_jax.ops.hardware import AMPERE
from longspec_jax.sharding import make_mesh
from tests.kit import (
    draft_params,
    each_row,
    lowered,
    random_draft,
    random_target,
    tiny_target_config,
)
from tests.ops import gpus

WIDE = TargetModel(tiny_target_config())
HALF = TargetModel(tiny_target_config(dtype="bfloat16"))


def test_float32_is_identical_everywhere_but_not_in_every_bit() -> None:
    assert batch_invariant.is_identical(WIDE) and not WIDE.batch_invariant
    spread = dataclasses.replace(WIDE, mesh=make_mesh(data=2).abstract_mesh)
    assert batch_invariant.is_identical(spread)


def test_16_bits_are_identical_where_the_kernels_are_taken() -> None:
    assert not batch_invariant.is_identical(HALF)
    assert batch_invariant.is_identical(dataclasses.replace(HALF, batch_invariant=True))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as on a Hopper GPU, with a jax that has its kernels."""
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)


SIZES = dict(
    dtype="bfloat16", head_width=64, model_width=128, mlp_width=192, vocab_size=104, num_layers=2
)


def with_fields(**fields: Any) -> TargetModel:
    """A target whose sizes the kernels take, but for these fields."""
    return TargetModel(tiny_target_config(**{**SIZES, **fields}))


WIDER = LayerConfig(Rotary(), 40, heads=HeadsConfig(1, 512))
"""Of some layers of Gemma 4."""


def is_chosen(target: TargetModel, wanted: bool | None) -> bool:
    return batch_invariant.choose_kernels(target, wanted).batch_invariant


def assert_refused(target: TargetModel, words: str) -> None:
    """By name, with the reason; and never chosen without being named."""
    with pytest.raises(NotImplementedError, match=words):
        batch_invariant.choose_kernels(target, True)
    assert not is_chosen(target, None)


def experts(**fields: Any) -> dict[str, Any]:
    """Fields of a target whose layers are experts."""
    mixture = dataclasses.replace(ExpertsConfig(count=8, chosen=2, width=64), **fields)
    return dict(kinds=(LayerConfig(Rotary(), experts=mixture),), pattern=(0, 0))


def test_a_cpu_has_no_kernels_of_one_order() -> None:
    assert_refused(with_fields(), "needs an NVIDIA GPU")


@each_row("fields", [{}, dict(vocab_size=101), dict(kv_dtype="fp8"), experts()])
def test_the_kernels_serve_one_gpu(fields: dict[str, Any], hopper: None) -> None:
    target = with_fields(**fields)
    assert [is_chosen(target, wanted) for wanted in (True, None, False)] == [True, True, False]


def test_what_was_not_compared_yet_is_taken_only_by_name(hopper: None) -> None:
    windows = dict(kinds=(LayerConfig(Rotary(), 18), LayerConfig(Rotary())), pattern=(0, 1))
    mesh = make_mesh(data=2).abstract_mesh
    for fields in (dict(head_width=256), windows, dict(attention_sinks=True)):
        target = with_fields(**fields)
        assert is_chosen(target, None)
        spread = dataclasses.replace(target, mesh=mesh)
        assert is_chosen(spread, True) and not is_chosen(spread, None)
    assert is_chosen(TargetModel(QWEN35), None)
    capped = with_fields(attention_cap=50.0)
    assert is_chosen(capped, True) and not is_chosen(capped, None)
    assert not is_chosen(WIDE, True), "float32 is the same everywhere"


@each_row(
    ("fields", "reason"),
    [
        (dict(head_width=96), "head width 96 is not one of 64, 128, 256"),
        (dict(head_width=256, kv_dtype="fp8"), "256 is not one of 64, 128, which .* in 8 bits"),
        (dict(mlp_width=200), "weights in multiples of 32, not 200"),
        (dict(model_width=160), "weights in multiples of 64, not 160"),
        (experts(shared=64), "no kernel for a shared expert"),
        (experts(renormalised=False), "whose weights do not add up to 1"),
        (experts(width=20), "weights in multiples of 64, not 20"),
        (experts(count=12), "vocabularies in multiples of 8, not 12"),
        (dict(kinds=(LayerConfig(Rotary(), 17),), pattern=(0, 0)), "17 tokens is smaller than 18"),
        (dict(kinds=(WIDER, LayerConfig(Rotary())), pattern=(0, 1)), "head width 512 is not one"),
        (dict(value_norm=True), "not made for a second embedding, norms of values, or experts"),
    ],
)
def test_layers_that_the_kernels_do_not_serve(
    fields: dict[str, Any], reason: str, hopper: None
) -> None:
    assert_refused(with_fields(**fields), reason)


@each_row("where", [dict(offload=True), dict(attention="xla")])
def test_the_kernels_read_a_cache_on_the_device(where: dict[str, Any], hopper: None) -> None:
    target = dataclasses.replace(with_fields(), **where)
    assert_refused(target, "batch_invariant needs the cache on the device")


def test_other_gpus_take_them_by_name(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, narrow, sparse = with_fields(), with_fields(kv_dtype="fp8"), with_fields(**experts())
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(hardware, "compute_capability", lambda: capability)  # noqa: B023
        assert is_chosen(target, True) and not is_chosen(target, None)
        assert is_chosen(with_fields(attention_sinks=True, attention_cap=50.0), True)
    for other in (narrow, sparse):
        assert_refused(other, "a cache in 8 bits only on Hopper GPUs")
    monkeypatch.setattr(hardware, "compute_capability", lambda: (7, 5))
    assert_refused(target, r"needs compute capability 8\.0 or newer")


def test_a_jax_without_the_kernels_of_the_gpu_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: False)
    batch_invariant.warn_of_missing_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no Hopper kernels.*needs Python 3.12") as warned:
            for wanted in (False, None, None):
                assert not batch_invariant.choose_kernels(HALF, wanted).batch_invariant
    finally:
        batch_invariant.warn_of_missing_kernels.cache_clear()
    assert len(warned) == 1


def test_the_kernels_serve_meshes_of_hopper_gpus(hopper: None) -> None:
    def on(axes: dict[str, int], **fields: Any) -> TargetModel:
        mesh = make_mesh(**axes).abstract_mesh
        return dataclasses.replace(with_fields(**fields), mesh=mesh)

    for axes in ({"data": 2}, {"tp": 2}, {"data": 2, "fsdp": 2, "tp": 2}):
        assert is_chosen(on(axes), None)
    assert is_chosen(on({"tp": 2}, **experts()), True)
    assert_refused(on({"tp": 4}), "weights in multiples of 32, not 48")
    assert_refused(on({"data": 2}, out_bias=True), "no kernel for a bias after attention")


STATES = RecurrenceConfig(key_heads=16, value_heads=32, key_width=128, value_width=128)
QWEN35 = tiny_target_config(
    dtype="bfloat16",
    vocab_size=104,
    model_width=128,
    mlp_width=192,
    num_heads=16,
    num_kv_heads=4,
    head_width=256,
    qk_norm=True,
    offset_norms=True,
    gated_attention=True,
    kinds=(LayerConfig(recurrence=STATES), LayerConfig(Rotary(width=64))),
    pattern=(0, 1),
    rotary_width=64,
)
"""Heads and states of Qwen3.5-4B."""


def test_the_kernels_serve_recurrent_layers_of_one_shape(hopper: None) -> None:
    def with_states(*sizes: RecurrenceConfig) -> TargetModel:
        kinds = [LayerConfig(recurrence=each) for each in sizes] + [QWEN35.kinds[1]]
        config = dataclasses.replace(
            QWEN35, kinds=(*kinds,), pattern=(*range(len(kinds)),), num_layers=len(kinds)
        )
        return TargetModel(config)

    wide, few, other = (
        dataclasses.replace(STATES, **fields)
        for fields in (dict(key_width=512), dict(key_heads=4, value_heads=4), dict(value_heads=16))
    )
    meshed = dataclasses.replace(TargetModel(QWEN35), mesh=make_mesh(tp=2).abstract_mesh)
    assert_refused(with_states(wide), "keys of up to 256 numbers")
    assert_refused(with_states(few), "not 8")
    assert_refused(with_states(STATES, other), "of one shape")
    assert_refused(meshed, "on one device")


@pytest.mark.slow
@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")
@each_row("nodes", [1, 5, 16])
def test_no_sum_of_a_step_is_left_to_the_compiler(nodes: int) -> None:
    """It chooses the order by the number of nodes. Of integers the order does not matter."""
    call = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens, mask = call((1, nodes)), jax.ShapeDtypeStruct((1, nodes, nodes), jnp.bool_)
    with gpus.pretended(hardware.HOPPER):
        target = batch_invariant.choose_kernels(TargetModel(QWEN35), True)
        params = jax.eval_shape(partial(random_target, QWEN35))
        cache = jax.eval_shape(lambda: target.allocate(1, 1024))
        verify = jax.jit(
            lambda *operands: target.verify(*operands, levels=min(nodes - 1, 3)).logits
        )
        traced = verify.trace(params, cache, tokens, tokens, mask, call((1,)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text and "stablehlo.reduce" in text
    assert not re.search(r"stablehlo\.reduce.*tensor<f32>", text)


def test_trees_that_the_kernels_cannot_verify_are_not_chosen_and_are_refused_by_name() -> None:
    target, deep = dataclasses.replace(HALF, batch_invariant=True), TreeConfig((1,) * 17)
    assert not batch_invariant.serves_tree(target, deep) and batch_invariant.serves_tree(HALF, deep)
    batch_invariant.check_tree(target, TreeConfig((4, 16, 16, 16, 16)))
    with pytest.raises(
        ValueError, match="tree chain:17 has 18 nodes and 17 levels.*batch_invariant=Fal"
    ):
        batch_invariant.check_tree(target, deep)
    serves = partial(batch_invariant.serves_tree, target)
    defaults = DefaultTrees((deep,), (deep, PLAIN), (deep, TreeConfig((1,) * 8)))
    assert likely_trees(defaults, True, None, serves=serves) == (TreeConfig((1,) * 8),)


@pytest.mark.slow
@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")
def test_one_order_needs_no_triton() -> None:
    """Neither do the draft nor a prompt: with a jax that lacks it, all kernels are Mosaic's."""
    sizes = {"head_width": 64, "model_width": 128, "mlp_width": 192, "vocab_size": 5000}
    config = tiny_target_config(dtype="bfloat16", **sizes)
    draft = DraftConfig.for_target(config, window=64)
    table = random_target(config)
    params = Params(table, draft_params(random_draft(draft), table))
    given = jax.eval_shape(lambda: params)
    whole = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    with gpus.pretended(AMPERE, triton=False):
        target = batch_invariant.choose_kernels(TargetModel(config), True)
        drafter = LongSpecDrafter(draft, TreeConfig((4, 8, 3)))
        empty = partial(vacant, target, drafter, params, batch=1, capacity=1024, stop_width=1)
        rows = jax.eval_shape(empty)
        calls = (
            one_round.trace(target, drafter, SamplingKind.GREEDY, given, rows),
            jax.jit(target.prefill_chunk).trace(
                given.target, rows.cache, whole((1, 256)), whole((1,)), whole((1,))
            ),
        )
        texts = [each.lower(lowering_platforms=("cuda",)).as_text() for each in calls]
    assert [gpus.kernels(text, AMPERE) for text in texts] == ["Ampere"] * 2
    for name in ("residual_norm", "split_heads", "append_rows", "top_by_rank", "recent_tokens"):
        assert name in texts[0], name
    for name in ("prefix_splits", "merge_splits"):
        assert name in texts[0] and name in texts[1], name


@pytest.mark.skipif(not hardware.mosaic_is_supported(), reason="the kernels need jax 0.11 or newer")
def test_a_layer_of_experts_is_only_kernels(hopper: None) -> None:
    """Queries, attention and its output, router, experts and the LM head."""
    fields = experts() | dict(pattern=(0,), num_layers=1, mlp_width=100)
    model = batch_invariant.choose_kernels(with_fields(**fields), True)
    params, cache = random_target(model.config), model.allocate(1, 4096)
    tokens, mask = jnp.zeros((1, 64), jnp.int32), jnp.ones((1, 64, 64), bool)
    operands = params, cache, tokens, tokens, mask, jnp.full(1, 2000)
    text = lowered(lambda *each: model.verify(*each, levels=5).logits, *operands)
    assert text.count("custom_call @mosaic_gpu") == 8
