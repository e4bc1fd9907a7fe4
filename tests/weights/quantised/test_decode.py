"""A quantised target: the same text with and without speculation, and everything around it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax import LongSpec, make_mesh
from longspec_jax.ops.matmul import packed_shares
from longspec_jax.ops.matmul.packed_shares import PackedShares
from longspec_jax.ops.matmul.quantised_weights import quantised_matrices
from longspec_jax.weights.hf import load_target
from tests.kit import TOLERANCE, relative_error
from tests.weights.quantised.files import CONFIG, write
from train.target import run_target

PROMPTS = [[5, 17, 3, 5, 17, 3, 5, 17], [9, 2, 9, 2, 9]]
CALL: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.5, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPTQ with zero points and inputs in an order of their own: all that a matrix can have."""
    return write(tmp_path_factory.mktemp("gptq"), "GPTQ v1 act-order")


@pytest.fixture(scope="module")
def spec(folder: Path) -> LongSpec:
    return LongSpec.from_pretrained(folder, "streaming", dtype="float32")


def test_speculation_changes_no_token(spec: LongSpec) -> None:
    compared = spec.compare(PROMPTS, tree="chain:2", **CALL)
    assert compared.identical
    assert sum(compared.speculative.stats.acceptance_histogram[1:]) > 0


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_four_devices_change_no_token(folder: Path, kv_dtype: Any) -> None:
    """They share heads, widths and the model's width, and the heads of a cache in 8 bits."""
    alone, meshed = (
        LongSpec.from_pretrained(folder, dtype="float32", kv_dtype=kv_dtype, mesh=mesh)
        for mesh in (None, make_mesh(fsdp=2, tp=2))
    )
    assert meshed.generate(PROMPTS, **CALL).sequences == alone.generate(PROMPTS, **CALL).sequences


def test_plans_and_reports_say_what_the_weights_take(spec: LongSpec) -> None:
    assert spec.precision == "weights int4, activations float32"
    plan = spec.generate(PROMPTS, tree="chain:2", **CALL).stats.memory
    assert plan.target_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(spec.target_params))
    linears = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    whole = (2 * 104 * 64 + 5 * 64) * 4
    # Half a byte a weight, a scale and a zero point of 5 bytes for 32 of them, and the orders.
    assert plan.target_bytes == whole + linears // 2 + linears // 32 * 5 + 2 * (3 * 64 + 96) * 4


def test_a_cache_in_8_bits_beside_quantised_weights(spec: LongSpec, folder: Path) -> None:
    """Said in reports and plans."""
    small = LongSpec.from_pretrained(folder, "streaming", dtype="float32", kv_dtype="fp8")
    assert small.precision == "weights int4, activations float32, cache fp8"
    compared = small.compare(PROMPTS, tree="chain:2", **CALL)
    assert compared.identical
    assert compared.plain.sequences != spec.generate(PROMPTS, **CALL).sequences
    plans = [each.generate(PROMPTS, tree="chain:2", **CALL).stats.memory for each in (small, spec)]
    assert plans[0].cache_bytes * 4 == plans[1].cache_bytes
    with pytest.raises(ValueError, match="kv_dtype='int3' must be one of fp8"):
        LongSpec.from_pretrained(folder, kv_dtype="int3")


def test_the_same_bits_are_not_promised_where_no_kernel_keeps_them(folder: Path) -> None:
    config, params = load_target(folder, dtype="bfloat16")
    assert not LongSpec(config, params).identical
    with pytest.raises(NotImplementedError, match="weights in 16 bits"):
        LongSpec(config, params, batch_invariant=True)


def test_training_runs_the_dequantised_weights(spec: LongSpec, folder: Path) -> None:
    """Whole rows, and the MLP a chunk of tokens at a time."""
    _, whole = load_target(folder.parent / "whole")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 104, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    run = jax.jit(run_target, static_argnums=(0, 4))
    expected = run(CONFIG, whole, tokens, positions, 0).hidden
    for chunk in (0, 8):
        hidden = run(CONFIG, spec.target_params, tokens, positions, chunk).hidden
        np.testing.assert_allclose(hidden, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.full
def test_on_a_mesh_every_device_packs_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, gates, and two contractions whose partial results the norms add up."""
    sizes: dict[str, Any] = {"head_width": 64, "mlp_width": 256}
    folder = write(tmp_path, "FP8 by channel", config=dataclasses.replace(CONFIG, **sizes))

    def logits() -> np.ndarray:
        spec = LongSpec.from_pretrained(folder, dtype="bfloat16", mesh=make_mesh(data=2, tp=2))
        shares = [isinstance(each, PackedShares) for each in quantised_matrices(spec.target_params)]
        assert len(shares) == 8 and all(shares) == packs and any(shares) == packs
        found = spec.generate(PROMPTS, max_new_tokens=1, output_logits=True)
        return np.stack([np.asarray(row[0]) for row in found.logits])

    packs = False
    right = logits()
    packs = True
    monkeypatch.setattr(packed_shares, "hardware", SimpleNamespace(require_hopper=lambda _: None))
    assert relative_error(logits(), right) < 4 * TOLERANCE["bfloat16"]
