"""A target's own weights in 8 and 4 bits: what is written, and what it stands for."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contrib import quantise as write
from contrib.quantise import main
from longspec_jax.config.layers import LayerConfig, RecurrenceConfig, Rotary
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.sharding import path_name
from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.hf import load_target, save_target
from tests.kit import random_target, relative_error, tiny_target_config
from tests.weights.quantised.files import CONFIG
from tests.weights.quantised.test_load import dequantised

NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 target, one of whose groups is all zeros."""
    folder = tmp_path_factory.mktemp("source")
    save_target(folder, CONFIG, random_target(CONFIG), stop_tokens=(3,))
    file = folder / "model.safetensors"
    tensors = {name: each.astype(ml_dtypes.bfloat16) for name, each in load_file(file).items()}
    tensors[f"{NAME}.weight"][5, :32] = 0
    save_file(tensors, file)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_w4a16_is_compressed_tensors_with_the_scales_of_least_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(source), "--format=w4a16", f"--out={out}"]) == 0
    assert "14 linears in w4a16, groups of 32 inputs" in capsys.readouterr().out
    assert (out / "tokenizer_config.json").read_text() == "{}"
    said = json.loads((out / "config.json").read_text())
    assert said["torch_dtype"] == "bfloat16" and said["eos_token_id"] == [3]
    quantised = said["quantization_config"]
    assert quantised["format"] == "pack-quantized" and quantised["ignore"] == ["lm_head"]
    weights = quantised["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (4, 32, True)
    stored, tensors = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    packed, scale = tensors[f"{NAME}.weight_packed"], tensors[f"{NAME}.weight_scale"]
    assert packed.dtype == np.int32 and packed.shape == (64, 12)
    assert scale.dtype == ml_dtypes.bfloat16 and scale.shape == (64, 3)
    assert [*tensors[f"{NAME}.weight_shape"]] == [64, 96]
    np.testing.assert_array_equal(tensors["lm_head.weight"], stored["lm_head.weight"])
    # By compressed-tensors' own formula, and against every other scale that is tried.
    nibbles = packed.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    wide = stored[f"{NAME}.weight"].astype(np.float32).reshape(64, 3, 32)
    steps = scale.astype(np.float32)[..., None]
    found = (nibbles.reshape(64, 3, 32).astype(np.float32) - 8) * steps
    error = ((found - wide) ** 2).sum(-1)
    assert (found[5, 0] == 0).all()
    top = np.abs(wide).max(-1, keepdims=True)
    for share in write.CANDIDATES:
        other = (top / share).astype(ml_dtypes.bfloat16).astype(np.float32)
        other = np.where(other > 0, other, 1)
        codes = np.clip(np.round(wide / other), -8, 7)
        assert (error <= ((codes * other - wide) ** 2).sum(-1) * 1.001 + 1e-12).all()
    config, params = load_target(out)
    assert config.dtype == "bfloat16"
    kernel = dequantised(params)["layers_1"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(kernel, found.reshape(64, 96).T)


def test_fp8_has_a_scale_an_output(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    written = write.quantise(source, "fp8", out)
    assert written.group is None and written.bytes < 0.8 * written.source_bytes
    stored = load_file(source / "model.safetensors")
    with ExitStack() as stack:
        tensors = open_tensors(out, stack)
        codes, scale = (
            tensors[f"{NAME}.{name}"].read((slice(None), slice(None)))
            for name in ("weight", "weight_scale")
        )
    assert codes.dtype == ml_dtypes.float8_e4m3fn and scale.shape == (64, 1)
    found = codes.astype(np.float32) * scale.astype(np.float32)
    wide = stored[f"{NAME}.weight"].astype(np.float32)
    # Three bits after the leading one; smaller numbers than 2^-6 in steps of 2^-9.
    least = scale.astype(np.float32) * 2.0**-10
    assert (np.abs(found - wide) <= np.maximum(np.abs(wide) / 16, least) * 1.01).all()
    _, params = load_target(out, dtype="float32")
    kernel = dequantised(params)["layers_1"]["mlp"]["down"]["kernel"]
    np.testing.assert_array_equal(kernel, found.T)


def test_of_a_hybrid_some_matrices_are_dequantised(tmp_path: Path) -> None:
    """Recurrent layers, and an output whose inputs are reordered; each as the file has it."""
    recurrence = RecurrenceConfig(2, 4, 6, 10)
    hybrid = tiny_target_config(
        architecture="Qwen3_5ForCausalLM",
        head_width=8,
        rotary_width=4,
        qk_norm=True,
        offset_norms=True,
        gated_attention=True,
        kinds=(LayerConfig(recurrence=recurrence), LayerConfig(Rotary(width=4))),
        pattern=(0, 1),
    )
    whole = random_target(hybrid)
    save_target(tmp_path / "whole", hybrid, whole)
    write.quantise(tmp_path / "whole", "fp8", tmp_path / "out")
    config, params = load_target(tmp_path / "out")
    assert config == hybrid
    quantised = [path for path, leaf in flat(params).items() if isinstance(leaf, QuantisedMatrix)]
    assert {*quantised} == {
        "layers_0/mlp/gate_up/kernel",
        "layers_0/mlp/down/kernel",
        "layers_1/mlp/gate_up/kernel",
        "layers_1/mlp/down/kernel",
        "layers_1/attention/qkv/fused/kernel",
    }
    found = flat(dequantised(params))
    for path, expected in flat(whole).items():
        assert relative_error(found[path].reshape(expected.shape), expected) < 0.04, path


def flat(params: Any) -> dict[str, Any]:
    """By path, quantised kernels as one."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix)
    )
    return {path_name(path): leaf for path, leaf in leaves}


def test_several_files_have_an_index(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "FILE_BYTES", 40_000)
    write.quantise(source, "w4a16", tmp_path / "several")
    files = sorted(path.name for path in (tmp_path / "several").glob("model-*"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    monkeypatch.undo()
    write.quantise(source, "w4a16", tmp_path / "one")
    one, several = (load_target(tmp_path / name)[1] for name in ("one", "several"))
    for found, expected in zip(*map(_leaves, (several, one)), strict=True):
        np.testing.assert_array_equal(found, expected)


def _leaves(params: Any) -> list[Any]:
    return [np.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(params)]


def test_refusals(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    write.quantise(source, "fp8", out)
    for given, named in (
        ([str(source), "--format=fp8", f"--out={out}"], "exists"),
        ([str(out), "--format=fp8", f"--out={tmp_path / 'x'}"], "quantised already"),
        ([str(source), "--format=nf4", f"--out={tmp_path / 'x'}"], "--format"),
    ):
        assert main(given) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors[f"{NAME}.weight"][0, 0] = np.inf
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match="holds NaN or infinite values"):
        write.quantise(bad, "fp8", tmp_path / "y")
    assert not (tmp_path / "y").exists(), "or the next try would be refused"
