"""Quantised checkpoints of every format load as the weights that they stand for."""

import dataclasses
import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contrib.quantise import quantise
from longspec_jax.config.layers import ExpertsConfig, HeadScales, LayerConfig, Rotary
from longspec_jax.ops.matmul.quantised_weights import QuantisedMatrix
from longspec_jax.sharding import make_mesh
from longspec_jax.weights.checkpoint import open_tensors
from longspec_jax.weights.hf import load_target, save_target, target_bytes
from tests.kit import each_row
from tests.weights.quantised.files import CONFIG, GROUP, KINDS, compressed, packed, write


@jax.jit
def kernel_of(matrix: QuantisedMatrix) -> jax.Array:
    return matrix.kernel(jnp.float32)


def dequantised(params: Any) -> Any:
    """The parameters, their quantised kernels as whole ones."""

    def whole(path: tuple, leaf: Any) -> Any:
        return kernel_of(leaf) if isinstance(leaf, QuantisedMatrix) else leaf

    return jax.tree_util.tree_map_with_path(
        whole, params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix)
    )


def matrices(params: Any) -> list[QuantisedMatrix]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    return [leaf for leaf in leaves if isinstance(leaf, QuantisedMatrix)]


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, of 8-bit floats too."""
    with ExitStack() as stack:
        return {
            name: tensor.read((slice(None),) * len(tensor.shape))
            for name, tensor in open_tensors(folder, stack).items()
        }


def assert_stands_for(params: Any, folder: Path) -> None:
    """Bit for bit the weights of ``folder/whole``."""
    _, expected = load_target(folder / "whole")
    flat = jax.tree_util.tree_flatten_with_path(dequantised(params))[0]
    for (path, found), leaf in zip(flat, jax.tree.leaves(expected), strict=True):
        found = found.reshape(leaf.shape)  # A kernel over heads contracts them as one axis.
        np.testing.assert_array_equal(found, leaf, err_msg=str(path))


@each_row("kind", KINDS)
def test_every_format_stands_for_its_weights(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, kind)
    config, params = load_target(folder)
    assert config == CONFIG
    assert len(matrices(params)) == 4 * CONFIG.num_layers
    assert_stands_for(params, tmp_path)
    assert target_bytes(folder, dtype="float32") == sum(
        leaf.nbytes for leaf in jax.tree.leaves(params)
    )
    four = [each for each in matrices(params) if each.packed]
    assert len(four) == (0 if "8" in kind else len(matrices(params)))
    if "act-order" in kind:
        assert all(each.order is not None for each in matrices(params))
    elif "GPTQ" in kind:
        assert all(each.order is None for each in matrices(params))
    symmetric = not re.search("asymmetric|GPTQ.*(act-order|v2)|AWQ$", kind)
    assert all((each.zero is None) == symmetric for each in matrices(params))


@pytest.mark.full
@each_row("kind", KINDS)
def test_a_mesh_cuts_heads_and_widths(tmp_path: Path, kind: str) -> None:
    """Each device holds its heads' and its width's share of the codes, and reads no others."""
    folder = write(tmp_path, kind)
    _, params = load_target(folder, mesh=make_mesh(fsdp=2, tp=2))
    assert_stands_for(params, tmp_path)
    [qkv, out, *_] = (params["layers_0"]["attention"][name] for name in ("qkv", "out"))
    codes = qkv["fused"]["kernel"].codes
    assert codes.sharding.shard_shape(codes.shape) == (1, 4, 16, codes.shape[-1] // 2)
    codes = out["kernel"].codes
    assert codes.sharding.shard_shape(codes.shape) == (32, codes.shape[-1] // 2)
    codes = params["layers_1"]["mlp"]["gate_up"]["kernel"].codes
    assert codes.sharding.shard_shape(codes.shape) == (2, 48, codes.shape[-1] // 2)


@each_row("kind", ["FP8 by block", "W4A16 asymmetric", "GPTQ v1 act-order", "AWQ"])
def test_families_with_fused_linears_and_other_rotations(tmp_path: Path, kind: str) -> None:
    """Query, key and value are rows of one quantised matrix, and a head's rows change places."""
    families: dict[str, dict[str, Any]] = {
        "Phi3ForCausalLM": {"rotary_width": 8},
        "Glm4ForCausalLM": {"rotary_width": 8, "qkv_bias": True, "post_norms": True},
    }
    for name, more in families.items():
        (tmp_path / name).mkdir()
        config = dataclasses.replace(CONFIG, architecture=name, num_layers=1, **more)
        folder = write(tmp_path / name, kind, config=config)
        _, params = load_target(folder, mesh=make_mesh(tp=2))
        assert len(matrices(params)) == 4
        assert_stands_for(params, tmp_path / name)


def test_a_target_inside_a_model_that_also_sees(tmp_path: Path) -> None:
    """Its linears have a prefix, in the tensors and in what is left whole."""
    config = dataclasses.replace(CONFIG, architecture="Ministral3ForCausalLM")
    more = {"modules_to_not_convert": ["model.vision_tower", "language_model.layers.1.mlp"]}
    folder = write(tmp_path, "fp8 by tensor", whole=("layers.1.mlp",), config=config, **more)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored(folder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    inner = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "quantization_config": inner.pop("quantization_config"),
        "text_config": inner,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    _, params = load_target(folder, dtype="float32")
    assert len(matrices(params)) == 6
    assert_stands_for(params, tmp_path)
    assert target_bytes(folder, dtype="float32") == sum(
        leaf.nbytes for leaf in jax.tree.leaves(params)
    )
    with pytest.raises(ValueError, match="part of a model that also sees"):
        quantise(folder, "fp8", tmp_path / "out")


@each_row("kind", ["fp8 by block", "W4A16", "GPTQ v1 act-order"])
def test_experts_are_dequantised(tmp_path: Path, kind: str) -> None:
    """On a mesh, too, in the shares of its devices; routers are whole, whatever the file says."""
    rotary, width = LayerConfig(Rotary()), 2 * GROUP
    mixture = dataclasses.replace(rotary, experts=ExpertsConfig(4, 2, width, renormalised=False))
    sparse = dataclasses.replace(
        CONFIG,
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        norm_eps=1e-6,
        kinds=(mixture, rotary),
        pattern=(0, 1),
    )
    folder = write(tmp_path, kind, ("mlp.gate.",), config=sparse)
    config, params = load_target(folder, mesh=make_mesh(fsdp=2, tp=2))
    assert config == sparse and len(matrices(params)) == 2 * 2 + 2
    assert_stands_for(params, tmp_path)
    with pytest.raises(ValueError, match="layers of experts"):
        quantise(tmp_path / "whole", "fp8", tmp_path / "out")


def test_layers_that_are_left_whole_are_whole(tmp_path: Path) -> None:
    """By name, by pattern, by a part of the name, and by a negative override."""
    layer = "model.layers.1.mlp."
    cases: dict[str, dict[str, Any]] = {
        "W4A16": {"ignore": ["lm_head", "re:.*layers\\.1\\.mlp\\..*"]},
        "AWQ": {"modules_to_not_convert": ["layers.1.mlp"]},
        "GPTQ v1": {"dynamic": {"-:.*\\.1\\.mlp.*": {}}},
        "fp8 by tensor": {"modules_to_not_convert": [f"{layer}{name}" for name in MLP]},
    }
    for kind, more in cases.items():
        (tmp_path / kind).mkdir()
        folder = write(tmp_path / kind, kind, whole=("layers.1.mlp",), **more)
        _, params = load_target(folder)
        assert len(matrices(params)) == 6
        assert isinstance(params["layers_1"]["mlp"]["down"]["kernel"], jax.Array)
        assert_stands_for(params, tmp_path / kind)


MLP = ("gate_proj", "up_proj", "down_proj")


def test_the_tensors_tell_which_linears_are_whole(tmp_path: Path) -> None:
    """Tools list them in several ways, or not at all; a part of a name is another linear's."""
    qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    cases: dict[str, dict[str, Any]] = {
        # As Qwen's lists routers that this model has not.
        "fp8 by block": {"modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"]},
        "AWQ": {},
        "AWQ symmetric": {"modules_to_not_convert": None},
        "GPTQ v1": {"modules_in_block_to_quantize": [qkv, [f"mlp.{name}" for name in MLP]]},
        "W4A16": {"ignore": []},
    }
    for kind, more in cases.items():
        (tmp_path / kind).mkdir()
        folder = write(tmp_path / kind, kind, whole=("o_proj",), **more)
        _, params = load_target(folder)
        assert len(matrices(params)) == 3 * CONFIG.num_layers
        assert_stands_for(params, tmp_path / kind)
    folder = tmp_path / "fp8 by block" / "quantised"
    tensors = stored(folder)
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is quantised as fp8, and the weights hold none"):
        load_target(folder)


def test_scales_of_fp8_have_either_name(tmp_path: Path) -> None:
    """AutoFP8 names them as compressed-tensors does."""
    folder = write(tmp_path, "fp8 by tensor", ignored_layers=["lm_head"])
    tensors = {
        name.replace("_scale_inv", "_scale"): tensor for name, tensor in stored(folder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    _, params = load_target(folder)
    assert_stands_for(params, tmp_path)


@each_row("kind", ["GPTQ v1", "GPTQ v1 act-order"])
def test_biases_of_zeros_are_those_of_the_tool(tmp_path: Path, kind: str) -> None:
    """AutoGPTQ gives all linears one; any other number is a model with biases."""
    folder = write(tmp_path, kind)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    linears = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    biases = {
        f"{name}.bias": np.zeros(len(tensors[f"{name}.scales"].T), np.float16) for name in linears
    }
    save_file(tensors | biases, file)
    _, params = load_target(folder)
    assert_stands_for(params, tmp_path)
    biases[f"{linears[0]}.bias"][3] = 0.1
    save_file(tensors | biases, file)
    with pytest.raises(ValueError, match=f"unexpected {linears[0]}.bias"):
        load_target(folder)


def test_zero_points_of_the_second_version_under_the_name_of_the_first(tmp_path: Path) -> None:
    """Symmetric codes have their zero in the middle, as the file says."""
    folder = write(tmp_path, "GPTQ v1")
    file = folder / "model.safetensors"
    tensors = {
        name: tensor + 0x11111111 if name.endswith("qzeros") else tensor
        for name, tensor in load_file(file).items()
    }
    assert all((tensors[name] == -0x77777778).all() for name in tensors if "qzeros" in name)
    save_file(tensors, file)
    _, params = load_target(folder)
    assert_stands_for(params, tmp_path)


def test_groups_of_linears_have_formats_of_their_own(tmp_path: Path) -> None:
    """A pattern comes before the class, and an override of GPTQ before its own numbers."""
    folder = write(tmp_path, "W4A16", whole=("layers.0.mlp",))
    tensors = load_file(folder / "model.safetensors")
    dense = load_file(tmp_path / "whole" / "model.safetensors")
    random, draw = np.random.default_rng(3), packed(8, GROUP)
    for name in MLP:
        linear = f"model.layers.0.mlp.{name}"
        own, dense[f"{linear}.weight"] = draw(random, *tensors.pop(f"{linear}.weight").shape)
        tensors |= {f"{linear}.{suffix}": value for suffix, value in own.items()}
    save_file(tensors, folder / "model.safetensors")
    save_file(dense, tmp_path / "whole" / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    groups = raw["quantization_config"]["config_groups"]
    groups["group_1"] = {
        "targets": ["re:.*layers\\.0\\.mlp.*"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP},
    }
    (folder / "config.json").write_text(json.dumps(raw))
    _, params = load_target(folder)
    assert_stands_for(params, tmp_path)
    assert params["layers_0"]["mlp"]["down"]["kernel"].codes.dtype == jnp.int8


IN_4_BITS = compressed("pack-quantized", num_bits=4)
REFUSED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4-pack-quantized of float in 4 bits by tensor_group": compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"
    ),
    "version='gemv'": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "bits=3": {"quant_method": "gptq", "bits": 3, "group_size": 32},
    "checkpoint_format='marlin'": dict(quant_method="gptq", bits=4, checkpoint_format="marlin"),
    "fmt='e5m2'": {"quant_method": "fp8", "fmt": "e5m2"},
    "quantization_status='frozen'": IN_4_BITS | {"quantization_status": "frozen"},
    "rotated weights": IN_4_BITS
    | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
    "sparse weights": IN_4_BITS | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "group_size": {"quant_method": "gptq", "bits": 4, "group_size": "many"},
    "group_size=0": {"quant_method": "awq", "bits": 4, "group_size": 0},
    "bits=8": {"quant_method": "awq", "bits": 8, "group_size": 32},
    "is_marlin_format": {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
    "'[' is not a pattern": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:[": {}}},
    "'lm_[' is not a pattern": IN_4_BITS | {"ignore": ["re:lm_["]},
    "nor more than 6 parts": IN_4_BITS | {"ignore": ["re:" + ".*" * 7 + "!"]},
    "must be two sizes, outputs and inputs": {"quant_method": "fp8", "weight_block_size": [128]},
    "must name the quantised linears": IN_4_BITS | {"config_groups": {}},
    "scales of weights are stored": compressed("pack-quantized", num_bits=4, dynamic=True),
    "actorder='best'": compressed("pack-quantized", num_bits=4, group_size=32, actorder="best"),
}
"""Words of the sentence that refuses a format, and the format."""


@each_row("named", REFUSED)
def test_other_formats_are_refused_by_name(tmp_path: Path, named: str) -> None:
    folder = write(tmp_path, "W4A16")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": REFUSED[named]}))
    with pytest.raises(ValueError, match=re.escape(named)) as refusal:
        load_target(folder)
    assert "config.json" in str(refusal.value)


def test_files_that_disagree_with_their_configuration_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "GPTQ v1")
    file = folder / "model.safetensors"
    tensors, raw = load_file(file), json.loads((folder / "config.json").read_text())
    name = "model.layers.0.mlp.down_proj"

    def refused(match: str, changed: dict[str, np.ndarray], **said: Any) -> None:
        save_file(changed, file)
        quantised = raw["quantization_config"] | said
        (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantised}))
        with pytest.raises(ValueError, match=re.escape(match)):
            load_target(folder)

    refused(f"{name} is whole, and the weights hold g_idx, qweight, qzeros, scales",
            tensors, dynamic={f"-:{name}": {}})  # fmt: skip
    refused("must be quantised alike", tensors, dynamic={".*k_proj": {"group_size": 16}})
    refused("q_proj.qweight is I32 (8, 64), config.json describes I32 (16, 64)", tensors, bits=8)
    some = {key: value for key, value in tensors.items() if key != f"{name}.scales"}
    refused(f"no {name}.scales", some)
    refused("zero points other than 8", tensors, checkpoint_format="gptq_v2")
    wrong = tensors | {f"{name}.g_idx": np.zeros(96, np.int32)}
    refused("not all of the size 32", wrong)
    order = np.random.default_rng(0).permutation(np.arange(64) // 32).astype(np.int32)
    refused("in different orders", tensors | {"model.layers.0.mlp.up_proj.g_idx": order})
    refused("unexpected model.layers.0.mlp.act.scales",
            tensors | {"model.layers.0.mlp.act.scales": np.ones(96, np.float16)})  # fmt: skip
    bad = tensors[f"{name}.scales"].copy()
    bad[1, 3] = np.nan
    refused("holds NaN or infinite values", tensors | {f"{name}.scales": bad})
    refused("LM heads, embeddings and experts are read whole", tensors | {"lm_head.qweight": order})


def test_a_quantised_target_is_not_saved_as_a_whole_one(tmp_path: Path) -> None:
    config, params = load_target(write(tmp_path, "AWQ"))
    with pytest.raises(ValueError, match="quantised; copy the folder it was loaded from"):
        save_target(tmp_path / "again", config, params)


def test_scales_of_a_cache_are_read_where_it_is_asked_for(tmp_path: Path) -> None:
    """One a layer or one a head. Only some layers' are refused, and so is a bad scale."""
    folder = write(tmp_path, "W8A16")
    file, attention = folder / "model.safetensors", "model.layers.{}.self_attn.{}".format
    tensors = load_file(file)
    for layer in range(CONFIG.num_layers):
        tensors[attention(layer, "k_scale")] = np.asarray(0.25 + layer, np.float32)
        tensors[attention(layer, "v_scale")] = np.asarray([0.5, 2.0], np.float16)
    save_file(tensors, file)
    config, _ = load_target(folder)
    assert config == CONFIG
    config, _ = load_target(folder, kv_dtype="fp8")
    assert config.kv_dtype == "fp8"
    assert config.kv_scales == (HeadScales((0.25,), (0.5, 2.0)), HeadScales((1.25,), (0.5, 2.0)))
    save_file(tensors | {attention(1, "k_scale"): np.asarray(-1.0, np.float32)}, file)
    with pytest.raises(ValueError, match="k_scale is float32 .* are positive numbers"):
        load_target(folder, kv_dtype="fp8")
    del tensors[attention(1, "v_scale")]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="none for the values of layer 1; load it without"):
        load_target(folder, kv_dtype="fp8")


def test_one_old_scale_is_that_of_keys_and_values(tmp_path: Path) -> None:
    """And scales of 1 are none."""
    folder = write(tmp_path, "W8A16")
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for layer in range(CONFIG.num_layers):
        name = f"model.layers.{layer}.self_attn.kv_scale"
        tensors[name] = np.asarray([1.0 + layer], np.float32)
    save_file(tensors, file)
    config, _ = load_target(folder, kv_dtype="fp8")
    assert config.kv_scales == (None, HeadScales((2.0,), (2.0,)))
