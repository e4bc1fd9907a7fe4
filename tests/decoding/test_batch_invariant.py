"""Where text is promised to be the same with and without speculation."""

import dataclasses
import functools
from typing import Any

import pytest

from longspec_jax.config.layers import ExpertsConfig, LayerConfig
from longspec_jax.config.tree import PLAIN, TreeConfig
from longspec_jax.decoding import batch_invariant
from longspec_jax.decoding.target import TargetModel
from longspec_jax.drafters.draft import DefaultTrees
from longspec_jax.generation.models import likely_trees
from longspec_jax.ops import hardware
from longspec_jax.sharding import make_mesh
from tests.kit import tiny_target_config

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
        ({"head_width": 96}, "neither 64 nor 128"),
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


def test_trees_that_the_kernels_cannot_verify_are_not_chosen_and_are_refused_by_name() -> None:
    target, deep = dataclasses.replace(HALF, batch_invariant=True), TreeConfig((1,) * 17)
    assert not batch_invariant.serves_tree(target, deep) and batch_invariant.serves_tree(HALF, deep)
    batch_invariant.check_tree(target, TreeConfig((4, 16, 16, 16, 16)))
    with pytest.raises(
        ValueError, match="tree chain:17 has 18 nodes and 17 levels.*batch_invariant=Fal"
    ):
        batch_invariant.check_tree(target, deep)
    serves = functools.partial(batch_invariant.serves_tree, target)
    defaults = DefaultTrees((deep,), (deep, PLAIN), (deep, TreeConfig((1,) * 8)))
    assert likely_trees(defaults, True, None, serves=serves) == (TreeConfig((1,) * 8),)
