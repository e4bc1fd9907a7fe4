"""MXFP4's experts: values, order and scales by the format's own table, and whole checkpoints."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longspec_jax.models.experts import Experts
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.sharding import make_mesh, param_shardings
from longspec_jax.weights.checkpoint import Tensor
from longspec_jax.weights.hf import load_target, target_bytes
from longspec_jax.weights.quantised import mxfp4
from tests.kit import normal

VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def tensor(values: np.ndarray, dtype: str = "U8") -> Tensor:
    return Tensor(values.shape, dtype, values.__getitem__, Path("model.safetensors"))


def drawn(experts: int, outputs: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (experts, outputs, groups, 16)).astype(np.uint8)
    return blocks, random.integers(120, 126, (experts, outputs, groups)).astype(np.uint8)


def test_experts_are_tables_values_times_powers_of_two() -> None:
    blocks, exponents = drawn(3, 5, 2)
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1).reshape(3, 5, 2, 32)
    whole = pairs * np.float32(2) ** (exponents.astype(np.float32) - 127)[..., None]
    whole = whole.reshape(3, 5, 64)
    codes, scale = mxfp4.stored(tensor(blocks), tensor(exponents))
    assert codes.shape == (3, 32, 5) and scale.shape == (3, 2, 5)
    every = slice(None)
    stored = [each.read((every,) * 3).swapaxes(1, 2) for each in (codes, scale)]
    matrix = QuantisedMatrix(*map(jnp.asarray, stored), group=mxfp4.GROUP, floating=True)
    np.testing.assert_array_equal(matrix.dequantised(jnp.float32), whole)
    for index in (slice(1, 3), slice(0, 32), slice(2, 4)), (slice(0, 1), slice(13, 19), every):
        found = codes.read(index).swapaxes(1, 2)
        np.testing.assert_array_equal(found, stored[0][index[0], index[2], index[1]])
    found = scale.read((slice(1, 2), slice(1, 2), slice(3, 5)))
    np.testing.assert_array_equal(found, stored[1][1:2, 3:5, 1:2].swapaxes(1, 2))
    # A power of two and three bits: nothing is lost in 16 bits.
    np.testing.assert_array_equal(whole.astype(jnp.bfloat16).astype(np.float32), whole)


def test_other_tensors_are_refused() -> None:
    blocks, exponents = np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 127, np.uint8)
    with pytest.raises(ValueError, match=r"blocks are U8 \(1, 2, 1, 16\) and scales F32"):
        mxfp4.stored(tensor(blocks), tensor(exponents.astype(np.float32), "F32"))
    exponents[0, 1] = 255
    whole = (slice(None),) * 3
    with pytest.raises(ValueError, match="a scale is NaN"):
        mxfp4.stored(tensor(blocks), tensor(exponents))[1].read(whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss as it is published: experts in MXFP4, everything else in bfloat16."""
    from tests.models.families import make_model, torch

    folder = tmp_path_factory.mktemp("gpt-oss")
    model = make_model("gpt-oss", hidden_size=64)
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, exponents = drawn(experts, outputs, inputs // 32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents - 3}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _edit(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def _edit(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def test_a_checkpoint_is_the_model_that_transformers_dequantises(folder: Path) -> None:
    from tests.models.families import torch, transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    config, params = load_target(folder, dtype="bfloat16")
    assert config.attention_sinks and config.layer(0).experts is not None
    for index, layer in enumerate(model.model.layers):
        own, experts = params[f"layers_{index}"]["mlp"], layer.mlp.experts
        gate_up, down = (
            each.detach().to(torch.float32).numpy().swapaxes(1, 2)
            for each in (experts.gate_up_proj, experts.down_proj)
        )
        found = np.asarray(own["expert_gate_up"].dequantised(jnp.float32))
        for half in (0, 1):  # Gate and up by turns: of every expert's rows there, of experts here.
            np.testing.assert_array_equal(found[half::2], gate_up[:, half::2])
        np.testing.assert_array_equal(own["expert_down"].dequantised(jnp.float32), down)
        assert np.abs(found).max() > 0.1
    # A plan counts what is loaded: experts in 4 bits and a scale, not in 16.
    experts = 2 * 8 * (3 * 32 * 64)
    assert 5 / 8 * experts < target_bytes(folder, dtype="bfloat16") < 1.5 * experts


def test_a_layer_multiplies_what_it_was_given(folder: Path) -> None:
    """One row, a tree's and a chunk's: the three forms of the experts' matmuls."""
    config, params = load_target(folder, dtype="float32")
    experts: Any = config.layer(0).experts
    layer: Any = Experts(config.model_width, experts, jnp.dtype(jnp.float32))
    apply = jax.jit(layer.apply)
    own = params["layers_0"]["mlp"]
    names = "expert_gate_up", "expert_down"
    whole = own | {name: own[name].dequantised(jnp.float32) for name in names}
    for rows in (1, 9, 70):
        x = normal(rows, 1, rows, config.model_width)
        found, expected = (apply({"params": each}, x) for each in (own, whole))
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=1e-5)
    # On a mesh every device holds its experts' codes and scales.
    mesh, tree = make_mesh(tp=2), {"mlp": {name: own[name] for name in names}}
    cut = jax.device_put(tree, param_shardings(mesh, tree))
    for here, there in zip(jax.tree.leaves(tree), jax.tree.leaves(cut), strict=True):
        assert there.sharding.shard_shape(there.shape)[0] * 2 == len(here)


def test_files_that_disagree_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    gone = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({k: v for k, v in tensors.items() if k != gone}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.down_proj is of MXFP4"):
        load_target(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    _edit(tmp_path, quantization_config=None)
    with pytest.raises(ValueError, match=r"unexpected model.layers.0.mlp.experts.down_proj_blocks"):
        load_target(tmp_path)
