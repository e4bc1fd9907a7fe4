"""Where text is promised to be the same with and without speculation."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longspec_jax.config.layers import ExpertsConfig, LayerConfig, RecurrenceConfig, Rotary
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding import batch_invariant
from longspec_jax.decoding.prefill import vacant
from longspec_jax.decoding.round import one_round
from longspec_jax.decoding.sampling import SamplingKind
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.base import Params
from longspec_jax.drafters.draft import DefaultTrees
from longspec_jax.drafters.longspec import DraftConfig, LongSpecDrafter
from longspec_jax.generation.models import likely_trees
from longspec_jax.ops import hardware
from longspec_jax.ops.hardware import AMPERE
from longspec_jax.sharding import make_mesh
from tests.kit import draft_params, each_row, random_draft, random_target, tiny_target_config
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


def test_the_kernels_serve_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"head_width": 64, "model_width": 128, "mlp_width": 192, "vocab_size": 104}
    target = TargetModel(tiny_target_config(dtype="bfloat16", **sizes))
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        batch_invariant.choose_kernels(target, True)
    assert not batch_invariant.choose_kernels(target, None).batch_invariant
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)
    assert batch_invariant.choose_kernels(target, True) == batch_invariant.choose_kernels(
        target, None
    )
    assert batch_invariant.choose_kernels(target, None).batch_invariant
    assert not batch_invariant.choose_kernels(target, False).batch_invariant
    odd = dataclasses.replace(target.config, vocab_size=101)
    assert batch_invariant.choose_kernels(
        dataclasses.replace(target, config=odd), None
    ).batch_invariant
    narrow = dataclasses.replace(target, config=dataclasses.replace(target.config, kv_dtype="fp8"))
    assert batch_invariant.choose_kernels(narrow, None).batch_invariant
    broad = dataclasses.replace(target, config=dataclasses.replace(target.config, head_width=256))
    assert batch_invariant.choose_kernels(broad, True).batch_invariant
    assert not batch_invariant.choose_kernels(broad, None).batch_invariant  # Not compared yet.
    assert not batch_invariant.choose_kernels(WIDE, True).batch_invariant
    for other in (
        dataclasses.replace(target, offload=True),
        dataclasses.replace(target, attention="xla"),
    ):
        with pytest.raises(
            NotImplementedError, match="batch_invariant needs the cache on the device"
        ):
            batch_invariant.choose_kernels(other, True)
        assert not batch_invariant.choose_kernels(other, None).batch_invariant
    for uneven, reason in (
        ({"head_width": 96}, "head width 96 is none of 64, 128, 256"),
        ({"head_width": 256, "kv_dtype": "fp8"}, "256 is none of 64, 128, which .* in 8 bits"),
        ({"mlp_width": 200}, "weights in multiples of 32, not 200"),
        ({"model_width": 160}, "weights in multiples of 64, not 160"),
    ):
        config = dataclasses.replace(target.config, **uneven)
        with pytest.raises(NotImplementedError, match=reason):
            batch_invariant.choose_kernels(dataclasses.replace(target, config=config), True)
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(hardware, "compute_capability", lambda: capability)  # noqa: B023
        assert not batch_invariant.choose_kernels(target, None).batch_invariant
        assert batch_invariant.choose_kernels(target, True).batch_invariant
    experts = LayerConfig(experts=ExpertsConfig(count=8, chosen=2, width=64))
    sparse = dataclasses.replace(target.config, kinds=(experts,), pattern=(0, 0))
    for config in (narrow.config, sparse):
        with pytest.raises(NotImplementedError, match="a cache in 8 bits on Hopper GPUs alone"):
            batch_invariant.choose_kernels(dataclasses.replace(target, config=config), True)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (7, 5))
    with pytest.raises(NotImplementedError, match=r"needs compute capability 8\.0 or newer"):
        batch_invariant.choose_kernels(target, True)


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


def test_the_kernels_serve_meshes_of_hopper_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)
    sizes = {"head_width": 64, "model_width": 128, "mlp_width": 192, "vocab_size": 104}
    config = tiny_target_config(dtype="bfloat16", **sizes)

    def chosen(axes: dict[str, int], wanted: bool | None = True, **other: Any) -> TargetModel:
        mesh = make_mesh(**axes).abstract_mesh
        target = TargetModel(dataclasses.replace(config, **other), mesh=mesh)
        return batch_invariant.choose_kernels(target, wanted)

    for axes in ({"data": 2}, {"tp": 2}, {"data": 2, "fsdp": 2, "tp": 2}):
        assert chosen(axes, wanted=None).batch_invariant
    with pytest.raises(NotImplementedError, match="weights in multiples of 32, not 48"):
        chosen({"tp": 4})
    experts = LayerConfig(experts=ExpertsConfig(count=8, chosen=2, width=64))
    assert chosen({"tp": 2}, kinds=(experts,), pattern=(0, 0)).batch_invariant
    with pytest.raises(NotImplementedError, match="no kernel for a bias behind attention"):
        chosen({"data": 2}, out_bias=True)


SIZES = RecurrenceConfig(key_heads=16, value_heads=32, key_width=128, value_width=128)
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
    kinds=(LayerConfig(recurrence=SIZES), LayerConfig(Rotary(width=64))),
    pattern=(0, 1),
    rotary_width=64,
)
"""Heads and states of Qwen3.5-4B."""


def test_the_kernels_serve_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "mosaic_is_supported", lambda: True)
    target = TargetModel(QWEN35)
    assert batch_invariant.choose_kernels(target, True).batch_invariant
    assert not batch_invariant.choose_kernels(target, None).batch_invariant  # Not compared yet.

    def with_sizes(*sizes: RecurrenceConfig) -> TargetModel:
        kinds = [LayerConfig(recurrence=each) for each in sizes] + [QWEN35.kinds[1]]
        config = dataclasses.replace(
            QWEN35, kinds=(*kinds,), pattern=(*range(len(kinds)),), num_layers=len(kinds)
        )
        return TargetModel(config)

    refused = (
        (with_sizes(dataclasses.replace(SIZES, key_width=512)), "keys of up to 256 numbers"),
        (with_sizes(dataclasses.replace(SIZES, key_heads=4, value_heads=4)), "not 8"),
        (with_sizes(SIZES, dataclasses.replace(SIZES, value_heads=16)), "of one shape"),
        (dataclasses.replace(target, mesh=make_mesh(tp=2).abstract_mesh), "on one device"),
    )
    for other, words in refused:
        with pytest.raises(NotImplementedError, match=words):
            batch_invariant.choose_kernels(other, True)
        assert not batch_invariant.choose_kernels(other, None).batch_invariant


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
